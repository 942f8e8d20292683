"""What goes into a step and what comes out of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib
from ._handle import U32_MAX, NotPicklable, WaitTimes, timeout_us, waits_for_signals, whole
from ._tensor import F32, I32, address_of, empty
from .errors import AttndError, check, error_of, last_gone

if TYPE_CHECKING:
    from .pool import Pool, Sequence

PENDING = -(2**31)  # no status: an item of a step that has not ended


class Item(NamedTuple):
    """One sequence's part of a step: n_tokens tokens at positions pos, pos + 1, ...

    pos is at most the layer's length; below it the same tokens are written again.
    """

    seq: Sequence
    pos: int
    n_tokens: int


class Result(NamedTuple):
    """What a step gave. T is the sum of its items' n_tokens, rows are in the items' order.

    out          [T, num_q_heads, head_dim_v or out_dim] in the arrays' dtype; None without q
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


class Prepared:
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
        parents: Iterable[int] | None = None,
        is_full: bool = False,
        indices: Any = None,
        index_tokens: int = 1,
        choose_blocks: int = 0,
        parts: Iterable[tuple[int, int]] | None = None,
    ):
        if not isinstance(items, Items):
            items = Items(items)
        spec, dtype, n = pool.spec, pool._dtype, items.n_tokens
        q_heads, kv_heads = spec.num_q_heads, spec.num_kv_heads
        dim_k, dim_v = spec.head_dim_k, spec.head_dim_v
        dim_q, dim_out = spec.q_row, spec.out_row
        keep: list[Any] = [items]
        self.c = c = _lib.Step(
            ctypes.sizeof(_lib.Step), whole("layer", layer), items.n_items, dtype
        )
        c.items = items.c
        if timeout is not None:
            c.timeout_us = timeout_us(timeout)

        def point(array: Any, name: str, kind: int, shape: tuple[int, ...], is_out: bool) -> int:
            address, owner = address_of(array, name, kind, shape, is_out)
            keep.append(owner)
            return address

        if q is not None:
            c.q = point(q, "q", dtype, (n, q_heads, dim_q), False)
            if out is None:
                out = empty(q, (n, q_heads, dim_out), dtype)
            if lse is True:
                lse = empty(q, (n, q_heads), F32)
        if k is not None:
            c.k = point(k, "k", dtype, (n, kv_heads, dim_k), False)
        if v is not None:
            if spec.is_v_in_k:
                raise ValueError("v is given, the pool has it in k (is_v_in_k)")
            c.v = point(v, "v", dtype, (n, kv_heads, dim_v), False)
        if out is not None:
            c.out = point(out, "out", dtype, (n, q_heads, dim_out), True)
        c.is_full = is_full
        c.choose_blocks = whole("choose_blocks", choose_blocks)
        if parts is not None:
            rows = [(whole("key_base", base), whole("n_keys", n_keys)) for base, n_keys in parts]
            if len(rows) != items.n_items:
                raise ValueError(f"parts has {len(rows)} entries, the step has {items.n_items} items")
            c.parts = (_lib.Part * max(1, len(rows)))(*rows)
            keep.append(c.parts)
        if indices is not None:
            shape = tuple(getattr(indices, "shape", ()))
            if len(shape) != 2 or shape[1] == 0:
                raise ValueError(f"indices has shape {list(shape)}, expected [{n}, 1 or more]")
            c.n_indices, c.index_tokens = shape[1], whole("index_tokens", index_tokens)
            c.indices = point(indices, "indices", I32, (n, shape[1]), False)
        elif index_tokens != 1:
            raise ValueError(f"index_tokens is {index_tokens!r}, without indices")
        if parents is not None:
            values = [int(p) for p in parents]
            if len(values) != n:
                raise ValueError(f"parents has {len(values)} elements, the step has {n} tokens")
            c.parents = (ctypes.c_int32 * n)(*values)
            keep.append(c.parents)
        if lse is True:
            raise ValueError("lse without q")
        if lse is not None and lse is not False:
            c.lse = point(lse, "lse", F32, (n, q_heads), True)
        else:
            lse = None
        self.out, self.lse = out, lse
        self.item_status = (ctypes.c_int32 * max(1, items.n_items))(PENDING)
        c.item_status = self.item_status
        self._keep = keep

    def again(
        self, layer: int, pos: int, addresses: list[int], timeout: float | None
    ) -> None:
        """The step of one item, once it has ended, as another one: at another position, with q, k and v
        at addresses that the caller keeps, 0 for none."""
        c = self.c
        c.layer, self.c.items[0].pos = whole("layer", layer), whole("pos", pos)
        c.q, c.k, c.v = addresses
        c.timeout_us = timeout_us(timeout)
        self.item_status[0] = PENDING

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


class InPlace(Prepared):
    """A step whose tensors lie where the daemon reads and writes them (attn_in_place).

    fill  is given the addresses of q, k and v in the message (None: not part of it) and writes them
    take  is given that of out in the answer and reads it
    Both are called as attn.h says, on whichever thread waits for the client. What they raise is
    raised by the step, after it; an interrupt does not keep fill from being whole.
    """

    __slots__ = ("_failed",)

    def __init__(
        self,
        layer: int,
        items: Items,
        has_kv: bool,
        fill: Callable[[int, int | None, int | None], None],
        take: Callable[[int], None],
    ):
        self._failed: BaseException | None = None

        def on_fill(user: int, q: int, k: int | None, v: int | None) -> None:
            while True:
                try:
                    return fill(q, k, v)
                except KeyboardInterrupt as e:
                    self._failed = e  # once it is whole
                except BaseException as e:
                    self._failed = e
                    return

        def on_take(user: int, out: int, lse: int | None, n_failed: int) -> None:
            try:
                take(out)
            except BaseException as e:
                self._failed = e

        callbacks = _lib.FILL_CB(on_fill), _lib.TAKE_CB(on_take)
        in_place = _lib.InPlace(has_kv, True, False, *callbacks)
        self.c = c = _lib.Step(ctypes.sizeof(_lib.Step), whole("layer", layer), items.n_items)
        c.items, c.in_place = items.c, ctypes.addressof(in_place)
        self.out = self.lse = None
        self.item_status = (ctypes.c_int32 * max(1, items.n_items))(PENDING)
        c.item_status = self.item_status
        self._keep = [items, in_place, callbacks]

    def finish(self, r: _lib.StepResult) -> Result:
        if self._failed is not None:
            raise self._failed
        return super().finish(r)


def new_result() -> _lib.StepResult:
    return _lib.StepResult(struct_size=ctypes.sizeof(_lib.StepResult))


class Step(NotPicklable):
    """A step that was started by Pool.step_start(). wait() for it once or more.

    Its arrays are the library's until wait() returns or the client is closed: leave q, k and v
    unchanged and out unread.
    """

    def __init__(self, pool: Pool, prepared: Prepared, ticket: int):
        self._pool = pool
        self._prepared = prepared
        self._ticket = ticket
        self._outcome: Result | AttndError | None = None
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Its answer has come, or its deadline passed: Client.poll() looks for that, wait() returns
        at once."""
        return bool(self._prepared.item_status[0] != PENDING)

    def wait(self) -> Result:
        """The step's Result; raises as Pool.step() does. The step's own deadline bounds the wait."""
        with self._lock:
            if self._outcome is None:
                self._outcome = self._wait()
        if isinstance(self._outcome, AttndError):
            raise self._outcome
        return self._outcome

    def _wait(self) -> Result | AttndError:
        pool, r = self._pool, new_result()
        client = pool.client
        if waits_for_signals():
            wait = WaitTimes()
            while not self.is_done:
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
