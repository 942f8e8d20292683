"""Agents and watchers in virtual time, over a registry whose writes are refused, done and not answered, or
done late, and whose callers are stopped at any of them: thousands of histories of one daemon, with the
real agent.Agent and members.Members and nothing else that is real.

Whatever happens: once a worker has made a sequence anew because its daemon was gone, the copy there is
freed before the daemon is a member again for that worker, and in strict mode the daemon appends nothing
to it. HISTORIES is their number (100), CLUSTER_SEED the first one's (1).
"""

import os
import random
import threading
import types

import pytest

from attnd_cluster import agent as agents
from attnd_cluster import hosts
from attnd_cluster import members as watching
from attnd_cluster.daemon import Look
from attnd_cluster.keys import BACK, DEAD, FATES
from attnd_cluster.registry import (
    Deleted,
    Entry,
    Lease,
    LeaseGone,
    Registry,
    RegistryLost,
    Snapshot,
)

N = int(os.environ.get("HISTORIES", 100))
SEED = int(os.environ.get("CLUSTER_SEED", 1))
TTL, FENCE = 3.0, 2.0


class NoThread:
    def __init__(self, *args, **options):
        pass

    def start(self):
        pass

    def join(self, *seconds):
        pass

    is_alive = start


class World:
    """The registry's data, the daemon and who runs, one at a time; `now` is virtual."""

    def __init__(self, seed):
        self.draw, self.now = random.Random(seed), 1000.0
        self.entries, self.log, self.late = {}, [], []
        self.actors, self.running = [], []
        self.daemon = Daemon(self)
        self.is_calm, self.n_opened = False, 0

    def put(self, key, value, lease):
        if lease is not None and lease.until <= self.now:
            raise LeaseGone("ended")
        self.entries[key] = value, lease
        self.log.append(Entry(key, value))

    def delete(self, keys):
        for key in keys:
            del self.entries[key]
            self.log.append(Deleted(key))

    def ended(self):
        return [k for k, (_, lease) in self.entries.items() if lease and lease.until <= self.now]

    def advance(self, seconds):
        """And whoever else may run in the meantime does."""
        until = self.now + seconds
        while self.now < until:
            self.now += min(0.1, until - self.now)
            self.delete(self.ended())
            for write in [w for w in self.late if w[0] <= self.now]:
                self.late.remove(write)
                try:
                    write[1]()
                except LeaseGone:
                    pass
            self.delete(self.ended())
            for actor in self.actors:
                if actor not in self.running and self.now >= actor.wakes:
                    self.running.append(actor)
                    actor.wakes = self.now + self.draw.choice((0.1, 0.2, 0.3))
                    actor.turn()
                    self.running.remove(actor)
                self.check()

    def is_dead(self, registration):
        """Who opens something there has not heard of it: what is freed is what was there before."""
        fate = self.entries.get(FATES + registration, (b"",))[0]
        return fate == DEAD or (bool(fate) and self.is_dead(fate[len(BACK) :].decode()))

    def pause(self):
        draw = self.draw.random()
        if self.is_calm or draw < 0.5:
            return
        self.advance(self.draw.uniform(0, 0.5) if draw < 0.97 else self.draw.uniform(0, 15))

    def check(self):
        for actor in self.actors:
            actor.check()


class ALease(Lease):
    def __init__(self, registry, ttl):
        self.registry, self.ttl, self.until = registry, ttl, registry.world.now + ttl

    def keep(self, timeout):
        def keep():
            if self.until <= self.registry.world.now:
                raise LeaseGone("ended")
            self.until = self.registry.world.now + self.ttl

        self.registry.write(keep)

    def end(self, timeout):
        def end():
            self.until = self.registry.world.now

        self.registry.write(end)


class ARegistry(Registry):
    def __init__(self, world):
        self.world = world

    def write(self, what):
        world, draw = self.world, self.world.draw.random()
        world.pause()
        if not world.is_calm and draw < 0.06:
            if draw < 0.03:
                world.late.append((world.now + world.draw.uniform(0, 8), what))
            raise RegistryLost("no answer, and not done yet")
        done = what()
        world.pause()
        if not world.is_calm and draw > 0.96:
            raise RegistryLost("no answer")
        return done

    def grant(self, ttl, timeout):
        return self.write(lambda: ALease(self, ttl))

    def put(self, key, value, lease, timeout, only_while=None):
        def put():
            if only_while is not None:
                if self.world.entries.get(only_while[0], (None,))[0] != only_while[1]:
                    raise LeaseGone("another one's")
            self.world.put(key, value, lease)

        self.write(put)

    def create(self, key, value, lease, timeout):
        def create():
            if key in self.world.entries:
                return False
            self.world.put(key, value, lease)
            return True

        return self.write(create)

    def delete(self, key, timeout):
        self.write(lambda: self.world.delete([key] if key in self.world.entries else []))

    def list(self, prefix, timeout):
        def read():
            found = {k: v for k, (v, _) in self.world.entries.items() if k.startswith(prefix)}
            return Snapshot(found, str(len(self.world.log)), "s")

        return self.write(read)

    def close(self):
        pass


