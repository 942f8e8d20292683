"""Which daemon a new sequence goes to: pure functions of what is known of each.

A cost in tokens: those that have to be computed there, since its cache lacks them, and the work that
is ahead of them. So a prompt goes where its beginning is cached, unless that daemon is so far behind
the others that computing it anew elsewhere is sooner done.
"""

from __future__ import annotations

import collections
import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

TOKENS_PER_QUEUE_SECOND = 10_000  # of prompts that a daemon computes: what a queue costs
WINDOW = 64  # what was given lately is of about so many sequences
BALANCE = 0.1  # what a token counts that it was given lately and the one with the least was not
FULL = 0.5  # a full daemon costs this part of the prompt more than an empty one: it evicts


class Candidate(NamedTuple):
    """A daemon, for one prompt.

    cached_tokens  that it has of it
    n_free_blocks  or cached and evictable
    backlog        tokens that it was given lately by this client to compute
    """

    name: str
    cached_tokens: int
    n_blocks: int
    n_free_blocks: int
    queue_seconds: float
    backlog: float


def cost(c: Candidate, n_tokens: int, block_tokens: int, least_backlog: float) -> float:
    """inf: it has no room."""
    n_lacking = n_tokens - c.cached_tokens
    n_blocks = -(-n_lacking // block_tokens) + 1
    if c.n_free_blocks < n_blocks:
        return float("inf")
    used = 1 - c.n_free_blocks / max(1, c.n_blocks)
    queue = c.queue_seconds * TOKENS_PER_QUEUE_SECOND
    ahead = BALANCE * (c.backlog - least_backlog)
    return n_lacking + FULL * used * n_tokens + queue + ahead


def order(candidates: Sequence[Candidate], n_tokens: int, block_tokens: int) -> list[Candidate]:
    """The best first; those without room last, since their free blocks may be old news."""
    least = min((c.backlog for c in candidates), default=0.0)
    return sorted(
        candidates,
        key=lambda c: (cost(c, n_tokens, block_tokens, least), c.backlog, -c.n_free_blocks, c.name),
    )


class Backlog:
    """What each daemon was given lately, in tokens to compute; forgotten as more is given."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}

    def of(self, name: str) -> float:
        return self._given.get(name, 0.0)

    def give(self, name: str, n_tokens: int) -> None:
        for other in self._given:
            self._given[other] *= 1 - 1 / WINDOW
        self._given[name] = self._given.get(name, 0.0) + n_tokens

    def forget(self, name: str) -> None:
        self._given.pop(name, None)


class PrefixIndex:
    """Where beginnings of prompts were placed, as a hint which daemons to ask; it may be wrong.

    Of each prompt the beginnings of 1, 2, 4, 8, ... blocks are kept, by a hash: a few entries however
    long it is. The least recently used make way.
    """

    def __init__(self, block_tokens: int, n_entries: int = 1 << 16):
        self._block_tokens, self._n_entries = block_tokens, n_entries
        self._where: collections.OrderedDict[bytes, tuple[str, ...]] = collections.OrderedDict()

    def _beginnings(self, tokens: Sequence[int], adapter: int) -> Iterable[bytes]:
        """The shortest first."""
        h = hashlib.blake2b(struct.pack("<Q", adapter), digest_size=8)
        n, done = 1, 0
        while n * self._block_tokens <= len(tokens):
            part = tokens[done * self._block_tokens : n * self._block_tokens]
            h.update(struct.pack(f"<{len(part)}I", *part))
            yield h.digest()
            n, done = 2 * n, n

    def find(self, tokens: Sequence[int], adapter: int, most: int) -> list[str]:
        """Daemons that were given the same beginning, the longest first, the latest first."""
        found: list[str] = []
        for key in reversed(list(self._beginnings(tokens, adapter))):
            for name in self._where.get(key, ()):
                if name not in found:
                    found.append(name)
                    if len(found) == most:
                        return found
        return found

    def note(self, tokens: Sequence[int], adapter: int, name: str) -> None:
        for key in self._beginnings(tokens, adapter):
            names = self._where.pop(key, ())
            self._where[key] = (name, *(n for n in names if n != name))[:4]
        while len(self._where) > self._n_entries:
            self._where.popitem(last=False)


def home_of(name: str) -> int:
    """16 bits of a daemon's name, the top ones of ids of sequences that begin there."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=2).digest(), "big")
