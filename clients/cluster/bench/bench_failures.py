"""What a worker's sequences wait for when something dies, with a real etcd, daemons on the CPU and an
agent beside each. Every output is compared with float64.

    bench_failures.py [--rounds 10] [--away 60] [--sequences 6]       $ATTN_BUILD: the build folder

calm        time of a token of each sequence, all decoding on threads of one process
host lost   daemon and agent are killed: how long the sequences of that host stood still, and the others
evacuated   SIGTERM to the agent: its sequences move while they decode; how long each stood still
controller  the leader of two is killed: until the other leads
registry    etcd is stopped for --away seconds: times of a token against as long before it
"""

from __future__ import annotations

import argparse
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
from conftest import await_  # noqa: E402, which knows where attnd is
from etcd import Etcd  # noqa: E402
from ledger import Text, rebuild  # noqa: E402
from rig import SPEC, Host  # noqa: E402

import attnd_cluster  # noqa: E402
from attnd_cluster.keys import CONTROLLER  # noqa: E402
from attnd_cluster.registry import open_registry  # noqa: E402


def at(times: list[float], part: float) -> float:
    """Milliseconds."""
    return sorted(times)[min(len(times) - 1, int(len(times) * part))] * 1e3


class Worker:
    """A thread that decodes one sequence; times are of its tokens, by when they ended."""

    def __init__(self, text: Text):
        self.text, self.times = text, [(time.monotonic(), 0.0)]
        self.gate = threading.Event()  # it decodes while this is set
        self.gate.set()
        self.failed: BaseException | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ends:
                self.gate.wait()
                if len(self.text.ids) > 400:  # SPEC has room for few
                    self.text.seq.truncate(100)
                    del self.text.ids[100:]
                start = time.monotonic()
                self.text.decode()
                end = time.monotonic()
                self.times.append((end, end - start))
                time.sleep(0.002)
        except BaseException as e:
            self.failed = e

    def since(self, start: float) -> list[float]:
        if self.failed is not None:
            raise self.failed
        return [took for end, took in list(self.times) if end >= start]

    def has_gone_on(self, n: int, start: float) -> bool:
        return len(self.since(start)) >= n

    def stop(self) -> None:
        self._ends = True
        self.gate.set()
        self._thread.join()
        self.since(0)


def watched(workers: list[Worker], act, is_over) -> dict[Worker, float]:
    """Each worker's longest token from act() on, until is_over() and some tokens more."""
    start = time.monotonic()
    act()
    await_("that it is over", is_over)
    over = time.monotonic()
    await_("tokens of all", lambda: all(w.has_gone_on(20, over) for w in workers))
    return {w: max(w.since(start)) for w in workers}


def row(what: str, waits: list[float]) -> None:
    print(
        f"| {what} | {len(waits)} | {at(waits, 0.5):.1f} | {at(waits, 0.99):.1f} |"
        f" {max(waits) * 1e3:.1f} |",
        flush=True,
    )


def lose(hosts: dict[str, Host], pool, workers: list[Worker], rounds: int) -> None:
    own, others, ended, dead = [], [], [], []
    members = pool.client.members
    for _ in range(rounds):
        name = workers[0].text.seq.where
        here = [w for w in workers if w.text.seq.where == name]
        seen: dict[str, float] = {}  # when, to 10 ms

        def kill(host: Host = hosts[name], seen: dict[str, float] = seen) -> None:
            seen["killed"] = time.monotonic()
            host.signal_agent(signal.SIGKILL)
            host.signal_daemon(signal.SIGKILL)

        def is_elsewhere(name: str = name, seen: dict[str, float] = seen) -> bool:
            now = time.monotonic()
            if name not in members.now():
                seen.setdefault("ended", now)
            if members.known(name) is None:
                seen.setdefault("dead", now)
            return "dead" in seen and all(w.text.seq.where != name for w in workers)

        waits = watched(workers, kill, is_elsewhere)
        own += [waits[w] for w in here]
        others += [waits[w] for w in workers if w not in here]
        ended.append(seen["ended"] - seen["killed"])
        dead.append(seen["dead"] - seen["killed"])
        hosts[name].start()
        await_("its return", lambda name=name: name in pool.client.members.now())
    row("a host is lost: its sequences", own)
    row("... until the client sees its lease end", ended)
    row("... until it is declared dead", dead)
    if others:
        row("the others meanwhile, longest", others)


