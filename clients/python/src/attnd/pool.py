"""Pools, the sequences in them, and steps."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib
from ._handle import (
    U32_MAX,
    U64_MAX,
    Closing,
    Guard,
    NotPicklable,
    WaitTimes,
    timeout_us,
    waits_for_signals,
    whole,
)
from ._tensor import DTYPES, F32, address_of, empty
from .errors import AttndError, check, error_of, last_gone
from .spec import PoolSpec, from_c

if TYPE_CHECKING:
    from .client import Client

_NO_CALLBACK = _lib.STEP_CB()
_PENDING = -(2**31)  # no status: an item of a step that has not ended


class Item(NamedTuple):
    """One sequence's part of a step: n_tokens tokens at positions pos, pos + 1, ...

    pos is at most the layer's length; below it the same tokens are written again.
    """

    seq: Sequence
    pos: int
    n_tokens: int


class Result(NamedTuple):
    """What a step gave. T is the sum of its items' n_tokens, rows are in the items' order.

    out          [T, num_q_heads, head_dim_v] in q_dtype; None without q
    lse          [T, num_q_heads] float32, natural logarithm; None if not wanted
    item_status  a status for each item, 0 is ok; rows of failed items are NaN
    queue_ns     nanoseconds the step waited in the daemon
    device_ns    of the batch it was in, on the device
    total_ns     from the call to completion, as seen here
    n_sends      1 unless it was retried or sent again
    """

    out: Any
    lse: Any
    item_status: tuple[int, ...]
    queue_ns: int
    device_ns: int
    total_ns: int
    n_sends: int


class Items:
    """Items made ready once, for the steps of every layer. Made by Pool.items()."""

    __slots__ = ("c", "n_items", "n_tokens")

    def __init__(self, items: Iterable[Item | tuple[Sequence, int, int]]):
        rows = list(items)
        self.n_items = len(rows)
        self.n_tokens = 0
        self.c = (_lib.Item * max(1, len(rows)))()
        for c, (seq, pos, n_tokens) in zip(self.c, rows):
            if not (0 <= pos <= U32_MAX and 1 <= n_tokens <= U32_MAX):
                raise ValueError(f"sequence {seq.id}: pos {pos}, n_tokens {n_tokens}")
            try:
                c.seq.id, c.seq.epoch, c.pos, c.n_tokens = seq.id, seq.epoch, pos, n_tokens
            except TypeError:
                raise TypeError(f"sequence {seq.id}: pos {pos!r}, n_tokens {n_tokens!r}") from None
            self.n_tokens += n_tokens


class _Prepared:
    """A step's C struct and everything it points to."""

    __slots__ = ("c", "out", "lse", "item_status", "_keep")

    def __init__(
        self,
        pool: Pool,
        layer: int,
        items: Items | Iterable[Item | tuple[Sequence, int, int]],
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        timeout: float | None,
    ):
        if not isinstance(items, Items):
            items = Items(items)
        spec, dtype, n = pool.spec, pool._dtype, items.n_tokens
        q_heads, kv_heads = spec.num_q_heads, spec.num_kv_heads
        dim_k, dim_v = spec.head_dim_k, spec.head_dim_v
        keep: list[Any] = [items]
        self.c = c = _lib.Step(ctypes.sizeof(_lib.Step), whole("layer", layer), items.n_items)
        c.items = ctypes.cast(items.c, ctypes.POINTER(_lib.Item))
        c.timeout_us = timeout_us(timeout)

        def point(array: Any, name: str, kind: int, shape: tuple[int, ...], is_out: bool) -> int:
            address, owner = address_of(array, name, kind, shape, is_out)
            keep.append(owner)
            return address

        if q is not None:
            c.q = point(q, "q", dtype, (n, q_heads, dim_k), False)
            if out is None:
                out = empty(q, (n, q_heads, dim_v), dtype)
            if lse is True:
                lse = empty(q, (n, q_heads), F32)
        if k is not None:
            c.k = point(k, "k", dtype, (n, kv_heads, dim_k), False)
        if v is not None:
            c.v = point(v, "v", dtype, (n, kv_heads, dim_v), False)
        if out is not None:
            c.out = point(out, "out", dtype, (n, q_heads, dim_v), True)
        if lse is True:
            raise ValueError("lse without q")
        if lse is not None and lse is not False:
            c.lse = point(lse, "lse", F32, (n, q_heads), True)
        else:
            lse = None
        self.out, self.lse = out, lse
        self.item_status = (ctypes.c_int32 * max(1, items.n_items))(_PENDING)
        c.item_status = ctypes.cast(self.item_status, ctypes.POINTER(ctypes.c_int32))
        self._keep = keep

    def result(self, r: _lib.StepResult) -> Result:
        return Result(
            self.out,
            self.lse,
            tuple(self.item_status[: self.c.n_items]),
            r.queue_ns,
            r.device_ns,
            r.total_ns,
            r.n_sends,
        )

    def finish(self, r: _lib.StepResult) -> Result:
        """The result, or its exception, which carries the result if only some items failed."""
        if r.status == 0:
            return self.result(r)
        message = r.message.decode("utf-8", "replace")
        error = error_of(r.status, message, r.retry_after_us, last_gone(r.status))
        if 0 < r.n_failed < self.c.n_items:
            error.result = self.result(r)
        raise error


