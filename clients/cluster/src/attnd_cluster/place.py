"""Which daemon a new sequence goes to: pure functions of what is known of each.

A cost in tokens: those that have to be computed there, since its cache lacks them, and the work that
is ahead of them. So a prompt goes where its beginning is cached, unless that daemon is so far behind
the others that computing it anew elsewhere is sooner done.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

TOKENS_PER_QUEUE_SECOND = 10_000  # of prompts that a daemon computes: what a queue costs
WINDOW = 64  # what was given lately is of about so many sequences
BALANCE = 0.1  # what a token counts that it was given lately and the one with the least was not
FULL = 0.5  # a full daemon costs this part of the prompt more than an empty one: it evicts


class Candidate(NamedTuple):
    """A daemon, for one prompt.

    cached_tokens  that it has of it
    n_free_blocks  or cached and evictable
    backlog        tokens that it was given lately by this client to compute, and for each sequence as
                   many as a prompt had lately on average: it is decoded, too
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


def is_behind(candidates: Sequence[Candidate], n_tokens: int, block_tokens: int) -> bool:
    """Whether more is ahead of the best of them than the whole prompt: others are to be asked, too."""
    best = order(candidates, n_tokens, block_tokens)[:1]
    least = min((c.backlog for c in candidates), default=0.0)
    return not best or (
        cost(best[0], n_tokens, block_tokens, least) + best[0].cached_tokens > 2 * n_tokens
    )


class Backlog:
    """What each daemon was given lately (Candidate.backlog); forgotten as more is given."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._prompt = 0.0  # tokens, on average

    def of(self, name: str) -> float:
        return self._given.get(name, 0.0)

    def give(self, name: str, n_tokens: int, n_prompt: int) -> None:
        """A sequence with a prompt of n_prompt tokens, of which n_tokens are to be computed."""
        self._prompt += (n_prompt - self._prompt) / WINDOW
        for other in self._given:
            self._given[other] *= 1 - 1 / WINDOW
        self._given[name] = self._given.get(name, 0.0) + n_tokens + self._prompt

    def forget(self, name: str) -> None:
        self._given.pop(name, None)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _beginnings(tokens: Sequence[int], adapter: int, block_tokens: int) -> Iterable[bytes]:
    """Hashes of the first 1, 2, 4, 8, ... blocks, the shortest first, each made from the one before."""
    key = struct.pack("<Q", adapter)
    n, done = block_tokens, 0
    while n <= len(tokens):
        key = _hash(key + struct.pack(f"<{n - done}I", *tokens[done:n]))
        yield key
        n, done = 2 * n, n


def homes(
    names: Iterable[str], tokens: Sequence[int], adapter: int, block_tokens: int, most: int
) -> list[str]:
    """The daemons on which to look for a prompt, and to begin it: for each of its beginnings of 1, 2, 4,
    8, ... blocks, the longest first, the one whose name ranks first with it, and those that rank next
    with the longest. So all clients ask the same ones about prompts that begin alike, without a word
    between them, and a daemon that goes takes only its own homes along. None of prompts without a full
    block."""
    keys = list(_beginnings(tokens, adapter, block_tokens))[::-1]
    left, found = list(names), list[str]()

    def rank(key: bytes) -> Callable[[str], bytes]:
        return lambda name: _hash(key + name.encode())

    for key in keys:
        if len(found) == most or not left:
            return found
        first = max(left + found, key=rank(key))
        if first in left:
            left.remove(first)
            found.append(first)
    if keys:
        found += heapq.nlargest(most - len(found), left, key=rank(keys[0]))
    return found


def home_of(name: str) -> int:
    """16 bits of a daemon's name, the top ones of ids of sequences that begin there."""
    return int.from_bytes(_hash(name.encode())[:2], "big")
