"""What steps notice of a registry that is away for minutes: two clusters of three daemons side by side, each
with an etcd of three members, of which the first one's is taken away. Every output is compared with float64.

    bench_outage.py [--away 600] [--turn 20] [--sequences 4]          $ATTN_BUILD: the build folder

The sequences of one cluster decode at a time, by turns of --turn seconds, so that both see the same machine.
`before` all is there; `stopped`: all members of the first cluster's etcd have SIGSTOP for --away seconds;
`no majority`: two of the three are killed, for a half of that. Meanwhile a worker appends to a daemon in
strict mode beside each cluster, every 0.1 s. At the end: that no member of the first cluster was declared
dead and no sequence was made anew.
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import statistics
import tempfile
import threading
import time

from bench_failures import Etcd, Host, SPEC, Text, Worker, at, await_, rebuild

import attnd
import attnd_cluster
import numpy as np
from attnd_cluster.keys import DEAD, FATES
from attnd_cluster.registry import open_registry

FENCE, TTL = 2.0, 3.0


class Strict:
    """A thread that appends to one daemon, and when it was let."""

    def __init__(self, url: str):
        self.appended: list[float] = []
        self.refused: list[float] = []
        self._ends = threading.Event()
        self._client = attnd.connect(url, timeout=0.5)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        kv = np.zeros((1, SPEC.num_kv_heads, SPEC.head_dim_k), np.float32)
        with self._client.create_pool(SPEC._replace(name="strict")) as pool, pool.open() as seq:
            pos = 0
            while not self._ends.wait(0.1):
                try:
                    pool.step(0, [(seq, pos, 1)], k=kv, v=kv)
                    self.appended.append(time.monotonic())
                    pos += 1
                except (attnd.FencedError, attnd.DeadlineError, attnd.TimedOutError):
                    self.refused.append(time.monotonic())
                if pos == 512:
                    seq.truncate(0)
                    pos = 0

    def report(self, what: str, start: float, past: float) -> None:
        n = [sum(start <= t < past for t in x) for x in (self.appended, self.refused)]
        late = max([t - start for t in self.appended if start <= t < past], default=0.0)
        print(f"strict, {what}: {n[0]} appended, the last {late:.1f} s behind its beginning; {n[1]} refused")

    def close(self) -> None:
        self._ends.set()
        self._thread.join()
        self._client.close()


class Side:
    """A cluster and the worker's threads of its sequences."""

    def __init__(self, directory: pathlib.Path, name: str, n: int):
        self.name, self.etcd = name, Etcd(directory / "etcd", 3).__enter__()
        self.hosts = [Host(directory, name + x, self.etcd.url, ttl=TTL) for x in "abc"]
        for host in self.hosts:
            host.start()
        self.client = attnd_cluster.connect(f"cluster+{self.etcd.url}", rebuild=rebuild, timeout=20)
        await_("all members", lambda: len(self.client.members.now()) == 3)
        pool = self.client.create_pool(SPEC)
        self.workers = [Worker(Text(pool, range(i, i + 100))) for i in range(n)]
        for w in self.workers:
            w.gate.clear()
        self.hosts.append(Host(directory, name + "s", self.etcd.url, ttl=TTL))
        self.hosts[-1].start_daemon("--engine.fence", f"{FENCE:g}s")
        self.hosts[-1].start_agent("--fence", f"{FENCE:g}")
        await_("the strict one", lambda: len(self.client.members.now()) == 4)
        self.strict = Strict(self.hosts[-1].url)
        await_("its first append", lambda: self.strict.appended)

    def turn(self, seconds: float) -> list[float]:
        """Times of tokens that began in it."""
        start = time.monotonic()
        for w in self.workers:
            w.gate.set()
        time.sleep(seconds)
        for w in self.workers:
            w.gate.clear()
        past = time.monotonic()
        time.sleep(0.2)
        found = [(end - took, took) for w in self.workers for end, took in list(w.times)]
        for w in self.workers:
            w.since(past)  # raises what failed
        return [took for begun, took in found if start <= begun < past]

    def verify(self) -> None:
        registry = open_registry(self.etcd.url)
        fates = registry.list(FATES, 10).entries
        registry.close()
        members = sorted(self.client.members.now())
        dead = [key for key, fate in fates.items() if fate == DEAD]
        n_rebuilt = sum(w.text.seq.n_rebuilt for w in self.workers)
        print(f"{self.name}: members {members}, {len(dead)} declared dead, {n_rebuilt} sequences made anew")
        for w in self.workers:
            w.stop()
            w.text.verify()
        print(f"{self.name}: {sum(w.text.n_checked for w in self.workers)} outputs were float64's")

    def close(self) -> None:
        self.strict.close()
        self.client.close()
        for host in self.hosts:
            host.close()
        self.etcd.__exit__()


def measure(what: str, sides: list[Side], seconds: float, turn: float) -> None:
    """Rows of both, by turns, for so long."""
    start = time.monotonic()
    took: dict[str, list[list[float]]] = {s.name: [] for s in sides}
    while time.monotonic() - start < seconds:
        for side in (*sides, *sides[::-1]):
            took[side.name].append(side.turn(turn))
    for side in sides:
        turns = took[side.name]
        every = [t for x in turns for t in x]
        p99 = statistics.median(at(x, 0.99) for x in turns)
        frozen = "frozen" if side.client.members.is_frozen else "known"
        print(
            f"| {what} | {side.name}, members {frozen} | {len(turns)} | {len(every)} | {at(every, 0.5):.1f} |"
            f" {at(every, 0.99):.1f} | {p99:.1f} | {max(every) * 1e3:.0f} |",
            flush=True,
        )
        side.strict.report(f"{side.name}, {what}", start, time.monotonic())


def main() -> None:
    p = argparse.ArgumentParser(description="Steps while the registry is away for minutes.")
    p.add_argument("--away", type=float, default=600)
    p.add_argument("--turn", type=float, default=20)
    p.add_argument("--sequences", type=int, default=4)
    o = p.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="attnd-outage-"))
    sides: list[Side] = []
    try:
        for name in ("lost", "kept"):
            (directory / name).mkdir()
            sides.append(Side(directory / name, name, o.sequences))
        etcd = sides[0].etcd
        print("| | cluster | turns | tokens | p50, ms | p99 | p99 of a turn, median | longest |")
        print("|---|---|---|---|---|---|---|---|")
        measure("before", sides, o.away / 4, o.turn)
        for i in range(3):
            etcd.signal(i, signal.SIGSTOP)
        measure("stopped", sides, o.away, o.turn)
        for i in range(3):
            etcd.signal(i, signal.SIGCONT)
        await_("the registry", lambda: not sides[0].client.members.is_frozen)
        measure("it is back", sides, o.away / 10, o.turn)
        for i in (0, 1):
            etcd.signal(i, signal.SIGKILL)
        measure("no majority", sides, o.away / 2, o.turn)
        for i in (0, 1):
            etcd.start(i)
        await_("the registry", lambda: not sides[0].client.members.is_frozen)
        measure("it is back again", sides, o.away / 10, o.turn)
        for side in sides:
            side.verify()
    finally:
        for side in sides:
            side.close()


if __name__ == "__main__":
    main()
