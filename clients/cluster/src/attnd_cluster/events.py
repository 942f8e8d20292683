"""Publishes a daemon's block events as vLLM does, so that its subscribers read them unchanged: those of
Dynamo, llm-d, or whoever else keeps an index of which worker has which prompts.

    PUB      [topic, number, payload]: 8 bytes, the highest first; msgpack [time, events, 0]
    events   {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", ...}, as vLLM's kv_events.py
    ROUTER   asked [b"", number], it sends all messages from that one on, as [b"", topic, number,
             payload], and ends with the number -1

Where there is nothing to say, a message without events comes every two seconds: so a subscriber soon
learns that it has missed the last one. A publisher's first message clears and says all that there is. Numbers begin at the time in
microseconds, so that they rise when an agent follows another. Who asks for what is kept no more gets
one message that clears and says all, with the latest number.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import attnd

from .blocks import Follower, Inspect, Known, PoolBlocks, in_chains

log = logging.getLogger("attnd.agent")
_END = (-1).to_bytes(8, "big", signed=True)
_KEPT = 10_000  # messages for those who have missed some, and their bytes
_KEPT_BYTES = 64 << 20
_EVENTS_OF_MESSAGE = 1000
_SILENCE = 2.0  # seconds
_BLOCKS_OF_EVENT = 64
_QUEUED = 100_000  # messages that wait for a slow subscriber; more are lost, and asked for again
_MEDIUM = "GPU"  # where a worker's blocks are, as opposed to "CPU" and "STORAGE" behind it


class Target(NamedTuple):
    """Where the events of one pool go. replay "": nobody can ask again."""

    pool: str
    publish: str
    replay: str
    topic: str


def parse_target(text: str) -> Target:
    """POOL=PUB[,REPLAY[,TOPIC]]. Raises ValueError."""
    pool, _, rest = text.partition("=")
    publish, replay, topic = [*rest.split(",", 2), "", ""][:3]
    if not pool or "://" not in publish or (replay and "://" not in replay):
        raise ValueError(f"{text!r} is not POOL=PUB[,REPLAY[,TOPIC]] with ZeroMQ's urls")
    return Target(pool, publish, replay, topic)


def stored(blocks: Iterable[Known]) -> list[dict[str, Any]]:
    """One event for blocks that follow each other, and not too many."""
    events: list[dict[str, Any]] = []
    last: Known | None = None
    for k in blocks:
        if (
            last is None
            or k.parent != last.hash
            or len(events[-1]["block_hashes"]) >= _BLOCKS_OF_EVENT
        ):
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [],
                    "parent_block_hash": k.parent or None,
                    "token_ids": [],
                    "block_size": len(k.ids) // 4,
                    "lora_id": k.adapter or None,
                    "medium": _MEDIUM,
                    "lora_name": str(k.adapter) if k.adapter else None,
                }
            )
        events[-1]["block_hashes"].append(k.hash)
        events[-1]["token_ids"] += k.tokens()
        last = k
    return events


def removed(blocks: Iterable[Known]) -> list[dict[str, Any]]:
    hashes = [k.hash for k in blocks]
    return [
        {
            "type": "BlockRemoved",
            "block_hashes": hashes[i : i + _BLOCKS_OF_EVENT],
            "medium": _MEDIUM,
        }
        for i in range(0, len(hashes), _BLOCKS_OF_EVENT)
    ]


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


class Publisher:
    """The sockets of one target, of one thread. Raises OSError, ImportError."""

    def __init__(self, target: Target):
        try:
            import msgpack
            import zmq
        except ImportError as e:
            raise ImportError(f"--events needs pyzmq and msgpack: {e}") from e
        self._zmq, self._pack = zmq, msgpack.packb
        self._topic = target.topic.encode()
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()
        self._kept_bytes = 0
        self.number = time.time_ns() // 1000 - 1  # of the latest message
        self._sent_at = 0.0
        context = zmq.Context.instance()
        self._pub = context.socket(zmq.PUB)
        self.replay = context.socket(zmq.ROUTER) if target.replay else None
        try:
            self._pub.set_hwm(_QUEUED)
            # as vLLM: who names an address of its own binds it, else it connects to the indexer's
            if any(s in target.publish for s in ("*", "::", "ipc:", "inproc:")):
                self._pub.bind(target.publish)
            else:
                self._pub.connect(target.publish)
            if self.replay is not None:
                self.replay.set_hwm(_KEPT + 2)  # else it drops what it is asked for
                self.replay.bind(target.replay)
        except zmq.ZMQError as e:
            self.close()
            raise OSError(f"events of pool {target.pool}, {target.publish}: {e}") from e

    def close(self) -> None:
        self._pub.close(linger=200)  # milliseconds, for the last message
        if self.replay is not None:
            self.replay.close(linger=0)

    def _payload(self, events: list[dict[str, Any]]) -> bytes:
        return self._pack([time.time(), events, 0])

    def send(self, events: list[dict[str, Any]]) -> None:
        if not events and time.monotonic() - self._sent_at < _SILENCE:
            return
        self._sent_at = time.monotonic()
        for i in range(0, max(1, len(events)), _EVENTS_OF_MESSAGE):
            payload = self._payload(events[i : i + _EVENTS_OF_MESSAGE])
            self.number += 1
            self._pub.send_multipart((self._topic, self.number.to_bytes(8, "big"), payload))
            self._kept.append((self.number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def answer(self, all_blocks: Iterable[Known]) -> None:
        """One who asks for messages. all_blocks: that were told of."""
        frames = self.replay.recv_multipart(self._zmq.NOBLOCK)
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("events: %d frames ask for a message, expected 3", len(frames))
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        messages: Iterable[tuple[int, bytes]] = [m for m in self._kept if m[0] >= first]
        if first <= self.number and (not self._kept or first < self._kept[0][0]):
            everything = [cleared(), *stored(in_chains(all_blocks))]
            messages = [(self.number, self._payload(everything))]
        for number, payload in messages:
            self.replay.send_multipart(
                (client, b"", self._topic, number.to_bytes(8, "big"), payload)
            )
        self.replay.send_multipart((client, b"", b"", _END, b""))


class Events:
    """Follows the daemon and publishes, on a thread. Raises OSError, ImportError."""

    def __init__(self, targets: list[Target], inspect: Inspect, every: float = 0.1):
        pools = {t.pool: PoolBlocks() for t in targets}
        if len(pools) < len(targets):
            raise ValueError("the events of a pool go to one PUB")
        self._follower = Follower(inspect, pools)
        self._every = every
        self._ends = threading.Event()
        self._all: list[tuple[Publisher, PoolBlocks]] = []
        self._thread = threading.Thread(target=self._run, name="attnd-events", daemon=True)
        try:
            for t in targets:
                self._all.append((Publisher(t), pools[t.pool]))
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        self._thread.start()

    def close(self, is_leaving: bool = False) -> None:
        """is_leaving: tells subscribers that nothing is here any more."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(10)
        for publisher, _ in self._all:
            if is_leaving:
                publisher.send([cleared()])
            publisher.close()

    def counts(self) -> dict[str, tuple[str, float]]:
        return {
            "attnd_agent_block_events_total": ("counter", self._follower.n_events),
            "attnd_agent_block_snapshots_total": ("counter", self._follower.n_snapshots),
            "attnd_agent_blocks": ("gauge", sum(len(b.told) for _, b in self._all)),
        }

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        for publisher, _ in self._all:
            publisher.send([cleared()])
            if publisher.replay is not None:
                poller.register(publisher.replay, zmq.POLLIN)
        next_look, said = 0.0, ""
        while not self._ends.is_set():
            asked = dict(poller.poll(max(0.0, next_look - time.monotonic()) * 1000))
            try:
                for publisher, blocks in self._all:
                    if publisher.replay in asked:
                        publisher.answer(blocks.told.values())
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self._every
                    self._look()
                    said = ""
            except attnd.AttndError as e:
                if str(e) != said:
                    log.warning("events: %s", e)
                said = str(e)
            except Exception:
                log.exception("events")

    def _look(self) -> None:
        self._follower.turn()
        for publisher, blocks in self._all:
            change = blocks.changes()
            publisher.send(removed(change.removed) + stored(change.stored))