class Daemon:
    """What an agent asks of it, and the sequences that it has."""

    last, client = Look("1", "0", True, {}, 0.0, 0), None

    def __init__(self, world):
        self.world, self.fenced_until, self.n_retired = world, 0.0, 0
        self.live = set()

    def silent_for(self):
        return 0.0

    def fence(self, since):
        self.world.pause()
        self.fenced_until = max(self.fenced_until, since + FENCE)

    def retire(self):
        self.world.pause()
        n, self.live = len(self.live), set()
        self.n_retired += 1
        self.world.pause()
        return n


class AnAgent:
    """One after another, each killed at any of its requests."""

    def __init__(self, world, make):
        self.world, self.make, self.wakes, self.n = world, make, 0.0, 0
        self.agent = make(world)

    def turn(self):
        draw = self.world.draw.random()
        if draw < 0.03 and not self.world.is_calm:
            self.agent = self.make(self.world)  # within the lease, or not
            self.wakes = self.world.now + self.world.draw.choice((0.1, 1.0, 5.0))
        elif draw < 0.05 and not self.world.is_calm:
            self.wakes = self.world.now + self.world.draw.uniform(0, 6)
        else:
            self.agent._turn(TTL / 3)

    def check(self):
        pass


class Worker:
    """Watches, and opens a sequence on the daemon now and then while that is a member."""

    def __init__(self, world, number):
        self.world, self.number, self.wakes = world, number, 0.0
        self.hosts = hosts.Hosts({}, 1.0)
        self.members = watching.Members(ARegistry(world), self.hosts.end, idle=1.0)
        self.at, self.opened, self.n_gone = None, [], 0

    def host(self):
        member = self.members.now().get("a")
        return None if member is None else self.hosts.of(member)

    def turn(self):
        draw, world = self.world.draw, self.world
        if draw.random() < 0.02 and not world.is_calm:
            self.wakes = world.now + draw.uniform(0, 14)  # is stopped, or held up
            return
        try:
            if draw.random() < 0.02 and not world.is_calm:
                raise RegistryLost("the watch ended")
            if self.at is None:
                self.at = int(self.members._list())
            elif self.members._registry.list("", 1.0):  # that it is there
                some = world.log[self.at :][: draw.choice((1, 2, 100))]
                self.at += len(some)
                self.members._take(e for e in some if e.key.startswith("members/"))
        except RegistryLost as e:
            self.members._freeze(str(e))
            self.at = None
        host = self.host()
        if host is not None and not host.is_gone and not world.is_dead(host.member.registration):
            world.n_opened += 1
            world.daemon.live.add(world.n_opened)
            self.opened.append((host, world.n_opened))

    def check(self):
        world, daemon = self.world, self.world.daemon
        self.opened = [o for o in self.opened if o[1] in daemon.live]
        if not any(host.is_gone for host, _ in self.opened):
            return
        self.n_gone += 1
        assert daemon.fenced_until <= world.now, "an old handle may append in strict mode"
        host = self.host()
        assert host is None or host.is_gone, "a member again, with a sequence that was made anew"


@pytest.fixture
def make(monkeypatch):
    """An agent of the world's registry and daemon, with the world's clock."""
    world_of = {}

    def clock():
        return world_of["now"].now

    fake = types.SimpleNamespace(monotonic=clock, sleep=lambda s: world_of["now"].advance(s))
    threads = types.SimpleNamespace(
        Thread=NoThread, Condition=threading.Condition, Lock=threading.Lock, Event=threading.Event,
        RLock=threading.RLock,
    )  # fmt: skip
    for module in (agents, watching):
        monkeypatch.setattr(module, "time", fake)
    for module in (agents, watching, hosts):
        monkeypatch.setattr(module, "threading", threads)
    for name in ("Mover", "Members"):
        monkeypatch.setattr(agents, name, lambda *args, **options: None)
    monkeypatch.setattr(agents, "LocalDaemon", lambda *args: world_of["now"].daemon)
    monkeypatch.setattr(agents.web, "Web", lambda *args: None)
    monkeypatch.setattr(agents, "open_registry", lambda url: ARegistry(world_of["now"]))
    options = agents.arguments(
        ["--registry", "etcd://x:1", "--url", "tcp://x:1", "--name", "a", "--fence", str(FENCE)]
    )

    def make(world):
        world_of["now"] = world
        return agents.Agent(options)

    return make


def test_no_old_copy_is_a_member_s_and_none_grows_in_strict_mode(make):
    n_old = n_retired = 0
    for seed in range(SEED, SEED + N):
        world = World(seed)
        try:
            first = AnAgent(world, make)
            world.actors = [first, Worker(world, 0), Worker(world, 1)]
            world.advance(40.0)
            world.is_calm, world.late = True, []
            world.advance(30.0)
            assert all(w.host() and not w.host().is_gone for w in world.actors[1:]), "no member"
        except AssertionError as e:
            raise AssertionError(f"CLUSTER_SEED={seed} HISTORIES=1: {e}") from e
        n_old += sum(w.n_gone for w in world.actors[1:])
        n_retired += world.daemon.n_retired
    assert n_old > N / 10 and n_retired > N / 10, (n_old, n_retired)
