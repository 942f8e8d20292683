"""What many daemons cost the registry and its readers, with a real etcd and members that are records
only: no daemon runs.

    bench_members.py [--members 1000] [--watchers 50] [--seconds 30]

register  members with a lease each, at once: writes a second
steady    each renews its lease every third of --ttl and writes its load every --load seconds; what etcd
          and a watcher take of a core for that, and how long a write takes
fan-out   from a member's write to the last of --watchers that has seen it, and to the middle one
client    how long a new client takes to read who is there
place     finding a prompt's homes among so many members, and choosing among the four that are asked
spread    a model, no code of the client: 10 million sequences over the members, each on the one of four
          homes that had fewest when its client last knew; clients know it a thousand sequences late. The
          registry has no key of any of them
placing   ClusterPool's own placement among daemons that have these 10 million, and whose answers are made
          here: --clients by turns place prompts of 64 to 2,000 tokens, for each of which a sequence
          somewhere ends; records of members are as they were up to --members placements ago
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
for part in ("python", "cluster"):
    sys.path.insert(0, str(ROOT / "clients" / part / "src"))
import attnd  # noqa: E402
import numpy as np  # noqa: E402

from attnd_cluster.keys import MEMBERS, Member, PoolLoad  # noqa: E402
from attnd_cluster.members import Members  # noqa: E402
from attnd_cluster.place import Backlog, Candidate, homes, order  # noqa: E402
from attnd_cluster.pool import ClusterPool  # noqa: E402
from attnd_cluster.registry import RegistryLost, open_registry  # noqa: E402

LONG = 120.0


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Many members in a real etcd.")
    p.add_argument("--members", type=int, default=1000)
    p.add_argument("--watchers", type=int, default=50)
    p.add_argument("--seconds", type=float, default=30)
    p.add_argument("--ttl", type=float, default=9, help="seconds of a lease (%(default)s)")
    p.add_argument("--load", type=float, default=10, help="seconds between two writes of a member")
    p.add_argument("--threads", type=int, default=8, help="that stand for all agents")
    p.add_argument("--sequences", type=int, default=10_000_000)
    p.add_argument("--placements", type=int, default=5000)
    p.add_argument("--clients", type=int, default=8)
    p.add_argument("--no-etcd", action="store_true", help="the last three only")
    return p.parse_args()


def start_etcd(directory: pathlib.Path) -> tuple[subprocess.Popen[bytes], str]:
    if shutil.which("etcd") is None:
        raise SystemExit("etcd is not installed (apt-get install etcd-server)")
    ports = []
    for _ in range(2):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            ports.append(s.getsockname()[1])
    client, peer = (f"http://127.0.0.1:{p}" for p in ports)
    command = ["etcd", "--name", "m", "--data-dir", str(directory / "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    etcd = subprocess.Popen([*command, "--initial-cluster", f"m={peer}"], stderr=subprocess.DEVNULL)
    url = f"etcd://127.0.0.1:{ports[0]}/bench"
    registry = open_registry(url)
    for _ in range(600):
        try:
            registry.list(MEMBERS, 1.0)
            return etcd, url
        except RegistryLost:
            time.sleep(0.1)
    raise SystemExit("etcd does not answer")


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def member(i: int, free: int) -> Member:
    url = f"tls+tcp://host-{i}.example.org:7471"
    agent = f"http://host-{i}.example.org:9471"
    return Member(f"host-{i}", url, agent, f"{i:032x}", pools={"llama": PoolLoad(50_000, free, 40)})


class Agents:
    """Threads, each of which does what some agents do."""

    def __init__(self, url: str, options: argparse.Namespace):
        self.options, self.writes, self.renewals, self.late = options, 0, 0, 0
        self.took: list[float] = []
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._ready = threading.Barrier(options.threads + 1)
        self.threads = [
            threading.Thread(target=self._run, args=(url, i), daemon=True)
            for i in range(options.threads)
        ]
        for t in self.threads:
            t.start()

    def registered(self) -> None:
        self._ready.wait()

    def _write(self, registry, i, free, lease) -> None:
        start = time.monotonic()
        registry.put(MEMBERS + f"host-{i}", member(i, free).to_json(), lease, LONG)
        with self._lock:
            self.writes += 1
            self.took.append(time.monotonic() - start)

    def _run(self, url: str, first: int) -> None:
        registry, o = open_registry(url), self.options
        mine = {}
        for i in range(first, o.members, o.threads):
            mine[i] = registry.grant(o.ttl * 20, LONG)  # until all are there
            self._write(registry, i, 50_000, mine[i])
        self._ready.wait()
        start, step = time.monotonic(), 0
        due = []  # (when, member, whether it is a write), spread evenly
        for k, i in enumerate(mine):
            part = k / len(mine)
            due += [(start + part * o.ttl / 3, i, False), (start + part * o.load, i, True)]
        due.sort()
        while due and not self._ends.is_set():
            when, i, is_write = due.pop(0)
            if self._ends.wait(max(0.0, when - time.monotonic())):
                return
            with self._lock:
                self.late += time.monotonic() - when > 0.5
            step += 1
            if is_write:
                self._write(registry, i, 50_000 - step, mine[i])
            else:
                mine[i].keep(LONG)
                with self._lock:
                    self.renewals += 1
            due.append((when + (o.load if is_write else o.ttl / 3), i, is_write))
            due.sort()

    def end(self) -> None:
        self._ends.set()
        for t in self.threads:
            t.join()


def percentile(x: list[float], part: float) -> float:
    return sorted(x)[min(len(x) - 1, int(len(x) * part))]


def main() -> None:
    o = arguments()
    if not o.no_etcd:
        with tempfile.TemporaryDirectory() as directory:
            etcd, url = start_etcd(pathlib.Path(directory))
            try:
                measure(o, etcd, url)
            finally:
                etcd.kill()
                etcd.wait()
    place(o)
    placing(o, spread(o))


def measure(o: argparse.Namespace, etcd: subprocess.Popen[bytes], url: str) -> None:
    start = time.monotonic()
    agents = Agents(url, o)
    agents.registered()
    took = time.monotonic() - start
    print(f"register: {o.members} in {took:.1f} s, {2 * o.members / took:.0f} writes a second")
    agents.writes, agents.took = 0, []
    for n in (0, 1, o.watchers):
        watchers = [Members(open_registry(url)) for _ in range(n)]
        for w in watchers:
            if not w.wait(LONG, lambda now: len(now) >= o.members):
                raise SystemExit("a watcher does not see all members")
        before = agents.writes, agents.renewals, cpu_seconds(etcd.pid), time.process_time()
        agents.took, agents.late = [], 0
        start = time.monotonic()
        time.sleep(o.seconds)
        passed = time.monotonic() - start
        rates = [(b - a) / passed for a, b in zip(before, (agents.writes, agents.renewals))]
        cores = (cpu_seconds(etcd.pid) - before[2]) / passed
        own = (time.process_time() - before[3]) / passed
        print(
            f"steady, {n} watchers: {rates[0]:.0f} writes, {rates[1]:.0f} renewals,"
            f" {rates[0] * n:.0f} events a second; etcd {cores:.2f} cores, this process {own:.2f};"
            f" a write takes {percentile(agents.took, 0.5) * 1e3:.1f} ms (p50),"
            f" {percentile(agents.took, 0.99) * 1e3:.1f} (p99); over 0.5 s late: {agents.late}",
            flush=True,
        )
        if n > 1:
            fan_out(url, watchers)
        for w in watchers:
            w.close()
    registry = open_registry(url)
    took_all = []
    for _ in range(5):
        start = time.monotonic()
        w = Members(registry := open_registry(url))
        w.wait(LONG, lambda now: len(now) >= o.members)
        took_all.append(time.monotonic() - start)
        w.close()
    n_bytes = sum(map(len, registry.list(MEMBERS, LONG).entries.values()))
    print(f"client: {statistics.median(took_all) * 1e3:.0f} ms to know all, {n_bytes / 1e3:.0f} kB")
    agents.end()


def fan_out(url: str, watchers: list[Members]) -> None:
    registry = open_registry(url)
    first, middle = [], []
    for k in range(20):
        marked = member(0, k)._replace(name=f"marker-{k}")
        seen: list[float] = []

        def watch(w: Members, name: str = marked.name) -> None:
            w.wait(LONG, lambda now: name in now)
            seen.append(time.monotonic())

        threads = [threading.Thread(target=watch, args=(w,)) for w in watchers]
        for t in threads:
            t.start()
        time.sleep(0.05)
        start = time.monotonic()
        registry.put(MEMBERS + marked.name, marked.to_json(), None, LONG)
        for t in threads:
            t.join()
        first.append(max(seen) - start)
        middle.append(statistics.median(seen) - start)
        registry.delete(MEMBERS + marked.name, LONG)
    print(
        f"fan-out to {len(watchers)}: the middle one after {statistics.median(middle) * 1e3:.1f} ms, the last"
        f" after {statistics.median(first) * 1e3:.1f} ms (p50 of 20), {max(first) * 1e3:.1f} at most",
        flush=True,
    )


def place(o: argparse.Namespace) -> None:
    names = [f"host-{i}" for i in range(o.members)]
    rng = np.random.default_rng(1)
    for n_tokens in (64, 2000):
        took = []
        for _ in range(20):
            ids = rng.integers(0, 128_000, n_tokens).tolist()
            start = time.perf_counter()
            found = homes(names, ids, 0, 16, 4)
            asked = [Candidate(n, 0, 50_000, 40_000, 0.0, 0.0) for n in found]
            order(asked, n_tokens, 16)
            took.append(time.perf_counter() - start)
        print(f"place: {n_tokens} tokens among {o.members}: {statistics.median(took) * 1e3:.1f} ms")


def spread(o: argparse.Namespace) -> np.ndarray:
    """How many sequences each member has."""
    rng = np.random.default_rng(2)
    held = np.zeros(o.members, np.int64)
    start = time.monotonic()
    for _ in range(o.sequences // 1000):
        four = rng.integers(0, o.members, (1000, 4))
        held += np.bincount(four[np.arange(1000), held[four].argmin(1)], minlength=o.members)
    ratio = held.max() / held.mean()
    print(
        f"spread: {held.sum()} sequences, {held.mean():.0f} each, the busiest {ratio:.3f} x the mean"
        f" ({time.monotonic() - start:.0f} s of simulation); keys of sequences in the registry: 0"
    )
    return held


BLOCKS = 64  # of a sequence, which has 1,000 tokens on average


class Answers:
    """A host of a client, and its pool, of whose daemon there is only how many sequences it has."""

    def __init__(self, name: str, i: int, held: np.ndarray, n_blocks: int):
        self.name, self._i, self._held, self._n_blocks = name, i, held, n_blocks

    def ask(self, spec: Any, dtypes: Any, what: Any, seconds: Any = None) -> Any:
        return what(self)

    def n_free(self) -> int:
        return max(0, self._n_blocks - BLOCKS * int(self._held[self._i]))

    def probe(self, tokens: Any, **options: Any) -> attnd.Probe:
        return attnd.Probe(0, 0, self._n_blocks, self.n_free(), 0)

    def open(self, id: int, **options: Any) -> Any:
        self._held[self._i] += 1
        return types.SimpleNamespace(n_cached=0)


class Placer:
    """What ClusterPool needs of a client for a placement."""

    timeout, is_closed = 60.0, False

    def __init__(self, hosts: dict[str, Answers], records: dict[str, Member]):
        self._hosts, self._records = hosts, records
        self.backlog, self.lock = Backlog(), threading.Lock()
        spec = attnd.PoolSpec("llama", 32, 32, 8, 128, block_tokens=16)
        self.pool = ClusterPool(self, spec, spec)  # type: ignore[arg-type]

    def serving(self) -> list[Member]:
        return list(self._records.values())

    def host(self, member: Member) -> Answers:
        return self._hosts[member.name]


def placing(o: argparse.Namespace, held: np.ndarray) -> None:
    n_blocks = BLOCKS * int(1.25 * held.mean() + 100)
    names = [f"host-{i}" for i in range(o.members)]
    hosts = {n: Answers(n, i, held, n_blocks) for i, n in enumerate(names)}
    records: dict[str, Member] = {}

    def tell() -> None:
        for i, n in enumerate(names):
            load = {"llama": PoolLoad(n_blocks, hosts[n].n_free(), int(held[i]))}
            records[n] = member(i, 0)._replace(name=n, pools=load)

    tell()
    clients = [Placer(hosts, records) for _ in range(o.clients)]
    rng, took = np.random.default_rng(3), []
    n_given = np.zeros(o.members, np.int64)
    for k in range(o.placements):
        if k % o.members == 0:
            tell()
        ids = rng.integers(0, 128_000, int(rng.integers(64, 2001))).tolist()
        before = held.copy()
        start = time.perf_counter()
        clients[k % o.clients].pool.place(None, ids, 0, None)
        took.append(time.perf_counter() - start)
        n_given += held - before
        held[rng.choice(o.members, p=held / held.sum())] -= 1
    print(
        f"placing: {o.placements} among {o.members} daemons with {held.sum()} sequences: p50"
        f" {percentile(took, 0.5) * 1e3:.1f} ms, p99 {percentile(took, 0.99) * 1e3:.1f}; the busiest has"
        f" {held.max() / held.mean():.3f} x the mean, and was given {n_given.max()} where the mean is"
        f" {n_given.mean():.1f}"
    )


if __name__ == "__main__":
    main()
