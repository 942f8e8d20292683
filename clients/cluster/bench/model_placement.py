"""As bench_placement.py, but with a model of the daemons' caches: no processes, no queues, and minutes
for many daemons. Compares ways to choose the daemons that a client asks about a prompt:

    homes   attnd_cluster.place.homes()
    all     every daemon about every prompt
    index   the best four by an index from block events that is --late requests old

    python3 clients/cluster/bench/model_placement.py TRACE.jsonl [--blocks 5000] [--daemons 16]
"""

from __future__ import annotations

import argparse
import collections

from bench_placement import SIZE, arguments, prompts

from attnd_cluster.place import Backlog, Candidate, homes, order

ASKED = 4


class Daemon:
    """Its cached blocks, by the last token of each; those without references go by last use, the end of
    a prompt first. known: what an index has of them, after the events behind it."""

    def __init__(self, name: str, n_blocks: int):
        self.name, self.n_blocks = name, n_blocks
        self.used: collections.Counter[int] = collections.Counter()
        self.idle: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.known: set[int] = set()
        self.events: collections.deque[tuple[int, bool, int]] = collections.deque()
        self.n_open = 0

    def cached(self, blocks: list[int]) -> int:
        return next((i for i, b in enumerate(blocks) if b not in self.used and b not in self.idle), len(blocks))

    def index_says(self, blocks: list[int], until: int) -> int:
        while self.events and self.events[0][0] <= until:
            _, is_stored, block = self.events.popleft()
            (self.known.add if is_stored else self.known.discard)(block)
        return next((i for i, b in enumerate(blocks) if b not in self.known), len(blocks))

    def n_free(self) -> int:
        return self.n_blocks - len(self.used) - self.n_open

    def open(self, blocks: list[int], now: int) -> int:
        n, self.n_open = self.cached(blocks), self.n_open + 1
        for b in blocks:
            self.used[b] += 1
            self.idle.pop(b, None)
        self.events += [(now, True, b) for b in blocks[n:]]
        while self.idle and self.n_free() < len(self.idle):
            self.events.append((now, False, self.idle.popitem(last=False)[0]))
        return n

    def close(self, blocks: list[int]) -> None:
        self.n_open -= 1
        for b in reversed(blocks):
            self.used[b] -= 1
            if self.used[b] == 0:
                del self.used[b]
                self.idle[b] = None


def run(o: argparse.Namespace, n_daemons: int, n_blocks: int, how: str) -> tuple[float, ...]:
    """The share of blocks that were found; of the busiest daemon, requests, tokens to compute and tokens
    of prompts over the mean of all."""
    daemons = {f"d{i}": Daemon(f"d{i}", n_blocks) for i in range(n_daemons)}
    backlogs = [Backlog() for _ in range(o.clients)]
    is_open: collections.deque[tuple[Daemon, list[int]]] = collections.deque()
    requests, computed, given = (collections.Counter[str]() for _ in range(3))
    n_found = n_all = 0
    for now, tokens in enumerate(prompts(o)):
        blocks = tokens[SIZE - 1 : -1 : SIZE]
        backlog = backlogs[now % o.clients]
        while len(is_open) >= o.open:
            daemon, old = is_open.popleft()
            daemon.close(old)

        def best(names, n_cached):
            found = [
                Candidate(n, n_cached(daemons[n]) * SIZE, n_blocks, daemons[n].n_free(), 0.0, backlog.of(n))
                for n in names
            ]
            return [c.name for c in order(found, len(tokens), SIZE)]

        asked = list(daemons)
        if how == "homes" and n_daemons > ASKED:
            asked = homes(asked, tokens, 0, SIZE, ASKED) or asked[:ASKED]
        elif how == "index":
            asked = best(asked, lambda d: d.index_says(blocks, now - 1 - o.late))[:ASKED]
        daemon = daemons[best(asked, lambda d: d.cached(blocks))[0]]
        n = daemon.open(blocks, now)
        is_open.append((daemon, blocks))
        backlog.give(daemon.name, len(tokens) - n * SIZE, len(tokens))
        n_found, n_all = n_found + n, n_all + len(blocks)
        requests[daemon.name] += 1
        computed[daemon.name] += len(tokens) - n * SIZE
        given[daemon.name] += len(tokens)
    spread = [max(c.values()) * n_daemons / sum(c.values()) for c in (requests, computed, given)]
    return n_found / n_all, *spread


def main() -> None:
    late = argparse.ArgumentParser(add_help=False)
    late.add_argument("--late", type=int, default=300)
    mine, rest = late.parse_known_args()
    o = arguments(rest)
    o.late = mine.late
    one = run(o, 1, o.blocks * o.daemons, "all")[0]
    print("| asked | found | share of one's | busiest: requests | tokens to compute | of prompts |")
    for how in ("homes", "all", "index"):
        found, *spread = run(o, o.daemons, o.blocks, how)
        print(f"| {how} | {found:.3f} | {found / one:.3f} | " + " | ".join(f"{s:.3f}" for s in spread) + " |", flush=True)


if __name__ == "__main__":
    main()
