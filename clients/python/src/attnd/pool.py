"""Pools, the sequences in them, and steps."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib
from ._calls import Calls, Probe, probe_of
from ._handle import (
    U32_MAX,
    U64_MAX,
    Closing,
    Guard,
    NotPicklable,
    interruptible,
    random_id,
    timeout_us,
    token_ids,
    waits_for_signals,
    whole,
)
from ._step import PENDING, Item, Items, Prepared, Result, Step, new_result
from ._tensor import DTYPES, address_of
from .errors import AttndError, check
from .spec import PoolSpec, from_c

__all__ = ["Item", "Items", "Pool", "Result", "Sequence", "SequenceFile", "Step", "sequence_file"]

if TYPE_CHECKING:
    from .client import Client

_NO_CALLBACK = _lib.STEP_CB()


def address_of_weights(spec: PoolSpec, weights: Any) -> tuple[int, int, Any]:
    """Where a layer's weights are, how many bytes, and what keeps them there. Raises TypeError and
    ValueError where the pool's would be others."""
    shape = (spec.num_q_heads, spec.q_nope_dim + spec.out_dim, spec.head_dim_v)
    if spec.q_nope_dim == 0:
        raise ValueError(f"pool {spec.name!r} has no projections (q_nope_dim)")
    address, owner = address_of(weights, "weights", DTYPES[spec.q_dtype], shape)
    return address, math.prod(shape) * (4 if spec.q_dtype == "f32" else 2), owner