def _new_result() -> _lib.StepResult:
    return _lib.StepResult(struct_size=ctypes.sizeof(_lib.StepResult))


class Step(NotPicklable):
    """A step that was started by Pool.step_start(). wait() for it once or more.

    Its arrays are the library's until wait() returns or the client is closed: leave q, k and v
    unchanged and out unread.
    """

    def __init__(self, pool: Pool, prepared: _Prepared, ticket: int):
        self._pool = pool
        self._prepared = prepared
        self._ticket = ticket
        self._outcome: Result | AttndError | None = None
        self._lock = threading.Lock()

    def wait(self) -> Result:
        """The step's Result; raises as Pool.step() does. The step's own deadline bounds the wait."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._wait()
        if isinstance(self._outcome, AttndError):
            raise self._outcome
        return self._outcome

    def _wait(self) -> Result | AttndError:
        pool, r = self._pool, _new_result()
        client = pool.client
        if waits_for_signals():
            wait = WaitTimes()
            while self._prepared.item_status[0] == _PENDING:
                client.poll_once(next(wait))
        try:
            with client._guard:
                status = pool._lib.attn_step_wait(client._handle, self._ticket, ctypes.byref(r))
                if status != 0 and r.status == 0:  # the call itself was wrong
                    check(status)
            return self._prepared.finish(r)
        except AttndError as e:
            return e
        finally:
            pool._steps.pop(self._ticket, None)


class Sequence(Closing, NotPicklable):
    """A growing list of cached tokens, named by a 64-bit id. Made by Pool.open() and the like.

    Belongs to the session that opened or adopted it last. As a context manager it closes itself.

    id         unique among all clients of the daemon
    epoch      raised by each adoption and truncation; holders of an older one get StaleEpochError
    layer_len  tokens of each layer when it was forked or adopted, else ()
    """

    def __init__(self, pool: Pool, c: _lib.Seq, layer_len: tuple[int, ...] = ()):
        self.pool = pool
        self.id: int = c.id
        self.epoch: int = c.epoch
        self.layer_len = layer_len
        self.is_closed = False

    def _c(self) -> _lib.Seq:
        return _lib.Seq(self.id, self.epoch)

    def fork(
        self,
        new_id: int | None = None,
        n_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Sequence:
        """A new sequence that shares this one's first n_tokens (None: all that every layer has).

        Copies nothing; blocks are shared until one side writes. new_id None: a random id.
        """
        pool = self.pool
        c, lens = _lib.Seq(), (ctypes.c_uint32 * pool.spec.num_layers)()
        with pool._inside():
            check(
                pool._lib.attn_seq_fork(
                    pool._handle,
                    ctypes.byref(self._c()),
                    _random_id() if new_id is None else whole("new_id", new_id, U64_MAX),
                    (
                        _lib.ALL_TOKENS
                        if n_tokens is None
                        else whole("n_tokens", n_tokens, _lib.ALL_TOKENS - 1)
                    ),
                    timeout_us(timeout),
                    ctypes.byref(c),
                    lens,
                )
            )
        return Sequence(pool, c, tuple(lens))

    def truncate(self, n_tokens: int, *, timeout: float | None = None) -> None:
        """Forgets tokens from n_tokens on, in every layer, and raises the epoch."""
        pool, c = self.pool, self._c()
        with pool._inside():
            check(
                pool._lib.attn_seq_truncate(
                    pool._handle,
                    ctypes.byref(c),
                    whole("n_tokens", n_tokens),
                    timeout_us(timeout),
                )
            )
        self.epoch = c.epoch

    def adopt(self, *, timeout: float | None = None) -> None:
        """Takes the sequence (back) under a new epoch; sets epoch and layer_len."""
        other = self.pool.adopt(self.id, timeout=timeout)
        self.epoch, self.layer_len = other.epoch, other.layer_len

    def close(self, *, timeout: float | None = None) -> None:
        """Forgets the sequence and frees its blocks. Safe to call again."""
        if self.is_closed:
            return
        pool = self.pool
        with pool._inside():
            check(
                pool._lib.attn_seq_close(pool._handle, ctypes.byref(self._c()), timeout_us(timeout))
            )
        self.is_closed = True

    def __exit__(self, *exc: Any) -> None:
        if not self.pool.client.is_closed:
            super().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<attnd.Sequence {self.id} epoch {self.epoch}>"


def _random_id() -> int:
    return int.from_bytes(os.urandom(8), "little")


class _Both:
    """Inside a client's and a pool's guard."""

    __slots__ = ("_client", "_pool")

    def __init__(self, client: Guard, pool: Guard):
        self._client, self._pool = client, pool

    def __enter__(self) -> None:
        self._client.__enter__()
        try:
            self._pool.__enter__()
        except BaseException:
            self._client.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        self._pool.__exit__()
        self._client.__exit__()


class Pool(Closing, NotPicklable):
    """One KV geometry in the daemon, found or made by a Client.

    spec           as the daemon has it, defaults filled in
    n_free_blocks  when this handle was made
    """

    def __init__(self, client: Client, handle: ctypes.c_void_p):
        self.client = client
        self._lib = _lib.library()
        self._handle = handle
        self.spec: PoolSpec = from_c(self._lib.attn_pool_spec_of(handle).contents)
        self.n_free_blocks: int = self._lib.attn_pool_free_blocks(handle)
        self._dtype = DTYPES[self.spec.q_dtype]
        self._guard = Guard(f"pool {self.spec.name!r}")
        self._steps: dict[int, Step] = {}

    def _inside(self) -> _Both:
        return _Both(self.client._guard, self._guard)

    # ---- sequences

    def open(self, seq_id: int | None = None, *, timeout: float | None = None) -> Sequence:
        """A new, empty sequence; seq_id None: a random id.

        Raises AlreadyExistsError, OverloadedError, DrainingError.
        """
        c = _lib.Seq()
        with self._inside():
            check(
                self._lib.attn_seq_open(
                    self._handle,
                    _random_id() if seq_id is None else whole("seq_id", seq_id, U64_MAX),
                    timeout_us(timeout),
                    ctypes.byref(c),
                )
            )
        return Sequence(self, c)

    def adopt(self, seq_id: int, *, timeout: float | None = None) -> Sequence:
        """Takes over a sequence of any session; whoever had it gets StaleEpochError from now on.

        layer_len of what comes back tells how many tokens each layer has. Raises NotFoundError.
        """
        c, lens = _lib.Seq(), (ctypes.c_uint32 * self.spec.num_layers)()
        with self._inside():
            check(
                self._lib.attn_seq_adopt(
                    self._handle,
                    whole("seq_id", seq_id, U64_MAX),
                    timeout_us(timeout),
                    ctypes.byref(c),
                    lens,
                )
            )
        return Sequence(self, c, tuple(lens))

    # ---- steps

    def items(self, items: Iterable[Item | tuple[Sequence, int, int]]) -> Items:
        """Makes items ready once, to be given to step() for every layer.

        Takes Item or (sequence, pos, n_tokens). The epochs are those of this moment.
        """
        return Items(items)

    def step(
        self,
        layer: int,
        items: Items | Iterable[Item | tuple[Sequence, int, int]],
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        timeout: float | None = None,
    ) -> Result:
        """One layer's new tokens of some sequences: appends k and v, then q attends over the cache.

        Shapes  T is the sum of n_tokens; rows are in the order of items, then of tokens
                q    [T, num_q_heads, head_dim_k]    None: append only
                k    [T, num_kv_heads, head_dim_k]   None with v: attend only
                v    [T, num_kv_heads, head_dim_v]
                out  [T, num_q_heads, head_dim_v]    None: a new array of q's library
                lse  True, or [T, num_q_heads] float32 to write to; natural logarithm
        Dtype   the pool's q_dtype; bf16 as torch.bfloat16, ml_dtypes.bfloat16 or uint16
        Arrays  numpy or any DLPack tensor, in host memory, contiguous; read and written in place
        Units   timeout in seconds, None: the client's

        Raises InvalidArgumentError (shapes, limits, a position gap), NotFoundError or
        StaleEpochError (a sequence), OutOfBlocksError, OverloadedError, DeadlineError,
        TimedOutError, ConnectionLostError; TypeError and ValueError for arrays that do not fit.
        If only some items failed the exception is that of the first, and its `result` has the
        outputs of the others.
        """
        p = _Prepared(self, layer, items, q, k, v, out, lse, timeout)
        if waits_for_signals():
            return self._start(p).wait()
        r = _new_result()
        with self._inside():
            status = self._lib.attn_step(self._handle, ctypes.byref(p.c), ctypes.byref(r))
            if status != 0 and r.status == 0:  # the call itself was wrong
                check(status)
        return p.finish(r)

    def step_start(
        self,
        layer: int,
        items: Items | Iterable[Item | tuple[Sequence, int, int]],
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        timeout: float | None = None,
    ) -> Step:
        """Sends a step as step() does and returns at once; several may be in flight.

        Wait for each: until then it counts against the client's 1024, and its arrays are kept.
        """
        return self._start(_Prepared(self, layer, items, q, k, v, out, lse, timeout))

    def _start(self, p: _Prepared) -> Step:
        ticket = ctypes.c_uint64()
        with self._inside():
            check(
                self._lib.attn_step_start(
                    self._handle, ctypes.byref(p.c), _NO_CALLBACK, None, ctypes.byref(ticket)
                )
            )
            step = self._steps[ticket.value] = Step(self, p, ticket.value)
        return step

    def _step_start_cb(self, p: _Prepared, done: Callable[[_lib.StepResult], None]) -> None:
        """Starts a step and has done(result) called once, on a thread inside a waiting call."""
        key = next(_keys)
        with self._inside():
            _waiting[key] = self, p, done
            status = self._lib.attn_step_start(
                self._handle, ctypes.byref(p.c), _on_step_c, key, None
            )
            if status != 0:
                del _waiting[key]
                check(status)

    def _wait_for_steps(self) -> None:
        for step in list(self._steps.values()):
            try:
                step.wait()
            except AttndError:
                pass  # its owner asks, or does not care
        while any(pool is self for pool, _, _ in list(_waiting.values())):
            self.client.poll(0.02)

    def close(self) -> None:
        """Waits for its steps in flight and frees the handle; the pool itself is the daemon's.

        Safe to call again. Closing the client closes its pools.
        """
        if not (self.client.is_closed or self._guard.is_inherited):
            self._wait_for_steps()
        if not self._guard.close():
            return
        self._lib.attn_pool_close(self._handle)
        self.client._pools.discard(self)

    def __repr__(self) -> str:
        return f"<attnd.Pool {self.spec.name!r}>"


# Steps with a callback, by the number the library carries for us; kept until they complete.
_waiting: dict[int, tuple[Pool, _Prepared, Callable[[_lib.StepResult], None]]] = {}
_keys = itertools.count(1)


def _on_step(user: int, ticket: int, result: Any) -> None:
    _, _, done = _waiting.pop(user)
    done(result.contents)


_on_step_c = _lib.STEP_CB(_on_step)
