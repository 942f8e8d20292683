"""A cluster whose links are cut all the time, and old handles that try to append: one process of
test_old_handles.py, which starts several over one etcd.

    old_handles.py DIRECTORY ETCD_URL PREFIX CUTS SEED    prints its counts as JSON in the last line

Each driver has three sequences. It brings them to one daemon, cuts something there, and goes on
decoding until they are elsewhere, or until what was cut is healed. Workers that know nothing of the
registry then append with the handles of before, round the cut, until the daemon has registered again
and once more. Every row is compared with float64 over all that was acknowledged, and every sequence's
length with the ledger. Now and then all is healed, and each daemon has nothing open but what is a
driver's.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import logging
import pathlib
import random
import signal
import sys
import threading
import time

import attnd
import conftest
import numpy as np
from ledger import VOCAB, Text, next_id, rebuild, rows
from links import Links
from rig import SPEC, Host

import attnd_cluster
from attnd_cluster.hosts import Dtypes

N_HOSTS, N_DRIVERS, N_TEXTS = 8, 5, 3
TTL, FENCE, LONG = 1.0, 0.6, 120.0
ALL_IN_ORDER = 400  # cuts from one look at everything to the next
REFUSED = (attnd.NotFoundError, attnd.StaleEpochError, attnd.FencedError)  # MovedError is a NotFound


def _next(t: Text):
    """Position, k and v of its next token in the first layer. As the worker would append them: what
    is cached under a token's id is to be right, whoever gave it."""
    pos = len(t.ids)
    _, k, v = rows(0, [next_id(t.ids)], pos)
    return pos, k, v


class Place:
    """A host and its links."""

    def __init__(self, links: Links, directory, name: str, etcd: str, prefix: str, is_strict: bool):
        self.name, self.is_strict = name, is_strict
        self.host = host = Host(directory, name, "", ttl=TTL)
        self.names = tuple(f"{name}.{end}" for end in ("registry", "workers", "admin"))
        self.registry, self.workers, self.admin = self.names
        at = links.add(self.registry, etcd)
        host.registry = f"etcd://{at[0]}:{at[1]}/{prefix}"
        daemon = host.url[len("tcp://") :].split(":")
        at = links.add(self.workers, (daemon[0], int(daemon[1])))
        self.url = f"tcp://{at[0]}:{at[1]}"  # that members see; host.url goes round the cut
        self._endpoint = links.add(self.admin, host.socket, host.socket + ".cut")
        self.is_taken = threading.Lock()
        self.operator: attnd.Client | None = None

    def start_daemon(self) -> None:
        settings = ("--engine.fence", f"{FENCE * 1000:.0f}ms") if self.is_strict else ()
        self.host.start_daemon(*settings)
        self.operator = attnd.connect(f"ipc://{self.host.socket}", timeout=LONG)

    def start_agent(self) -> None:
        options = ["--url", self.url, "--endpoint", f"ipc://{self._endpoint}"]
        self.host.start_agent(*options, *(("--fence", f"{FENCE}") if self.is_strict else ()))

    def close(self) -> None:
        if self.operator is not None:
            self.operator.close()
        self.host.close()
        pathlib.Path(self.host.socket + ".cut").unlink(missing_ok=True)

    def _page(self, after: int):
        try:
            return self.operator.inspect("sequences", after)
        except attnd.SessionGoneError:  # nobody has looked for a lease
            self.operator.reopen()
            return self.operator.inspect("sequences", after)

    def open_sequences(self) -> set[int]:
        found, after = set(), 0
        while True:
            page = self._page(after)
            found |= {int(s["sequence"]) for s in page["sequences"]}
            after = int(page.get("next", 0))
            if after == 0:
                return found


