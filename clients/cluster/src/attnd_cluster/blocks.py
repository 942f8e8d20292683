"""What a daemon's open would find of prompts: its published blocks, followed by their events.

A block counts where it leads back to the first one of its prompt, as for the daemon. It is named by
a hash of its tokens and those before it, so that all daemons call the same prompt the same, and a
daemon that begins anew does, too.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_TRIES = 3

Inspect = Callable[[str, int], dict[str, Any]]


class Known(NamedTuple):
    """A block of a prompt. parent: 0: it is the first. ids: 4 bytes each, the highest first."""

    hash: int
    parent: int
    place: int
    adapter: int
    ids: bytes

    def tokens(self) -> list[int]:
        return list(struct.unpack(f">{len(self.ids) // 4}I", self.ids))


class Change(NamedTuple):
    """Of what is known. removed: those that others follow come later; stored: they come earlier,
    and one that follows another comes behind it where that can be."""

    removed: list[Known]
    stored: list[Known]


def hash_of(parent: int, adapter: int, ids: bytes) -> int:
    h = hashlib.blake2b(digest_size=8)
    h.update(parent.to_bytes(8, "big") + adapter.to_bytes(8, "big") + ids)
    return int.from_bytes(h.digest(), "big") or 1  # readers take 0 for none


class _Publication:
    __slots__ = ("adapter", "blocks", "ids", "known", "parent", "place")

    def __init__(self, row: dict[str, Any]):
        self.parent, self.place = int(row["parent"]), int(row["place"])
        self.adapter, self.ids = int(row.get("adapter", "0")), bytes.fromhex(row["ids"])
        self.blocks: tuple[int, ...] = ()
        self.known: Known | None = None  # None: it does not lead back to a first one

    def is_as(self, row: dict[str, Any]) -> bool:
        other = _Publication(row)
        return (self.parent, self.adapter, self.ids) == (other.parent, other.adapter, other.ids)


class PoolBlocks:
    """The blocks of one pool, on all cards of a daemon."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int], _Publication] = {}  # by card and serial
        self._followers: dict[tuple[int, int], set[int]] = {}  # serials, by card and parent
        self._n: dict[int, int] = {}  # how often it is there, by hash
        self._touched: dict[int, Known] = {}
        self.told: dict[int, Known] = {}  # what changes() has given so far

    def publish(self, card: int, row: dict[str, Any]) -> None:
        """As a list of blocks or an event has it; the same one again changes nothing."""
        serial, block = int(row["serial"]), int(row["block"])
        p = self._all.get((card, serial))
        if p is not None and not p.is_as(row):  # of a daemon that has begun empty
            for b in p.blocks:
                self.evict(card, serial, b)
            p = None
        if p is None:
            p = self._all[card, serial] = _Publication(row)
            self._followers.setdefault((card, p.parent), set()).add(serial)
            self._find(card, serial)
        if block not in p.blocks:
            p.blocks += (block,)

    def evict(self, card: int, serial: int, block: int) -> None:
        p = self._all.get((card, serial))
        if p is None:
            return
        p.blocks = tuple(b for b in p.blocks if b != block)
        if p.blocks:
            return
        self._lose(card, serial)
        del self._all[card, serial]
        others = self._followers[card, p.parent]
        others.discard(serial)
        if not others:
            del self._followers[card, p.parent]

    def keep(self, of: set[tuple[int, int, int]]) -> None:
        """Evicts all but these: card, serial and block."""
        for (card, serial), p in list(self._all.items()):
            for block in [b for b in p.blocks if (card, serial, b) not in of]:
                self.evict(card, serial, block)

    def _find(self, card: int, serial: int) -> None:
        """It may lead back to a first one now, and those that follow it, too."""
        todo = [serial]
        while todo:
            s = todo.pop()
            p = self._all[card, s]
            before = self._all.get((card, p.parent))
            if p.known is not None or (p.parent != 0 and (before is None or before.known is None)):
                continue
            parent = 0 if before is None else before.known.hash
            p.known = Known(hash_of(parent, p.adapter, p.ids), parent, p.place, p.adapter, p.ids)
            self._count(p.known, 1)
            todo += self._followers.get((card, s), ())

    def _lose(self, card: int, serial: int) -> None:
        todo = [serial]
        while todo:
            s = todo.pop()
            p = self._all[card, s]
            if p.known is not None:
                self._count(p.known, -1)
                p.known = None
                todo += self._followers.get((card, s), ())

    def _count(self, known: Known, n: int) -> None:
        self._touched[known.hash] = known
        n += self._n.pop(known.hash, 0)
        if n > 0:
            self._n[known.hash] = n

    def changes(self) -> Change:
        """Since the last time, whatever came and went in between."""
        gone = [h for h in self._touched if h not in self._n and h in self.told]
        removed = sorted((self.told.pop(h) for h in gone), key=lambda k: -k.place)
        new = {h: k for h, k in self._touched.items() if h in self._n and h not in self.told}
        self.told.update(new)
        self._touched.clear()
        return Change(removed, in_chains(new.values()))


