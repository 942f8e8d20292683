"""Several requests on sequences in one message, and what an open would find."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _lib
from ._handle import (
    U32_MAX,
    U64_MAX,
    interruptible,
    random_id,
    timeout_us,
    token_ids,
    whole,
)
from .errors import AttndError, check, error_of

if TYPE_CHECKING:
    from .pool import Pool, Sequence

# enum attn_call_kind
_OPEN, _ADOPT, _FORK, _TOKENS, _TRUNCATE, _CLOSE, _PROBE, _COMMIT = range(1, 9)


class Probe(NamedTuple):
    """What an open with some tokens would find at that moment, and how much room its pool has.

    cached_tokens      that a new sequence would begin with at once
    tier_tokens        those behind them that would come from host memory or disk first
    n_blocks           of the pool, on all cards
    n_free_blocks      of them free, or cached and evictable; where blocks are reserved, those that
                       the session can have, of several cards on the one that answers
    n_reserved_blocks  that the session has reserved
    """

    cached_tokens: int
    tier_tokens: int
    n_blocks: int
    n_free_blocks: int
    n_reserved_blocks: int


def probe_of(c: _lib.Probe) -> Probe:
    return Probe(
        c.cached_tokens, c.tier_tokens, c.n_blocks, c.n_free_blocks, c.n_reserved_blocks
    )


class Calls:
    """Requests on sequences of a pool, made by Pool.calls(): run() sends them in one message.

        calls = pool.calls()
        for tokens in prompts:
            calls.open(tokens=tokens)
        calls.close(old)
        *opened, closed = calls.run()
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self._asked: list[_lib.SeqCall] = []
        self._take: list[Callable[[_lib.SeqCall], Any]] = []
        self._keep: list[Any] = []  # what the calls point to

    def __len__(self) -> int:
        return len(self._asked)

    def _add(
        self, kind: int, seq: _lib.Seq, take: Callable[[_lib.SeqCall], Any], **fields: Any
    ) -> None:
        size = ctypes.sizeof(_lib.SeqCall)
        self._asked.append(_lib.SeqCall(struct_size=size, kind=kind, seq=seq, **fields))
        self._take.append(take)

    def _tokens(self, tokens: Iterable[int], adapter: int = 0) -> _lib.Tokens:
        ids = token_ids(tokens)
        self._keep.append(ids)
        return _lib.Tokens(ids, len(ids), 0, whole("adapter", adapter, U64_MAX))

    def _lens(self) -> Any:
        lens = (ctypes.c_uint32 * self._pool.spec.num_layers)()
        self._keep.append(lens)
        return lens

    def open(
        self, seq_id: int | None = None, *, tokens: Iterable[int] = (), adapter: int = 0
    ) -> None:
        """As Pool.open(): gives a Sequence. All tokens must fit a message."""
        seq_id = random_id() if seq_id is None else whole("seq_id", seq_id, U64_MAX)
        self._add(
            _OPEN,
            _lib.Seq(seq_id),
            lambda c: self._pool._sequence(c.seq, n_cached=c.n_cached),
            tokens=self._tokens(tokens, adapter),
        )

    def adopt(self, seq_id: int) -> None:
        """As Pool.adopt(): gives a Sequence."""
        lens = self._lens()
        self._add(
            _ADOPT,
            _lib.Seq(whole("seq_id", seq_id, U64_MAX)),
            lambda c: self._pool._sequence(c.seq, tuple(lens)),
            layer_len=lens,
        )

    def fork(
        self, seq: Sequence, new_id: int | None = None, n_tokens: int | None = None
    ) -> None:
        """As Sequence.fork(): gives a Sequence."""
        lens = self._lens()
        self._add(
            _FORK,
            seq._c(),
            lambda c: self._pool._sequence(c.seq, tuple(lens)),
            layer_len=lens,
            new_id=random_id() if new_id is None else whole("new_id", new_id, U64_MAX),
            len=_lib.ALL_TOKENS if n_tokens is None else whole("n_tokens", n_tokens, U32_MAX),
        )

    def set_tokens(self, seq: Sequence, pos: int, tokens: Iterable[int]) -> None:
        """As Sequence.set_tokens(): gives None."""
        self._add(
            _TOKENS,
            seq._c(),
            lambda c: None,
            pos=whole("pos", pos, U32_MAX),
            tokens=self._tokens(tokens),
        )

    def truncate(self, seq: Sequence, n_tokens: int) -> None:
        """As Sequence.truncate(): gives the sequence."""

        def take(c: _lib.SeqCall) -> Sequence:
            seq.epoch = c.seq.epoch
            return seq

        self._add(_TRUNCATE, seq._c(), take, len=whole("n_tokens", n_tokens, U32_MAX))

    def commit(self, seq: Sequence, nodes: Iterable[int]) -> None:
        """As Sequence.commit(): gives the sequence."""

        def take(c: _lib.SeqCall) -> Sequence:
            seq.epoch = c.seq.epoch
            return seq

        self._add(_COMMIT, seq._c(), take, tokens=self._tokens(nodes))

    def close(self, seq: Sequence) -> None:
        """As Sequence.close(): gives None."""

        def take(c: _lib.SeqCall) -> None:
            seq.is_closed = True

        self._add(_CLOSE, seq._c(), take)

    def probe(self, tokens: Iterable[int], *, adapter: int = 0) -> None:
        """As Pool.probe(): gives a Probe."""
        self._add(
            _PROBE,
            _lib.Seq(),
            lambda c: probe_of(c.probe),
            tokens=self._tokens(tokens, adapter),
        )

    def run(self, *, timeout: float | None = None) -> list[Any]:
        """Carries the calls out in their order, 128 to a message, and forgets them.

        One entry per call: what it gives, or the AttndError that it alone would have raised; a
        call that failed does not stop those behind it. Raises an AttndError itself if there was no
        answer at all; what was asked for may then have been done.
        """
        pool, asked, take = self._pool, self._asked, self._take
        keep, us = self._keep, timeout_us(timeout)
        self._asked, self._take, self._keep = [], [], []
        calls = (_lib.SeqCall * len(asked))(*asked)

        def run() -> None:
            check(pool._lib.attn_seq_calls(pool._handle, calls, len(calls), us, None))

        interruptible(run, guard=pool._inside())
        del keep
        return [t(c) if c.error.status == 0 else _error(c.error) for t, c in zip(take, calls)]


def _error(e: _lib.Error) -> AttndError:
    return error_of(e.status, e.message.decode("utf-8", "replace"), e.retry_after_us)