class Sequence(Closing, NotPicklable):
    """A growing list of cached tokens, named by a 64-bit id. Made by Pool.open() and the like.

    Belongs to the session that opened or adopted it last. As a context manager it closes itself.

    id         unique among all clients of the daemon
    epoch      raised by each adoption and truncation; holders of an older one get StaleEpochError
    layer_len  tokens of each layer when it was forked or adopted, else ()
    n_cached   tokens that every layer had when it was opened
    """

    def __init__(self, pool: Pool, c: _lib.Seq, layer_len: tuple[int, ...] = (), n_cached: int = 0):
        self.pool = pool
        self.n_cached = n_cached
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
        new_id = random_id() if new_id is None else whole("new_id", new_id, U64_MAX)
        n = _lib.ALL_TOKENS
        if n_tokens is not None:
            n = whole("n_tokens", n_tokens, _lib.ALL_TOKENS - 1)
        us, c = timeout_us(timeout), self._c()

        def fork() -> Sequence:
            new, lens = _lib.Seq(), (ctypes.c_uint32 * pool.spec.num_layers)()
            check(
                pool._lib.attn_seq_fork(
                    pool._handle, ctypes.byref(c), new_id, n, us, ctypes.byref(new), lens
                )
            )
            return Sequence(pool, new, tuple(lens))

        return interruptible(fork, Sequence._forget, pool._inside())

    def set_tokens(self, pos: int, tokens: Iterable[int], *, timeout: float | None = None) -> None:
        """Says which tokens are at pos and behind, appended already or not.

        Full blocks of known tokens are shared with sequences that are opened with the same ones.
        Raises InvalidArgumentError: those before pos are not known, or one is known as another.
        """
        pool, c = self.pool, self._c()
        pos, us, ids = whole("pos", pos, U32_MAX), timeout_us(timeout), token_ids(tokens)

        def set_tokens() -> None:
            check(pool._lib.attn_seq_tokens(pool._handle, ctypes.byref(c), pos, ids, len(ids), us))

        interruptible(set_tokens, guard=pool._inside())

    def set_note(self, note: bytes, *, timeout: float | None = None) -> None:
        """Sets what whoever adopts the sequence is to know, at most 4096 bytes, in place of what was
        set before; b"": nothing. It stays with the sequence, also where it moves; a fork begins
        without one. Client.note() reads it. Raises QuotaError: no memory, the one before stays."""
        pool, c, us, note = self.pool, self._c(), timeout_us(timeout), bytes(note)

        def set_note() -> None:
            check(pool._lib.attn_seq_note(pool._handle, ctypes.byref(c), note, len(note), us))

        interruptible(set_note, guard=pool._inside())

    def export(
        self, path: str | os.PathLike[str], *, timeout: float | None = None
    ) -> SequenceFile:
        """Writes K and V, what they mean, and the known token ids to a file.

        The file replaces another as a whole or not at all; only its owner may read it. timeout is
        of each request. Raises FileError (also where a device or a pipe has that name),
        StaleEpochError (truncated to nothing meanwhile).
        """
        pool, us, name = self.pool, timeout_us(timeout), os.fsencode(path)

        def export() -> SequenceFile:
            c = _lib.SeqFile(ctypes.sizeof(_lib.SeqFile))
            check(pool._lib.attn_seq_export(pool.client._handle, self.id, name, us, c))
            return _file_of(c)

        return interruptible(export, guard=pool._inside())

    def move(self, to: Pool, *, timeout: float | None = None) -> Sequence:
        """Takes the sequence to a pool of another daemon, while other threads decode it here.

        Full blocks are copied first. Then steps here are refused with StaleEpochError or
        MovedError, and the last blocks follow: go on with the sequence that this returns.
        If it raises, the sequence is here; unless it is usable, adopt() it. timeout is of each
        request. Raises what export() and import_sequence() do.
        """
        new = self.pool.client.move(self.id, to, timeout=timeout)
        self.is_closed = True
        return new

    def retain(
        self,
        first_token: int = 0,
        *,
        priority: int = 0,
        time_to_live: int = 0,
        pinned: bool = False,
        timeout: float | None = None,
    ) -> None:
        """How long shared blocks from first_token on stay when no sequence has them any more.

        Those of the lowest priority (-3 to 3) are evicted first; of these, those that were not used
        for time_to_live seconds (0: no end; rounded up to a power of two) go before others. Pinned
        ones are never evicted, until somebody with the same tokens says otherwise. Holds in place
        of what was said from first_token on. Raises InvalidArgumentError.
        """
        pool, c = self.pool, self._c()
        first, us = whole("first_token", first_token, U32_MAX), timeout_us(timeout)
        life = whole("time_to_live", time_to_live, U32_MAX)
        r = _lib.Retention(first, priority, life, bool(pinned))

        def retain() -> None:
            lib = pool._lib
            check(lib.attn_seq_retain(pool._handle, ctypes.byref(c), ctypes.byref(r), 1, us))

        interruptible(retain, guard=pool._inside())

    def truncate(self, n_tokens: int, *, timeout: float | None = None) -> None:
        """Forgets tokens from n_tokens on, in every layer, and raises the epoch."""
        pool, c = self.pool, self._c()
        n, us = whole("n_tokens", n_tokens), timeout_us(timeout)

        def truncate() -> None:
            check(pool._lib.attn_seq_truncate(pool._handle, ctypes.byref(c), n, us))
            self.epoch = c.epoch

        interruptible(truncate, guard=pool._inside())

    def commit(self, nodes: Iterable[int], *, timeout: float | None = None) -> None:
        """Keeps a path of the tree that every layer has at the end, and raises the epoch.

        nodes are those of the path, from one whose parent is -1 downwards; the others are dropped,
        with no nodes all of them. A path 0, 1, 2.. is not moved, which costs least. Raises
        InvalidArgumentError (no tree, no path of it), OutOfBlocksError; nothing has changed then.
        """
        pool, c = self.pool, self._c()
        path, us = token_ids(nodes), timeout_us(timeout)

        def commit() -> None:
            lib = pool._lib
            check(lib.attn_seq_commit(pool._handle, ctypes.byref(c), path, len(path), us))
            self.epoch = c.epoch

        interruptible(commit, guard=pool._inside())

    def adopt(self, *, timeout: float | None = None) -> None:
        """Takes the sequence (back) under a new epoch; sets epoch and layer_len."""
        other = self.pool.adopt(self.id, timeout=timeout)
        self.epoch, self.layer_len = other.epoch, other.layer_len

    def close(self, *, timeout: float | None = None) -> None:
        """Forgets the sequence and frees its blocks. Safe to call again."""
        if self.is_closed:
            return
        us = timeout_us(timeout)
        interruptible(lambda: self._forget(us), guard=self.pool._inside())

    def _forget(self, timeout_us: int = 0) -> None:
        """close(), for who is inside already."""
        pool = self.pool
        check(pool._lib.attn_seq_close(pool._handle, ctypes.byref(self._c()), timeout_us))
        self.is_closed = True

    def __exit__(self, *exc: Any) -> None:
        if not self.pool.client.is_closed:
            super().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<attnd.Sequence {self.id} epoch {self.epoch}>"