class Run:
    def __init__(self, directory, etcd_url: str, prefix: str, n_cuts: int, seed: int, links: Links):
        self.n_cuts, self.seed, self.links = n_cuts, seed, links
        self.counts: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()
        self.failed: BaseException | None = None
        host, port = etcd_url[len("etcd://") :].split("/")[0].split(":")
        etcd = host, int(port)
        names = [f"{prefix}{i}" for i in range(N_HOSTS)]
        self.places = {
            n: Place(links, directory, n, etcd, prefix, i % 2 == 1) for i, n in enumerate(names)
        }
        at = links.add("client", etcd)
        self.url = f"cluster+etcd://{at[0]}:{at[1]}/{prefix}"
        self.drivers: list[Driver] = []
        self.look = threading.Barrier(N_DRIVERS, action=self._look)
        self.n_looks = 0

    def count(self, what: str, n: int = 1) -> int:
        with self.lock:
            self.counts[what] += n
            return self.counts[what]

    def __enter__(self) -> Run:
        for p in self.places.values():
            p.start_daemon()
            p.start_agent()
        self.client = attnd_cluster.connect(
            self.url, rebuild=rebuild, timeout=LONG, connect_timeout=LONG, idle=1
        )
        # each agent's first registration: one that is cut before it is no member that could be lost
        assert self.client.members.wait(300, lambda now: set(now) == set(self.places))
        self.pool = self.client.create_pool(SPEC)
        return self

    def __exit__(self, *exc) -> None:
        with self.lock:  # drivers that see what ends now have found nothing wrong
            self.failed = self.failed or SystemExit("ended")
        client = getattr(self, "client", None)
        if client is not None:
            client.close()
        for p in self.places.values():
            p.close()

    def run(self) -> dict[str, int]:
        self.drivers = [Driver(self, i) for i in range(N_DRIVERS)]
        for d in self.drivers:
            d.start()
        for d in self.drivers:
            d.join()
        if self.failed is not None:
            raise self.failed
        return dict(self.counts)

    def say(self) -> None:
        """Where everything is, for who reads of a failure."""
        faulthandler.dump_traceback(sys.stdout)
        for n, p in self.places.items():
            mine = {t.seq.id: len(t.ids) for d in self.drivers for t in d.texts if t.seq.where == n}
            print(n, p.is_taken.locked(), "known:", mine)
            try:
                for s in p.operator.inspect("sequences", timeout=5)["sequences"]:
                    print("   ", s)
            except attnd.AttndError as e:
                print("   ", e)

    def is_over(self) -> bool:
        return self.counts["cuts"] >= self.n_cuts

    def is_due(self) -> bool:
        return self.is_over() or self.counts["cuts"] >= self.n_looks * ALL_IN_ORDER + ALL_IN_ORDER

    def _look(self) -> None:
        """All drivers wait, and nothing is cut: each sequence is on one daemon, and nothing else is
        open."""
        self.n_looks = self.counts["cuts"] // ALL_IN_ORDER
        want = {n: set() for n in self.places}
        for d in self.drivers:
            for t in d.texts:
                t.verify()
                want[t.seq.where].add(t.seq.id)
        conftest.await_(
            "that daemons have what is known and nothing else",
            lambda: {n: p.open_sequences() for n, p in self.places.items()} == want,
        )
        self.counts["looks"] += 1


