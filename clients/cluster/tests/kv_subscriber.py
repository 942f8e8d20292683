"""A subscriber of vLLM's KV events that keeps an index, as a router's does.

Alone it decodes with vLLM's own classes: `PYTHON kv_subscriber.py PUB REPLAY TOPIC`, with a Python
that has vLLM. It writes its index as a line of JSON after each message, until its input ends.
"""

from __future__ import annotations

import json
import sys
import threading

import zmq


def decode_map(payload: bytes):
    """(time, events, rank) of the bytes, by the names of vLLM's fields; nothing else may be there."""
    import msgpack

    fields = {
        "BlockStored": {
            "block_hashes": list,
            "parent_block_hash": (int, type(None)),
            "token_ids": list,
            "block_size": int,
            "lora_id": (int, type(None)),
            "medium": str,
            "lora_name": (str, type(None)),
        },
        "BlockRemoved": {"block_hashes": list, "medium": str},
        "AllBlocksCleared": {},
    }
    when, events, rank = msgpack.unpackb(payload)
    assert isinstance(when, float) and rank == 0
    for e in events:
        want = {"type": str, **fields[e["type"]]}
        assert set(e) == set(want), e
        assert all(isinstance(e[name], kind) for name, kind in want.items()), e
    return when, events, rank


def decode_vllm(payload: bytes):
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    events = []
    for e in batch.events:
        one = {f: getattr(e, f) for f in e.__struct_fields__}
        events.append({"type": type(e).__name__, **one})
    return batch.ts, events, batch.data_parallel_rank


class Subscriber:
    """index: (parent, adapter's name, tokens) of each block, by its hash."""

    def __init__(self, publish: str, replay: str, topic: str, decode=decode_map):
        self._decode, self._topic, self._replay_url = decode, topic.encode(), replay
        context = zmq.Context.instance()
        self._sub = context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._sub.connect(publish)
        self.index: dict[int, tuple] = {}
        self.last: int | None = None
        self.n_replays = self.n_cleared = self.n_removed = self.n_lost = 0
        self.lose = 0  # messages to come that it loses

    def close(self) -> None:
        self._sub.close(linger=0)

    def read(self, milliseconds: int = 100) -> bool:
        """A message, if one comes; what was missed before it is asked for."""
        if not self._sub.poll(milliseconds):
            return False
        topic, number, payload = self._sub.recv_multipart()
        assert topic == self._topic and len(number) == 8
        if self.lose > 0:
            self.lose -= 1
            self.n_lost += 1
            return True
        n = int.from_bytes(number, "big")
        if self.last is None or n > self.last + 1:
            self.replay(0 if self.last is None else self.last + 1)
        self._take(n, payload)
        return True

    def replay(self, first: int) -> None:
        self.n_replays += 1
        ask = zmq.Context.instance().socket(zmq.REQ if first == 0 else zmq.DEALER)
        ask.connect(self._replay_url)
        frames = [first.to_bytes(8, "big")]
        ask.send_multipart(frames if first == 0 else [b"", *frames])
        while True:
            assert ask.poll(60_000), "no replay"
            got = ask.recv_multipart()
            if got[0] == b"" and len(got) == 4:
                got = got[1:]
            topic, number, payload = got[-3:]
            if payload == b"":
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            assert topic == self._topic
            self._take(int.from_bytes(number, "big"), payload)
            if first == 0:  # of a REQ socket only the first part of an answer comes
                break
        ask.close(linger=0)

    def _take(self, n: int, payload: bytes) -> None:
        if self.last is not None and n <= self.last:
            return
        self.last = n
        for e in self._decode(payload)[1]:
            self._apply(e)

    def _apply(self, e: dict) -> None:
        if e["type"] == "AllBlocksCleared":
            self.n_cleared += 1
            self.index.clear()
            return
        if e["type"] == "BlockRemoved":
            for h in e["block_hashes"]:
                del self.index[h]
                self.n_removed += 1
            return
        assert e["type"] == "BlockStored"
        size, parent = e["block_size"], e["parent_block_hash"]
        assert len(e["token_ids"]) == size * len(e["block_hashes"])
        for i, h in enumerate(e["block_hashes"]):
            assert parent is None or parent in self.index, "a block whose parent is not known"
            assert h not in self.index and 0 < h < 1 << 64
            tokens = tuple(e["token_ids"][i * size : (i + 1) * size])
            self.index[h] = (parent, e["lora_name"], tokens)
            parent = h

    def tree(self) -> dict[tuple, int]:
        return {content: h for h, content in self.index.items()}

    def cached(self, tokens, adapter: int = 0, size: int = 16) -> int:
        """How many leading tokens of a prompt the index has, but never the last one."""
        tree, parent, n = self.tree(), None, 0
        while n + size < len(tokens):
            name = str(adapter) if adapter else None
            parent = tree.get((parent, name, tuple(tokens[n : n + size])))
            if parent is None:
                break
            n += size
        return n


def main() -> None:
    s = Subscriber(*sys.argv[1:4], decode=decode_vllm)
    ends = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    print("ready", flush=True)
    while not ends.is_set():
        if s.read():
            print(json.dumps(sorted((h, *c) for h, c in s.index.items())), flush=True)


if __name__ == "__main__":
    main()