class SequenceFile(NamedTuple):
    """What the file of an exported sequence holds."""

    id: int  # that the sequence had
    pool: str  # the name of the pool that it was in
    n_tokens: int  # of the longest layer
    n_ids: int  # of its first tokens, ids are known
    n_blocks: int
    n_bytes: int  # of the file
    kv_dtype: str
    adapter: int
    freed: range  # of its blocks these are none: no layer's window reaches them


def _file_of(c: _lib.SeqFile) -> SequenceFile:
    dtype: bytes = _lib.library().attn_dtype_name(c.kv_dtype)
    return SequenceFile(
        c.id,
        c.pool.decode(),
        c.n_tokens,
        c.n_ids,
        c.n_blocks,
        c.bytes,
        dtype.decode(),
        c.adapter,
        range(c.freed_first, c.freed_past),
    )


def sequence_file(path: str | os.PathLike[str]) -> SequenceFile:
    """What a file holds, of which the head is verified. Raises FileError, ProtocolError."""
    c = _lib.SeqFile(ctypes.sizeof(_lib.SeqFile))
    check(_lib.library().attn_seq_file_info(os.fsencode(path), c))
    return _file_of(c)


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

    def abandon(self) -> None:
        self._pool.abandon()
        self._client.abandon()

    def leave_abandoned(self) -> None:
        self._pool.leave_abandoned()
        self._client.leave_abandoned()


