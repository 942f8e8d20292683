"""A sequence over several daemons: shards, each a sequence of its own, of which only the last grows.

An append is to one daemon, and twice is as once there. A shard moves like any sequence; one whose
host is lost is computed anew from its token ids, and the others stay. shard_steps.py has the steps.
"""

from __future__ import annotations

import base64
import bisect
import json
import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import attnd
from attnd._handle import Closing, NotPicklable

from .hosts import Host
from .pool import SHARDS
from .sequence import ClusterSequence

if TYPE_CHECKING:
    from .pool import ClusterPool
    from .shard_decode import Decoder


log = logging.getLogger("attnd.cluster")


class ShardLostError(attnd.SequenceGoneError):
    """A shard went with its host, and could not be computed anew. Tokens [first, past) are lost."""

    def __init__(self, message: str, first: int, past: int):
        super().__init__(message)
        self.first, self.past = first, past


class Shard(ClusterSequence):
    """Tokens of a long sequence from `base` on; positions in it count from there."""

    def __init__(self, long: LongSequence, base: int, host: Host, inner: attnd.Sequence):
        super().__init__(long.pool, host, inner, (), long.adapter)
        self.long, self.base = long, base

    def _rebuild(self) -> None:
        long, first, past = self.long, self.base, self.base + max(self._lens)
        what = f"shard lost: tokens {first} to {past} of a sequence went with {self._host.name}"
        rebuild = long.check_rebuild(what, first, past)
        host, inner = long.place(first, past, long.hosts_but(self), None)
        self._set(host, inner)
        self._lens = [inner.n_cached] * self.pool.spec.num_layers
        self.n_rebuilt += 1
        long.write_down()
        rebuild(ShardRange(long, first + inner.n_cached, past))


class ShardRange(NamedTuple):
    """What rebuild() is given of a long sequence: as the sequence, in which tokens from n_cached to
    the end of `tokens` are to be appended."""

    seq: LongSequence
    n_cached: int
    past: int

    @property
    def is_long(self) -> bool:
        return True

    @property
    def pool(self) -> ClusterPool:
        return self.seq.pool

    @property
    def tokens(self) -> list[int]:
        return self.seq.tokens[: self.past]

    @property
    def adapter(self) -> int:
        return self.seq.adapter