def in_chains(blocks: Iterable[Known]) -> list[Known]:
    """Each behind the one that it follows, at once where that has no other follower before it."""
    of = {k.hash: k for k in blocks}
    followers: dict[int, list[Known]] = {}
    for k in of.values():
        followers.setdefault(k.parent, []).append(k)
    todo = [k for k in of.values() if k.parent not in of]
    ordered = []
    while todo:
        k = todo.pop()
        ordered.append(k)
        todo += followers.get(k.hash, ())
    return ordered


class Follower:
    """Keeps PoolBlocks as a daemon has them. inspect(topic, after) asks it, and may raise.

    pools: by "pool", or "tenant/pool" of a daemon with tenants. Others are passed over.
    """

    def __init__(self, inspect: Inspect, pools: dict[str, PoolBlocks]):
        self._inspect, self._pools = inspect, pools
        self._numbers: dict[int, int] = {}  # of the latest event read, by card
        self.n_snapshots = self.n_events = 0

    def _pool(self, row: dict[str, Any]) -> PoolBlocks | None:
        tenant = row.get("tenant")
        name = row.get("pool", "")
        return self._pools.get(name if tenant is None else f"{tenant}/{name}")

    def turn(self) -> None:
        """Reads all that there is."""
        for _ in range(_TRIES):  # where more happens than it can read, hints are better than none
            if self._numbers and all([self._read(card) for card in list(self._numbers)]):
                return
            self._take_snapshot()

    def _take_snapshot(self) -> None:
        numbers: dict[int, int] = {}
        kept: dict[int, set[tuple[int, int, int]]] = {id(p): set() for p in self._pools.values()}
        after = 0
        while True:
            page = self._inspect("blocks", after)
            card = int(page["card"])
            numbers.setdefault(card, int(page["number"]))
            for row in page["blocks"]:
                pool = self._pool(row)
                if pool is not None:
                    kept[id(pool)].add((card, int(row["serial"]), int(row["block"])))
                    pool.publish(card, row)
            after = int(page["next"])
            if after == 0:
                break
        for pool in self._pools.values():
            pool.keep(kept[id(pool)])
        self._numbers = numbers
        self.n_snapshots += 1

    def _read(self, card: int) -> bool:
        """False: it is behind."""
        while True:
            page = self._inspect("block_events", self._numbers[card])
            if page["behind"]:
                return False
            for event in page["block_events"]:
                self._take(card, event)
            self._numbers[card] = int(page["next"])
            if not page["more"]:
                return True

    def _take(self, card: int, event: dict[str, Any]) -> None:
        self.n_events += 1
        if event["event"] == "published" and "ids" in event:
            pool = self._pool(event)
            if pool is not None:
                pool.publish(card, event)
        elif event["event"] == "evicted":  # maybe of a pool that is gone: serials are the card's
            for pool in self._pools.values():
                pool.evict(card, int(event["serial"]), int(event["block"]))
