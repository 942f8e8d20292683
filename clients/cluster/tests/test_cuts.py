"""Three hosts and three members of etcd in network namespaces: links that are cut and healed, and everything
that can be killed or stopped, while workers decode. After each round every sequence is compared with
float64 and with what was acknowledged, and no daemon has two of one.

CLUSTER_ROUNDS is the number of rounds (4); CLUSTER_SEED repeats a run.
"""

import ctypes
import os
import random
import signal
import time

import attnd
import numpy as np
import pytest
from conftest import await_
from etcd import Etcd
from ledger import VOCAB, Text, rebuild
from net import Net
from rig import SPEC, Host
from test_client import Worker

import attnd_cluster
from attnd._handle import _Helper

ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", 4))
SEED = int(os.environ.get("CLUSTER_SEED", random.randrange(1 << 30)))
_setns = ctypes.CDLL(None, use_errno=True).setns


def enter(namespace: str):
    """This process, its threads from now on, in that network namespace; what undoes it."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    into = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    assert _setns(into, 0x40000000) == 0
    os.close(into)

    def leave():
        assert _setns(before, 0x40000000) == 0
        os.close(before)

    return leave


@pytest.fixture
def net(tmp_path):
    print("seed", SEED)
    with Net("a", "b", "c", "x", "y", "z") as net:
        leave = enter(net.hub)
        _Helper._idle.clear()  # threads of another namespace
        try:
            yield net
        finally:
            leave()


@pytest.fixture
def etcd(net, tmp_path):
    with Etcd(tmp_path / "e", 3, [(net.namespace(n), net.address[n]) for n in "xyz"]) as e:
        yield e


@pytest.fixture
def hosts(net, etcd, tmp_path):
    made = {}
    for n in "abc":
        made[n] = Host(tmp_path, n, etcd.url, net.namespace(n), net.address[n], ttl=3)
        made[n].start()
    yield made
    for host in made.values():
        host.close()


@pytest.fixture
def client(etcd, hosts):
    with attnd_cluster.connect(
        f"cluster+{etcd.url}", rebuild=rebuild, timeout=600, idle=1, token_file=hosts["a"].key_file
    ) as c:
        assert c.members.wait(300, lambda now: len(now) == 3)
        yield c


def test_a_host_that_is_cut_off_and_returns_leaves_no_second_copy(net, client, hosts):
    pool = client.create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, [int(x) for x in rng.integers(0, VOCAB, 40)]) for _ in range(6)]
    worker = Worker(texts, pool)
    worker.more()
    at = {t: t.seq.where for t in texts}
    old = {t: t.seq._inner for t in texts if at[t] == "b"}
    assert old
    # as a worker would that knows nothing of the cluster: its handle, on a connection of its own
    with attnd.connect(
        hosts["b"].url,
        session=client.host(client.members.now()["b"]).client().info.session,
        token_file=hosts["b"].key_file,
    ) as z:
        zombie_pool = z.create_pool(SPEC)
        net.cut("b")
        start = time.monotonic()
        await_("that it is gone", lambda: "b" not in client.members.now())
        seen = time.monotonic() - start
        worker.more(2)
        print(f"seen after {seen:.1f} s, two tokens later after {time.monotonic() - start:.1f} s")
        assert all(t.seq.n_rebuilt == (at[t] == "b") for t in texts)
        net.heal("b")
        assert client.members.wait(300, lambda now: "b" in now)
        for t, inner in old.items():
            kv = np.zeros((1, 2, 64), "f4")
            with pytest.raises((attnd.NotFoundError, attnd.StaleEpochError)):
                zombie_pool.step(0, [(inner, 41, 1)], k=kv, v=kv, timeout=60)
    worker.more(2)
    worker.stop()
    for t in texts:
        t.verify()


def test_whatever_is_cut_killed_or_stopped_no_acknowledged_token_is_lost(net, client, hosts, etcd):
    pool = client.create_pool(SPEC)
    rng, draw = np.random.default_rng(SEED), random.Random(SEED)
    texts = [Text(pool, [int(x) for x in rng.integers(0, VOCAB, 40)]) for _ in range(6)]
    workers = [Worker(texts[i::2], pool) for i in range(2)]

    def all_there():
        return set(client.members.now()) == set("abc") and not client.members.is_frozen

    def go_on_without(n):
        await_("that it is gone", lambda: n not in client.members.now())
        for w in workers:
            w.more(2)

    def cut_host(n):
        net.cut(n)
        go_on_without(n)
        net.heal(n)

    def stop_agent(n):
        hosts[n].signal_agent(signal.SIGSTOP)
        go_on_without(n)
        hosts[n].signal_agent(signal.SIGCONT)

    def await_registered(n, was):
        """What follows is to be of an agent that has registered, not of one that still starts."""

        def has():
            now = client.members.now().get(n)
            return now is not None and now.registration != was

        await_("that its agent has registered", has)

    def kill_agent(n):
        was = client.members.now()[n].registration
        hosts[n].signal_agent(signal.SIGKILL)
        hosts[n].start_agent()
        await_registered(n, was)

    def stop_daemon(n):
        hosts[n].signal_daemon(signal.SIGSTOP)
        go_on_without(n)
        hosts[n].signal_daemon(signal.SIGCONT)

    def kill_host(n):
        was = client.members.now()[n].registration
        hosts[n].signal_agent(signal.SIGKILL)
        hosts[n].signal_daemon(signal.SIGKILL)
        for w in workers:
            w.more(2)
        hosts[n].start()
        await_registered(n, was)

    def kill_leader(_):
        leader = etcd.leader()
        etcd.signal(leader, signal.SIGKILL)
        for w in workers:
            w.more(2)
        etcd.start(leader)
        etcd.await_ready()

    def stop_leader(_):
        leader = etcd.leader()
        etcd.signal(leader, signal.SIGSTOP)
        for w in workers:
            w.more(2)
        etcd.leader()  # another one
        etcd.signal(leader, signal.SIGCONT)

    def cut_majority(_):
        for n in "xy":
            net.cut(n)
        await_("that members are frozen", lambda: client.members.is_frozen)
        for w in workers:
            w.more(2)
        assert not client.hosts.all() or all(not h.is_gone for h in client.hosts.all())
        for n in "xy":
            net.heal(n)
        etcd.await_ready()

    kinds = [
        cut_host,
        kill_leader,
        stop_daemon,
        cut_majority,
        kill_agent,
        kill_host,
        stop_leader,
        stop_agent,
    ]
    first = draw.randrange(len(kinds))
    for i in range(ROUNDS):
        kind, n = kinds[(first + i) % len(kinds)], draw.choice("abc")
        start = time.monotonic()
        kind(n)
        await_("all members", all_there)
        for w in workers:
            w.more(2)
        print(f"round {i}: {kind.__name__} {n}, {time.monotonic() - start:.1f} s")
        check_copies(hosts, texts)
    for w in workers:
        w.stop()
    for t in texts:
        t.verify()
    check_copies(hosts, texts)


def check_copies(hosts, texts):
    """Each sequence is open where its worker has it, and nowhere else is anything."""

    def is_so():
        seen = set()
        for name, host in hosts.items():
            with attnd.connect(f"ipc://{host.socket}", timeout=60) as operator:
                listed = operator.inspect("sequences")["sequences"]
                seen |= {(name, int(s["sequence"])) for s in listed}
        return seen == {(t.seq.where, t.seq.id) for t in texts}

    await_("that nothing is open but what workers have", is_so, 60)