class LongSequence(Closing, NotPicklable):
    """As ClusterSequence, but for moves and exports: it is in several places. Made by
    ClusterPool.open(shard_tokens=).

    tokens  ids that are known, from the first on. Only the first shard shares prefixes
    note    as ClusterSequence's. The first shard's own note has it, and which shards there are, so
            that ClusterPool.adopt() of its id takes over all
    """

    is_long = True

    def __init__(
        self, pool: ClusterPool, tokens: Iterable[int], adapter: int, shard_tokens: int
    ):
        per_block = pool.spec.block_tokens
        if shard_tokens < per_block or shard_tokens % per_block != 0:
            raise attnd.InvalidArgumentError(
                f"shard_tokens is {shard_tokens}, must be a multiple of block_tokens {per_block}"
            )
        self.pool, self.tokens, self.adapter = pool, list(tokens), adapter
        self.shard_tokens = shard_tokens
        self.is_closed = False
        self.note = b""
        self.shards: list[Shard] = []
        self._lock = threading.RLock()
        self._described: list[tuple[int, int]] = []  # by a note
        self._is_written = False
        self.decoder: Decoder | None = None  # of the last step of one token, for the next

    def begin(self, timeout: float | None) -> LongSequence:
        """Opens the first shard."""
        ids = self.tokens[: self.shard_tokens]
        host, inner = self.pool.place(None, ids, self.adapter, timeout)
        self.shards.append(Shard(self, 0, host, inner))
        self.write_down()
        return self

    @classmethod
    def of_note(cls, pool: ClusterPool, first: ClusterSequence) -> LongSequence:
        """What the note of a first shard describes, to be taken."""
        x = json.loads(first.note[len(SHARDS) :])
        made = cls(pool, (), x["adapter"], x["shard_tokens"])
        made.note = base64.b64decode(x["note"])
        made._described = [(0, first.id), *((base, id) for base, id in x["shards"][1:])]
        return made

    def _write(self, note: bytes, timeout: float | None) -> None:
        """Into the note of the first shard, without the list's lock: it may have to be found again."""
        with self._lock:
            first, self._is_written = self.shards[0], True
            x = {
                "adapter": self.adapter,
                "shard_tokens": self.shard_tokens,
                "note": base64.b64encode(note).decode(),
                "shards": self.shard_ids,
            }
        text = SHARDS + json.dumps(x, separators=(",", ":")).encode()
        if text != first.note:
            first.set_note(text, timeout=timeout)

    def write_down(self) -> None:
        """Which shards there are. What does not fit is not found by adopt()."""
        try:
            self._write(self.note, None)
        except attnd.AttndError as e:  # an older daemon, or no room
            log.warning("%r: its shards are not written down: %s", self, e)

    def set_note(self, note: bytes, *, timeout: float | None = None) -> None:
        """As ClusterSequence.set_note(), but for what the list of shards takes of it: at most 2 KiB,
        and InvalidArgumentError where both do not fit."""
        if len(note) > 2048:
            raise attnd.InvalidArgumentError(f"note has {len(note)} bytes, at most 2048")
        self._write(bytes(note), timeout)
        self.note = bytes(note)

    def take(self, shards: list[tuple[int, int]] | None, timeout: float | None) -> LongSequence:
        """Adopts shards, their first tokens and ids (None: those of its note), wherever they are. Those
        that are gone are computed anew. Raises ShardLostError where they can't be."""
        shards = self._described if shards is None else shards
        firsts = [first for first, _ in shards]
        pasts = firsts[1:] + [len(self.tokens)]
        if firsts[:1] != [0] or any(a >= b for a, b in zip(firsts, firsts[1:])):
            raise attnd.InvalidArgumentError(
                f"shards begin at {firsts}, expected 0 and then each behind the one before it"
            )
        lost = []
        for (first, id), past in zip(shards, pasts):
            try:
                found = self.pool.adopt_one(id, timeout)
            except attnd.SequenceGoneError as e:
                what = f"shard lost: tokens {first} to {past}: {e.message}"
                lost.append((first, past, self.check_rebuild(what, first, past)))
                continue
            most, is_last = max(found.layer_len), first == firsts[-1]
            if most > (self.shard_tokens if is_last else past - first):
                end = f"shard_tokens is {self.shard_tokens}"
                raise attnd.InvalidArgumentError(
                    f"shards: the one from {first} has {most} tokens, but"
                    f" {end if is_last else f'the next begins at {past}'}"
                )
            self.shards.append(Shard(self, first, found._host, found._inner))
            self.shards[-1].note = found.note
            self.shards[-1]._note_is_set = found._note_is_set
        for first, past, rebuild in lost:
            host, inner = self.place(first, past, self.hosts_but(None), timeout)
            with self._lock:
                self.shards.insert(self.index_of(first) + 1, Shard(self, first, host, inner))
            self.write_down()
            rebuild(ShardRange(self, first + inner.n_cached, past))
        return self

    def place(
        self, first: int, past: int, avoided: set[str], timeout: float | None
    ) -> tuple[Host, attnd.Sequence]:
        """A new sequence for tokens [first, past). Only the first shard's have ids."""
        ids = self.tokens[:past] if first == 0 else []
        return self.pool.place(None, ids, self.adapter, timeout, avoided, past - first)

    def check_rebuild(self, what: str, first: int, past: int) -> Any:
        """The client's rebuild(), where it can compute tokens [first, past) anew. Raises ShardLostError."""
        rebuild = self.pool.client.rebuild
        if rebuild is None:
            raise ShardLostError(f"{what}: there is no rebuild() to compute them anew", first, past)
        if len(self.tokens) < past or past <= first:
            raise ShardLostError(
                f"{what}, and only {len(self.tokens)} token ids are known: set_tokens() tells them",
                first,
                past,
            )
        return rebuild

    @property
    def shard_ids(self) -> list[tuple[int, int]]:
        """Of each shard its first token and its id, for ClusterPool.adopt_shards(). Changes as shards
        begin, and as they are made anew."""
        with self._lock:
            return [(s.base, s.id) for s in self.shards]

    @property
    def n_cached(self) -> int:
        return self.shards[0].n_cached

    @property
    def n_rebuilt(self) -> int:
        return sum(s.n_rebuilt for s in self.shards)

    @property
    def layer_len(self) -> tuple[int, ...]:
        """Tokens of each layer that were acknowledged."""
        with self._lock:
            return tuple(
                max(s.base + s._lens[layer] for s in self.shards if s.base == 0 or s._lens[layer])
                for layer in range(self.pool.spec.num_layers)
            )

    @property
    def where(self) -> list[tuple[int, str]]:
        """Of each shard its first token and its daemon."""
        with self._lock:
            return [(s.base, s.where) for s in self.shards]

    def hosts_but(self, shard: Shard | None) -> set[str]:
        with self._lock:
            return {s.where for s in self.shards if s is not shard}

    def past_of(self, i: int) -> int:
        """Where the i-th shard ends, or may grow to."""
        last = i + 1 == len(self.shards)
        return self.shards[i].base + self.shard_tokens if last else self.shards[i + 1].base

    def index_of(self, pos: int) -> int:
        return bisect.bisect_right([s.base for s in self.shards], pos) - 1

    def has_room(self, pos: int) -> bool:
        """Whether pos is in the last shard, or is what comes next in it."""
        return 0 <= pos - self.shards[-1].base < self.shard_tokens

    def grow(self, pos: int, timeout: float | None) -> None:
        """A new shard from pos on, on a daemon that has none of the others if there is one."""
        with self._lock:
            if self.shards[-1].base >= pos:
                return  # another thread has
            host, inner = self.pool.place(
                None, [], self.adapter, timeout, self.hosts_but(None), self.shard_tokens
            )
            self.shards.append(Shard(self, pos, host, inner))
            self._is_written = False

    def is_growing(self, layer: int, pos: int) -> bool:
        """Whether pos is what comes next in the last shard, so that another may begin there."""
        with self._lock:
            tail = self.shards[-1]
            return pos > tail.base and tail._lens[layer] == pos - tail.base == max(tail._lens)

    def spans(
        self, layer: int, pos: int, n: int, appends: bool, timeout: float | None
    ) -> list[tuple[int, int]]:
        """The tokens, cut where shards begin, and so that no part before them has fewer. Begins
        the shards that an append needs."""
        found = []
        with self._lock:
            while n > 0:
                i = self.index_of(pos)
                tail = self.shards[-1]
                is_full = pos == self.past_of(i) and i + 1 == len(self.shards)
                if appends and is_full and tail._lens[layer] >= self.shard_tokens:
                    self.grow(pos, timeout)
                    continue
                least = min((self.past_of(j) - self.shards[j].base for j in range(i)), default=n)
                room = self.past_of(i) - pos
                take = min(n, least, room if room > 0 else n)
                found.append((pos, take))
                pos, n = pos + take, n - take
                if n > 0 and appends and pos == self.past_of(i) and i + 1 == len(self.shards):
                    self.grow(pos, timeout)
        if not self._is_written:
            self.write_down()
        return found

    # ---- as a sequence

    # _lock is of the list of shards: a request of one may have others made anew, on other threads

    def _now(self) -> list[Shard]:
        with self._lock:
            return list(self.shards)

    def set_tokens(self, pos: int, tokens: Iterable[int], *, timeout: float | None = None) -> None:
        ids = list(getattr(tokens, "tolist", lambda: tokens)())
        if pos > len(self.tokens):
            raise attnd.InvalidArgumentError(
                f"pos is {pos}, {len(self.tokens)} ids are known: none may be left out"
            )
        with self._lock:
            past = self.past_of(0)
        if pos < past:
            self.shards[0].set_tokens(pos, ids[: past - pos], timeout=timeout)
        with self._lock:
            self.tokens[pos : pos + len(ids)] = ids

    def truncate(self, n_tokens: int, *, timeout: float | None = None) -> None:
        """Not beside steps of this sequence on other threads."""
        while len(self.shards) > 1 and self.shards[-1].base >= n_tokens:
            self.shards[-1].close(timeout=timeout)
            with self._lock:
                self.shards.pop()
                self._is_written = False
        if not self._is_written:
            self.write_down()
        tail = self.shards[-1]
        if max(tail._lens) > n_tokens - tail.base:
            tail.truncate(n_tokens - tail.base, timeout=timeout)
        with self._lock:
            del self.tokens[n_tokens:]

    def fork(self, n_tokens: int | None = None, *, timeout: float | None = None) -> LongSequence:
        """A new sequence with the first tokens of this one, shard by shard where they are."""
        n = min(self.layer_len) if n_tokens is None else n_tokens
        made = LongSequence(self.pool, self.tokens[:n], self.adapter, self.shard_tokens)
        shards = self._now()
        pasts = [s.base for s in shards[1:]] + [n]
        try:
            for shard, past in zip(shards, pasts):
                if shard.base > 0 and shard.base >= n:
                    break
                fork = shard.fork(n_tokens=min(n, past) - shard.base, timeout=timeout)
                made.shards.append(Shard(made, shard.base, fork._host, fork._inner))
        except BaseException:
            made.close()
            raise
        made.write_down()
        return made

    def close(self, *, timeout: float | None = None) -> None:
        """Forgets all shards. Safe to call again."""
        self.is_closed = True
        for shard in self._now():
            shard.close(timeout=timeout)

    def __exit__(self, *exc: Any) -> None:
        if not self.pool.client.is_closed:
            super().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<attnd_cluster.LongSequence at {', '.join(f'{b}: {w}' for b, w in self.where)}>"