def evacuate(hosts: dict[str, Host], pool, workers: list[Worker], rounds: int) -> None:
    own = []
    for _ in range(rounds):
        name = workers[0].text.seq.where
        here = [w for w in workers if w.text.seq.where == name]
        n_rebuilt = [w.text.seq.n_rebuilt for w in workers]
        waits = watched(
            workers,
            lambda name=name: hosts[name].signal_agent(signal.SIGTERM),
            lambda name=name: hosts[name].agent.poll() is not None,
        )
        own += [waits[w] for w in here]
        assert [w.text.seq.n_rebuilt for w in workers] == n_rebuilt, "none is made anew"
        hosts[name].start_agent()
        await_(
            "its return",
            lambda name=name: getattr(pool.client.members.now().get(name), "state", "") == "serving",
        )
    row("evacuated, longest token of each", own)


def controllers(etcd: Etcd, host: Host, directory: pathlib.Path, rounds: int) -> None:
    registry = open_registry(etcd.url)

    def leader() -> bytes | None:
        return next(iter(registry.list(CONTROLLER, 10).entries.values()), None)

    def start() -> subprocess.Popen:
        command = [sys.executable, "-B", "-m", "attnd_cluster.controller", "--registry", etcd.url]
        command += ["--token-file", str(host._dir / "token")]
        with open(directory / "controller.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    waits, running = [], []
    try:
        for _ in range(rounds):
            running.append(start())
            await_("a leader", leader)
            running.append(start())
            time.sleep(2)  # the second one waits by now
            first, was = running[0], leader()
            start_s = time.monotonic()
            first.kill()
            await_("another", lambda was=was: leader() not in (None, was))
            waits.append(time.monotonic() - start_s)
            for process in running:
                process.kill()
                process.wait()
            running.clear()
            await_("that nobody leads", lambda: leader() is None)
    finally:
        for process in running:
            process.kill()
        registry.close()
    row("a controller is killed: until another leads", waits)


def main() -> None:
    p = argparse.ArgumentParser(description="What sequences wait for when something dies.")
    p.add_argument("--rounds", type=int, default=10)
    p.add_argument("--away", type=float, default=60)
    p.add_argument("--sequences", type=int, default=6)
    p.add_argument("--ttl", type=float, default=3)
    o = p.parse_args()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="attnd-failures-"))
    hosts: dict[str, Host] = {}
    workers: list[Worker] = []
    with Etcd(directory / "etcd", 1) as etcd:
        try:
            for name in "abc":
                hosts[name] = Host(directory, name, etcd.url, ttl=o.ttl).start()
            with attnd_cluster.connect(f"cluster+{etcd.url}", rebuild=rebuild, timeout=20) as client:
                await_("all members", lambda: len(client.members.now()) == 3)
                pool = client.create_pool(SPEC)
                workers += [Worker(Text(pool, range(i, i + 100))) for i in range(o.sequences)]
                print("| what | times | p50, ms | p99 | most |\n|---|---|---|---|---|")
                start = time.monotonic()
                time.sleep(o.away)
                row("calm: a token", [t for w in workers for t in w.since(start)])
                etcd.signal(0, signal.SIGSTOP)
                start = time.monotonic()
                time.sleep(o.away)
                row(f"etcd stopped for {o.away:.0f} s", [t for w in workers for t in w.since(start)])
                etcd.signal(0, signal.SIGCONT)
                await_("etcd", lambda: not client.members.is_frozen)
                time.sleep(2 * o.ttl)
                lose(hosts, pool, workers, o.rounds)
                evacuate(hosts, pool, workers, o.rounds)
                for w in workers:
                    w.stop()
                    w.text.verify()
            controllers(etcd, hosts["a"], directory, max(1, o.rounds // 2))
        finally:
            for host in hosts.values():
                host.close()


if __name__ == "__main__":
    main()