class Driver(threading.Thread):
    def __init__(self, run: Run, number: int):
        super().__init__(daemon=True)
        self.run_, self.draw = run, random.Random(f"{run.seed} {number}")
        self.rng = np.random.default_rng([run.seed, number])
        self.texts: list[Text] = []
        self.past: list[tuple[str, Text, attnd.Sequence]] = []  # handles that are over: where, whose
        self.now = ""

    def run(self) -> None:
        run = self.run_
        try:
            self.texts = [self._text() for _ in range(N_TEXTS)]
            while True:
                if run.is_due():
                    run.look.wait(600)
                    if run.is_over():
                        return
                    continue
                place = self._take()
                try:
                    self._cycle(place)
                finally:
                    place.is_taken.release()
        except threading.BrokenBarrierError:
            pass
        except BaseException as e:
            with run.lock:
                if run.failed is None:
                    run.failed = e
                    print(f"FAILED in {self.now}, seed {run.seed}: {e!r}", flush=True)
                    run.say()
            run.look.abort()
            run.n_cuts = 0

    def _text(self) -> Text:
        n = self.draw.randrange(5, 30)
        return Text(self.run_.pool, [int(x) for x in self.rng.integers(0, VOCAB, n)])

    def _take(self) -> Place:
        """A member that no other driver cuts."""
        while True:
            names = list(self.run_.client.members.now())
            self.draw.shuffle(names)
            for n in names:
                place = self.run_.places[n]
                if place.is_taken.acquire(blocking=False):
                    if n in self.run_.client.members.now():
                        return place
                    place.is_taken.release()
            time.sleep(0.01)

    # ---- what is cut

    KINDS = (
        ("registry", 30),  # the agent's link to etcd
        ("all", 30),  # the daemon's and the agent's links
        ("admin", 8),  # the agent's link to its daemon
        ("short", 14),  # all links, for less than a lease
        ("worker", 10),  # the workers' link to the daemon, which stays a member
        ("client", 0.3),  # the workers' link to etcd: they take nobody for dead at once for 10 s
        ("stop_daemon", 2),
        ("stop_agent", 2),
        ("kill_agent", 1),
        ("kill_daemon", 1),
    )

    def _cycle(self, place: Place) -> None:
        run, draw = self.run_, self.draw
        kinds, weights = zip(*self.KINDS)
        kind = draw.choices(kinds, weights)[0]
        self.now = f"{kind} of {place.name}{', strict' if place.is_strict else ''}"
        for i, t in enumerate(self.texts):
            if len(t.ids) > 60:
                t.seq.close()
                self.texts[i] = t = self._text()
            was = t.seq.where, t.seq._inner
            if was[0] != place.name and (i == 0 or draw.random() < 0.6):
                self._move(t, place)
            t.decode()
            if t.seq._inner is not was[1]:
                self.past.append((was[0], t, was[1]))
        self._try_past()
        ends = draw.random() < 0.5
        if kind in ("short", "worker", "client"):
            names = place.names if kind == "short" else ("client",)
            names = (place.workers,) if kind == "worker" else names
            run.links.cut(*names, ends=ends, seconds=draw.uniform(0.02, 0.3))
            for t in self.texts:
                t.decode()
        else:
            self._lose(place, kind, ends)
        for t in self.texts:
            self.past.append((t.seq.where, t, t.seq._inner))
            t.verify()  # under a new epoch
        del self.past[:-6]
        run.count(kind)
        n = run.count("cuts")
        if n % 100 == 0:
            with run.lock:
                print(json.dumps(run.counts), flush=True)

    def _move(self, t: Text, place: Place) -> None:
        try:
            t.seq.move(place.name)
            self.run_.count("moves")
        except (attnd.NotFoundError, attnd.ConnectionLostError, attnd.FencedError):
            self.run_.count("moves_given_up")  # it is no member now, or is about to be none

    def _lose(self, place: Place, kind: str, ends: bool) -> None:
        run, draw, host = self.run_, self.draw, place.host
        members = run.client.members
        member = members.now().get(place.name)
        if member is None:
            return
        mine = [t for t in self.texts if t.seq.where == place.name]
        old = [(t.seq._inner, *_next(t)) for t in mine]
        known = run.client.host(member)
        session = known.client().info.session
        with attnd.connect(host.url, session=session, timeout=LONG) as zombie:
            pool = zombie.create_pool(SPEC)

            def append(is_past: bool) -> None:
                """With each old handle, where its next token belongs."""
                for inner, pos, k, v in old:
                    try:
                        pool.step(0, [(inner, pos, 1)], k=k, v=v, timeout=LONG)
                        # outside of strict mode, while it is cut off, it may; it does once
                        run.count("appended_before_it_registered")
                        if is_past or place.is_strict:
                            now = members.now().get(place.name)
                            raise AssertionError(
                                f"an old handle of {inner.id} has appended: {self.now}; {known.is_gone=}"
                                f" {member.registration=} {now=}"
                            )
                    except REFUSED as e:
                        run.count(f"refused: {type(e).__name__}")

            cuts = {"registry": [place.registry], "all": [*place.names], "admin": [place.admin]}
            if kind in cuts:
                # a worker's own link stays for who knows nothing of the registry: it goes round
                run.links.cut(*cuts[kind], ends=ends)
            elif kind == "stop_daemon":
                host.signal_daemon(signal.SIGSTOP)
            elif kind == "stop_agent":
                host.signal_agent(signal.SIGSTOP)
            elif kind == "kill_agent":
                host.signal_agent(signal.SIGKILL)
            elif kind == "kill_daemon":
                host.signal_agent(signal.SIGKILL)
                host.signal_daemon(signal.SIGKILL)
            since = time.monotonic()
            while members.known(place.name) is not None and not known.is_gone:
                assert time.monotonic() - since < conftest.WAIT, f"{place.name} is not gone"
                if mine:  # until the last moment
                    draw.choice(mine).decode()
                time.sleep(draw.uniform(0, 0.1))  # at any moment of it, and not more than a pool holds
            conftest.await_("that it is gone", lambda: known.is_gone)
            for t in mine:
                t.decode()
            if kind in ("registry", "all", "admin", "stop_agent"):
                append(False)
            if kind in cuts:
                run.links.heal(*cuts[kind])
            elif kind == "stop_daemon":
                host.signal_daemon(signal.SIGCONT)
            elif kind == "stop_agent":
                host.signal_agent(signal.SIGCONT)
            elif kind == "kill_agent":
                place.start_agent()
            elif kind == "kill_daemon":
                place.operator.close()
                place.start_daemon()
                place.start_agent()

            def is_back():
                now = members.now().get(place.name)
                return now is not None and now.registration != member.registration

            while not is_back():
                if kind != "kill_daemon":
                    append(False)
                if mine:
                    draw.choice(mine).decode()
                time.sleep(draw.uniform(0, 0.1))
                assert run.failed is None
            if kind == "kill_daemon":
                return
            append(True)
            left = place.open_sequences() & {inner.id for inner, _, _, _ in old}
            assert not left, f"{left} are open on {place.name}, and made anew elsewhere"
            run.count("lost_and_back")

    def _try_past(self) -> None:
        """Handles of before a move or an adoption, where they were."""
        client = self.run_.client
        for where, t, inner in self.past:
            member = client.members.now().get(where)
            if member is None or self.run_.places[where].is_taken.locked():
                continue  # it may be cut off, and answer late
            host = client.host(member)
            try:
                pos, k, v = _next(t)
                item = (inner, pos, 1)
                host.call(lambda: host.pool(SPEC, Dtypes()).step(0, [item], k=k, v=v))
                raise AssertionError(f"a past handle of {inner.id} has appended on {where}")
            except REFUSED as e:
                self.run_.count(f"past: {type(e).__name__}")
            except attnd.ConnectionLostError:
                pass


def main(argv: list[str]) -> int:
    directory, etcd_url, prefix, n_cuts, seed = argv[1:]
    directory = pathlib.Path(directory)
    logging.basicConfig(
        filename=directory / f"client-{prefix}.log", format="%(asctime)s %(message)s", level="INFO"
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what it has started ends, too
    start = time.monotonic()
    with Links() as links, Run(directory, etcd_url, prefix, int(n_cuts), int(seed), links) as run:
        counts = run.run()
    counts["seconds"] = round(time.monotonic() - start)
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