class Pool(Closing, NotPicklable):
    """One KV geometry in the daemon, found or made by a Client.

    spec           as the daemon has it, defaults filled in
    n_free_blocks  when this handle was made, or last resized the pool
    """

    def __init__(
        self, client: Client, handle: ctypes.c_void_p, array_dtype: str | None = None
    ):
        self.client = client
        self._lib = _lib.library()
        self._handle = handle
        self.spec: PoolSpec = from_c(self._lib.attn_pool_spec_of(handle).contents)
        self.n_free_blocks: int = self._lib.attn_pool_free_blocks(handle)
        self._dtype = DTYPES[array_dtype or self.spec.q_dtype]  # of the arrays in steps
        self._guard = Guard(f"pool {self.spec.name!r}")
        self._steps: dict[int, Step] = {}
        self._weights: dict[int, Any] = {}  # what the library reads of each layer

    def _inside(self) -> _Both:
        return _Both(self.client._guard, self._guard)

    # ---- sequences

    def open(
        self,
        seq_id: int | None = None,
        *,
        tokens: Iterable[int] = (),
        adapter: int = 0,
        timeout: float | None = None,
    ) -> Sequence:
        """A new sequence; seq_id None: a random id.

        With the ids of its first tokens it begins with what the cache has of them: every layer has
        n_cached tokens, less than were given, and the worker appends from there on. Equal tokens
        must have equal k and v; adapter is a number for what else those depend on (a LoRA, an
        image in the prompt).

        Raises AlreadyExistsError, OverloadedError, DrainingError.
        """
        seq_id = random_id() if seq_id is None else whole("seq_id", seq_id, U64_MAX)
        us, ids = timeout_us(timeout), token_ids(tokens)
        known = _lib.Tokens(ids, len(ids), 0, whole("adapter", adapter, U64_MAX))

        def open_seq() -> Sequence:
            c, n_cached = _lib.Seq(), ctypes.c_uint32()
            check(
                self._lib.attn_seq_open_with(
                    self._handle,
                    seq_id,
                    ctypes.byref(known),
                    us,
                    ctypes.byref(c),
                    ctypes.byref(n_cached),
                )
            )
            return Sequence(self, c, n_cached=n_cached.value)

        return interruptible(open_seq, Sequence._forget, self._inside())

    def probe(
        self, tokens: Iterable[int] = (), *, adapter: int = 0, timeout: float | None = None
    ) -> Probe:
        """What open() with these tokens would find now, and how much room the pool has."""
        us, ids = timeout_us(timeout), token_ids(tokens)
        known = _lib.Tokens(ids, len(ids), 0, whole("adapter", adapter, U64_MAX))

        def probe() -> Probe:
            c = _lib.Probe()
            check(
                self._lib.attn_seq_probe(self._handle, ctypes.byref(known), us, ctypes.byref(c))
            )
            return probe_of(c)

        return interruptible(probe, guard=self._inside())

    def calls(self) -> Calls:
        """Several requests on sequences to be sent in one message: see Calls."""
        return Calls(self)

    def _sequence(
        self, c: _lib.Seq, layer_len: tuple[int, ...] = (), n_cached: int = 0
    ) -> Sequence:
        return Sequence(self, c, layer_len, n_cached)

    def adopt(self, seq_id: int, *, timeout: float | None = None) -> Sequence:
        """Takes over a sequence of any session; whoever had it gets StaleEpochError from now on.

        layer_len of what comes back tells how many tokens each layer has. Raises NotFoundError.
        """
        seq_id, us = whole("seq_id", seq_id, U64_MAX), timeout_us(timeout)

        def adopt() -> Sequence:
            c, lens = _lib.Seq(), (ctypes.c_uint32 * self.spec.num_layers)()
            check(self._lib.attn_seq_adopt(self._handle, seq_id, us, ctypes.byref(c), lens))
            return Sequence(self, c, tuple(lens))

        return interruptible(adopt, guard=self._inside())

    def import_sequence(
        self,
        path: str | os.PathLike[str],
        seq_id: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Sequence:
        """A new sequence with what a file holds; seq_id None: the number that it had.

        layer_len tells how many tokens each layer has. The file is verified to its end first; a
        failure leaves no sequence. timeout is of each request.

        Raises ProtocolError (no such file, cut short, altered), InvalidArgumentError (it means
        something else than the pool's blocks; the message names the field), FileError,
        OutOfBlocksError, AlreadyExistsError.
        """
        if seq_id is None:
            seq_id = sequence_file(path).id
        seq_id = whole("seq_id", seq_id, U64_MAX)
        us, name = timeout_us(timeout), os.fsencode(path)

        def import_seq() -> Sequence:
            c, lens = _lib.Seq(), (ctypes.c_uint32 * self.spec.num_layers)()
            check(
                self._lib.attn_seq_import(self._handle, name, seq_id, us, ctypes.byref(c), lens)
            )
            return Sequence(self, c, tuple(lens))

        return interruptible(import_seq, Sequence._forget, self._inside())

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
        parents: Iterable[int] | None = None,
        is_full: bool = False,
        indices: Any = None,
        index_tokens: int = 1,
        choose_blocks: int = 0,
        parts: Iterable[tuple[int, int]] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """One layer's new tokens of some sequences: appends k and v, then q attends over the cache.

        Shapes  T is the sum of n_tokens; rows are in the order of items, then of tokens
                q    [T, num_q_heads, head_dim_k]    None: append only; spec.q_row, with q_nope_dim
                k    [T, num_kv_heads, head_dim_k]   None with v: attend only
                v    [T, num_kv_heads, head_dim_v]   None in a pool whose V is in K
                out  [T, num_q_heads, head_dim_v]    None: a new array of q's library; or out_dim
                lse  True, or [T, num_q_heads] float32 to write to; natural logarithm
                parents  [T]: the tokens of each item, 64 at most, are a tree: each has the index,
                     in its item, of an earlier one, or -1. It sees the cached tokens, those that
                     its parents lead to, and itself. Until Sequence.commit() keeps a path, nothing
                     else is appended behind it
                is_full  of a step that only attends: every query sees all of [0, pos + n_tokens),
                     as where the rest of its sequence is in another pool or daemon; the caller
                     merges out and lse with those of the rest. Not with windows, ALiBi, sink logits
                     or branches, unless with parts
                parts  of each item, whose sequence is a part of a longer one: (key_base, n_keys).
                     key_base is the position there of the part's first token, from which the item's
                     pos counts: sink tokens are the longer one's, sink logits count where it is 0.
                     With is_full the queries stand behind the part's first n_keys tokens and see
                     what their windows reach of them: n_tokens <= n_keys <= pos; else n_keys is not
                     looked at. Split pools and GPUs refuse it where windows, ALiBi, sink logits or
                     branches need it
                indices  [T, n] int32, n of any size: each query visits, of the tokens that it
                     sees, those that its row names, and no others: positions in its sequence, those
                     that this step appends included, in any order; -1 names none, and one that is
                     named twice counts once. With index_tokens, index i names the tokens from
                     i * index_tokens on, as many. One that names nothing that the query sees is
                     refused. Not with parents; dilated layers refuse it
                choose_blocks  each query visits, for each kv head, this many blocks, which attnd
                     chooses: its newest, the sequence's first, and of the others those whose keys
                     could have the largest product with q, by the largest and the smallest value
                     that they have in each dimension. 0: all. As many as it sees, or more: all,
                     with the same bytes. Not with parents and indices, nor with windows, ALiBi or
                     branches; lanes, and pools split by tokens over unlike cards, refuse it
        Dtype   create_pool()'s array_dtype, else the pool's q_dtype; bf16 as torch.bfloat16,
                ml_dtypes.bfloat16 or uint16
        Arrays  numpy or any DLPack tensor, in host memory, contiguous; read and written in place
        Units   timeout in seconds, None: the client's

        Raises InvalidArgumentError (shapes, limits, a position gap), NotFoundError or
        StaleEpochError (a sequence), OutOfBlocksError, OverloadedError, DeadlineError,
        TimedOutError, ConnectionLostError; TypeError and ValueError for arrays that do not fit.
        If only some items failed the exception is that of the first, and its `result` has the
        outputs of the others.
        """
        p = Prepared(
            self,
            layer,
            items,
            q,
            k,
            v,
            out,
            lse,
            timeout,
            parents,
            is_full,
            indices,
            index_tokens,
            choose_blocks,
            parts,
        )
        r = new_result()
        with self._inside():
            if waits_for_signals():
                status = self._step_in_pieces(p, r)
            else:
                status = self._lib.attn_step(self._handle, ctypes.byref(p.c), ctypes.byref(r))
            if status != 0 and r.status == 0:  # the call itself was wrong
                check(status)
        return p.finish(r)

    def _step_in_pieces(self, p: Prepared, r: _lib.StepResult) -> int:
        """attn_step(), between whose pieces Python sees signals. An interrupted step goes on."""
        lib, client, ticket = self._lib, self.client._handle, ctypes.c_uint64()
        try:
            status: int = lib.attn_step_start(
                self._handle, ctypes.byref(p.c), _NO_CALLBACK, None, ctypes.byref(ticket)
            )
            if status != 0:
                return status
            us = 1000
            while p.item_status[0] == PENDING:
                lib.attn_client_poll(client, us, None)
                us = min(us * 2, 100_000)
        except BaseException:
            if ticket.value != 0:
                self._steps[ticket.value] = Step(self, p, ticket.value)  # keeps its arrays
            raise
        status = lib.attn_step_wait(client, ticket, ctypes.byref(r))
        return status

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
        parents: Iterable[int] | None = None,
        is_full: bool = False,
        indices: Any = None,
        index_tokens: int = 1,
        choose_blocks: int = 0,
        parts: Iterable[tuple[int, int]] | None = None,
        timeout: float | None = None,
    ) -> Step:
        """Sends a step as step() does and returns at once; several may be in flight.

        Wait for each: until then it counts against the client's 1024, and its arrays are kept.
        """
        return self._start(
            Prepared(
                self,
                layer,
                items,
                q,
                k,
                v,
                out,
                lse,
                timeout,
                parents,
                is_full,
                indices,
                index_tokens,
                choose_blocks,
                parts,
            )
        )

    def _start(self, p: Prepared) -> Step:
        ticket = ctypes.c_uint64()
        with self._inside():
            check(
                self._lib.attn_step_start(
                    self._handle, ctypes.byref(p.c), _NO_CALLBACK, None, ctypes.byref(ticket)
                )
            )
            step = self._steps[ticket.value] = Step(self, p, ticket.value)
        return step

    def _step_start_cb(self, p: Prepared, done: Callable[[_lib.StepResult], None]) -> None:
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

    def weights(self, layer: int, weights: Any) -> None:
        """Gives what the daemon projects a layer's heads with, in a pool with q_nope_dim.

        Shape   [num_q_heads, q_nope_dim + out_dim, head_dim_v] of the pool's q_dtype, in host memory:
                kv_b_proj of a model of latent attention, of each head what makes latents to keys and
                then what makes them to values. The array is kept, and must not change
        They are sent when a step finds that the daemon has none, also after a restart, by step(),
        Step.wait() and attnd.aio, which then send the step again. All clients of a pool give the
        same weights: AlreadyExistsError from a step otherwise, if both send them.
        """
        layer = whole("layer", layer, U32_MAX)
        address, n_bytes, owner = address_of_weights(self.spec, weights)
        with self._inside():
            check(self._lib.attn_pool_weights(self._handle, layer, address, n_bytes))
            self._weights[layer] = owner

    def _send_weights(self, layer: int, *, timeout: float | None) -> None:
        """For steps with a callback, which nobody waits for in the library."""
        us = timeout_us(timeout)

        def send() -> None:
            check(self._lib.attn_pool_send_weights(self._handle, layer, us))

        interruptible(send, guard=self._inside())

    def reserve(self, n_blocks: int, *, timeout: float | None = None) -> int:
        """Sets blocks of the pool aside for this client's session, instead of what it had; 0: none.

        Its sequences can have that many then, on each card, whatever other sessions do; they may
        have more, of blocks that are neither reserved nor used. A block that several sequences
        share counts once for each. What is reserved is given back with the session, and kept by a
        daemon that restarts with its cache. Returns the blocks that its sequences can have besides
        those that they have. Raises OutOfBlocksError: others have reserved or use them; nothing has
        changed then.
        """
        n, us, n_free = whole("n_blocks", n_blocks, U32_MAX), timeout_us(timeout), ctypes.c_uint32()

        def reserve() -> int:
            check(self._lib.attn_pool_reserve(self._handle, n, us, ctypes.byref(n_free)))
            return n_free.value

        return interruptible(reserve, guard=self._inside())

    def resize(self, n_blocks: int, *, timeout: float | None = None) -> None:
        """Gives the pool more blocks, or fewer, on each card, while its sequences are used.

        Fewer: what is cached is evicted as far as it must, blocks in use are moved. More: as many
        as the memory behind the pool has room for. spec and n_free_blocks follow; those of other
        handles stay as they were. Raises OutOfBlocksError (more are in use), OutOfMemoryError (no
        room, on the card that the message names), OverQuotaError; nothing has changed then.
        """
        n, us = whole("n_blocks", n_blocks, U32_MAX), timeout_us(timeout)

        def resize() -> None:
            check(self._lib.attn_pool_resize(self._handle, n, us))
            self.spec = from_c(self._lib.attn_pool_spec_of(self._handle).contents)
            self.n_free_blocks = self._lib.attn_pool_free_blocks(self._handle)

        interruptible(resize, guard=self._inside())

    def close(self, *, timeout: float | None = None) -> None:
        """Waits for its steps in flight, releases the pool and frees the handle.

        When no handle of its client is left, the pool, which is the daemon's, makes way for others
        once no sequence lives in it and no other session has it. Where the daemon does not answer,
        the session's end does the same. Safe to call again. Closing the client closes its pools.
        """
        self._close(timeout)

    def _close(self, timeout: float | None = None, releases: bool = True) -> bool:
        """close(); whether the daemon knows of it."""
        is_known = False
        if not (self.client.is_closed or self._guard.is_inherited):
            self._wait_for_steps()
            is_known = releases and self._release(timeout_us(timeout))
        if self._guard.close(lambda: self._lib.attn_pool_close(self._handle)):
            self.client._pools.discard(self)
        return is_known

    def _release(self, timeout_us: int) -> bool:
        def release() -> None:
            check(self._lib.attn_pool_release(self._handle, timeout_us))

        try:
            interruptible(release, guard=self._inside())
        except AttndError:  # closed already, too
            return False
        return True

    def __repr__(self) -> str:
        return f"<attnd.Pool {self.spec.name!r}>"


# Steps with a callback, by the number the library carries for us; kept until they complete.
_waiting: dict[int, tuple[Pool, Prepared, Callable[[_lib.StepResult], None]]] = {}
_keys = itertools.count(1)


def _on_step(user: int, ticket: int, result: Any) -> None:
    _, _, done = _waiting.pop(user)
    done(result.contents)


_on_step_c = _lib.STEP_CB(_on_step)
