"""attnd-agent as a process beside a real daemon, on a real etcd: what it registers and serves, and what
becomes of members and sequences when daemon, agent or registry are killed or stopped."""

import json
import queue
import signal
import time

import attnd
import numpy as np
import pytest
from conftest import await_
from rig import SPEC, TOKEN, Host

import attnd_cluster.members as watching
from attnd_cluster import agent
from attnd_cluster.keys import BACK, DEAD, Member, decide
from attnd_cluster.members import Members
from attnd_cluster.registry import (
    Changes,
    Deleted,
    Entry,
    Lease,
    LeaseGone,
    Registry,
    RegistryLost,
    Snapshot,
    open_registry,
)


@pytest.fixture
def hosts(tmp_path, etcd1):
    """Makes hosts; `members` watches."""
    made = []

    def make(name="a", **options):
        made.append(Host(tmp_path, name, etcd1.url, **options))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def gone():
    return []


@pytest.fixture
def members(etcd1, gone):
    registry = open_registry(etcd1.url)
    m = Members(registry, gone.append, idle=0.5)
    yield m
    m.close()
    registry.close()


def await_members(members, *names):
    assert members.wait(300, lambda now: sorted(now) == sorted(names)), members.now()


def feed(pool, n=40, seq=None):
    """A sequence of n random tokens, and its rows."""
    rng = np.random.default_rng(7)
    kv = rng.standard_normal((2, SPEC.num_layers, n, 2, 64)).astype("f4")
    seq = seq or pool.open(tokens=range(n))
    for layer in range(SPEC.num_layers):
        pool.step(layer, [(seq, 0, n)], k=kv[0, layer], v=kv[1, layer])
    return seq, kv


def test_it_registers_what_the_daemon_is_and_has(hosts, members):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, _ = feed(pool, 100)
        await_("its pool", lambda: "p" in (members.now()["a"].pools or {}))

        def load():
            return members.now()["a"].pools["p"]

        await_("its sequence", lambda: load().n_sequences == 1)
        assert load().n_blocks == 128
        await_("its blocks", lambda: load().n_free_blocks == 121)
        m = members.now()["a"]
        assert m.url == host.url and m.agent == f"http://{host.http}" and m.state == "serving"
        assert m.version == client.info.server_version and m.boot_id == f"{client.info.boot_id:x}"
        assert [host.get(p)[0] for p in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        assert "attnd_agent_registered 1\n" in host.get("/metrics")[1]
        # what lists and moves wants the token
        for path, body in (("/v1/sequences", None), ("/v1/move", {}), ("/v1/evacuate", {})):
            assert host.get(path, body)[0] == host.get(path, body, "wrong")[0] == 403
        status, text = host.get("/v1/sequences", token=TOKEN)
        assert status == 200
        assert [s["sequence"] for s in json.loads(text)["sequences"]] == [str(seq.id)]
        for body, want in (({}, 400), ({"sequence": "x"}, 400), ({"sequence": 1}, 404), ([], 400)):
            assert host.get("/v1/move", body, TOKEN)[0] == want
        assert host.get("/v1/move", {"sequence": seq.id, "to": "b"}, TOKEN)[0] == 409
        assert host.get("/nothing")[0] == 404


def test_a_silent_daemon_is_unregistered_and_frees_its_sequences_before_it_is_back(
    hosts, members, gone
):
    host = hosts(ttl=1).start()
    await_members(members, "a")
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        host.signal_daemon(signal.SIGSTOP)
        await_("that it is gone", lambda: [m.name for m in gone] == ["a"])
        assert host.get("/readyz")[0] == 503 and host.get("/healthz")[0] == 200
        host.signal_daemon(signal.SIGCONT)
        await_members(members, "a")
        with pytest.raises(attnd.SequenceGoneError):
            pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        assert "sequences_retired_total 1\n" in host.get("/metrics")[1]


def test_an_agent_that_is_killed_takes_the_member_along_but_not_the_daemon(hosts, members, gone):
    host = hosts(ttl=1).start()
    await_members(members, "a")
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        host.signal_agent(signal.SIGKILL)
        await_("that it is gone", lambda: [m.name for m in gone] == ["a"])
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        host.start_agent()
        await_members(members, "a")
        with pytest.raises(attnd.SequenceGoneError):  # it is somebody else's by now
            pool.step(0, [(seq, 41, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])


def test_a_newer_agent_within_the_lease_goes_on(hosts, members, gone):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    before = members.now()["a"].registration
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        host.signal_agent(signal.SIGUSR2)
        assert host.agent.wait(60) == 75
        host.start_agent()
        assert members.wait(300, lambda now: "a" in now and now["a"].registration != before)
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
    assert gone == []


def test_a_stopped_registry_kills_nobody_also_when_it_ends_all_leases_as_it_comes_back(
    hosts, members, gone, etcd1
):
    host = hosts(ttl=3).start()
    await_members(members, "a")
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        etcd1.signal(0, signal.SIGSTOP)
        await_("that members are frozen", lambda: members.is_frozen)
        time.sleep(4)  # more than the lease: that this ends nothing is what is tested
        assert list(members.now()) == ["a"] and host.get("/readyz")[0] == 200
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        before = members.now()["a"].registration
        etcd1.signal(0, signal.SIGCONT)
        await_("that it is there", lambda: not members.is_frozen and host_is_registered(host))
        assert members.wait(300, lambda now: "a" in now)
        print("registered anew:", members.now()["a"].registration != before)
        pool.step(0, [(seq, 41, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
    assert gone == []


def test_between_back_and_its_record_a_registration_is_awaited(
    etcd1, members, gone, monkeypatch
):
    monkeypatch.setattr(watching, "GRACE_SECONDS", 600.0)
    registry = open_registry(etcd1.url)

    def tell(name, registration, was=()):
        value = Member(name, "tcp://1:1", registration=registration, was=was).to_json()
        registry.put(f"members/{name}", value, None, 60)
        assert members.wait(60, lambda now: name in now and now[name].registration == registration)

    tell("a", "a1")
    decide(registry, "a1", BACK + b"a2", 60)
    registry.delete("members/a", 60)
    for i in range(4):  # each has the watcher look at its suspects
        tell("b", f"b{i}", (f"b{i - 1}",))
    assert "fates/a2" not in registry.list("fates/", 60).entries and gone == []
    tell("a", "a2", ("a1",))
    assert gone == []
    # and where it never comes it is dead after all
    decide(registry, "a2", BACK + b"a3", 60)
    registry.delete("members/a", 60)
    await_("that it is not there", lambda: "a" not in members.now())
    monkeypatch.setattr(watching, "GRACE_SECONDS", 0.1)
    await_("that it is gone", lambda: [m.name for m in gone] == ["a"])
    assert registry.list("fates/", 60).entries["fates/a3"] == DEAD
    registry.close()


def test_a_watcher_that_was_away_itself_takes_no_lease_s_end_for_death():
    heard, asked, gone = queue.Queue(), [], []

    class Told(Registry):
        def list(self, prefix, timeout):
            asked.append(prefix)
            return Snapshot({}, "1", "s")

        def grant(self, ttl, timeout):
            return Lease()

        def create(self, key, *rest):
            asked.append(key)
            return True

        def watch(self, prefix, at, idle):
            while True:
                yield Changes(heard.get(), "1")

    m = Members(Told(), gone.append, idle=0.05)
    heard.put([Entry("members/a", Member("a", "tcp://1:1", registration="a1").to_json())])
    assert m.wait(60, lambda now: "a" in now)
    time.sleep(0.2)  # without a word: as one who was stopped
    heard.put([Deleted("members/a")])
    assert m.wait(60, lambda now: "a" not in now)
    heard.put([Entry("members/b", Member("b", "tcp://1:1", registration="b1").to_json())])
    assert m.wait(60, lambda now: "b" in now)
    assert gone == [] and asked == ["members/"] and set(m.all()) == {"a", "b"}
    m._ends = True
    heard.put([])


def test_an_agent_that_was_late_with_its_record_registers_once_more(hosts, members, monkeypatch):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    host.signal_agent(signal.SIGKILL)
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        late = an_agent(host)
        put = late._registry.put

        def late_put(key, *rest):
            if key == "members/a":  # others have given it up by now
                assert decide(late._registry, late._registration, DEAD, 60) == DEAD
                monkeypatch.setattr(agent, "GRACE_SECONDS", 0.0)
            put(key, *rest)

        late._registry.put = late_put
        with pytest.raises(LeaseGone, match="registering took"):
            late._register(60)
        late._registry.put = put
        monkeypatch.undo()
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        late._register(60)
        assert late._n_retired == 1
        with pytest.raises(attnd.SequenceGoneError):
            pool.step(0, [(seq, 41, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        late._lease.end(60)
        late.stop()


def an_agent(host):
    """Of a host whose agent was killed; it does what it is told."""
    a = agent.Agent(
        agent.arguments(
            ["--registry", host.registry, "--name", host.name, "--url", host.url, "--ttl", "30"]
            + ["--endpoint", f"ipc://{host.socket}", "--http", "127.0.0.1:0"]
        )
    )
    a._daemon.start()
    await_("the daemon", lambda: a._daemon.last)
    return a


def test_what_registers_again_and_again_goes_on_with_all_that_was_seen(hosts, members, gone):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    seen = members.now()["a"].registration
    host.signal_agent(signal.SIGKILL)
    a = an_agent(host)
    put = a._registry.put

    def cut(key, *rest):
        if key == "members/a":
            raise RegistryLost("cut before its record")
        put(key, *rest)

    for _ in range(3):
        a._registry.put = cut
        with pytest.raises(RegistryLost):
            a._register(60)
    a._registry.put = put
    a._register(60)
    assert members.wait(60, lambda now: now["a"].registration != seen)
    assert seen in members.now()["a"].was and len(members.now()["a"].was) == 4
    assert gone == [] and a._n_retired == 0
    a._lease.end(60)
    a.stop()


def test_a_record_that_arrives_late_is_not_written(hosts, members, gone):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    host.signal_agent(signal.SIGKILL)
    a = an_agent(host)
    put, late = a._registry.put, []

    def held_up(key, *rest):
        if key == "members/a":
            late.append((key, *rest))
            raise RegistryLost("no answer")
        put(key, *rest)

    a._registry.put = held_up
    with pytest.raises(RegistryLost):
        a._register(60)
    a._registry.put = put
    a._register(60)
    assert members.wait(60, lambda now: now["a"].registration == a._registration)
    with pytest.raises(LeaseGone, match="incarnations/a"):
        put(*late[0])
    a._told = None
    a._tell(60)  # it goes on
    assert members.now()["a"].registration == a._registration and gone == []
    a._lease.end(60)
    a.stop()


def test_what_was_opened_as_its_agent_left_is_freed_when_it_returns(hosts, members, gone):
    host = hosts(ttl=30).start()
    await_members(members, "a")
    host.signal_agent(signal.SIGKILL)
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        a = an_agent(host)
        a._register(60)
        assert members.wait(60, lambda now: now["a"].registration == a._registration)
        opened = []

        def evacuate(seconds):  # nothing is left, and then a worker comes that has not heard of it
            opened.append(feed(pool))

        a.evacuate = evacuate
        a.leave()
        await_("that it is gone", lambda: gone)
        (seq, kv) = opened[0]
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        b = an_agent(host)
        b._register(60)
        assert b._n_retired == 1
        with pytest.raises(attnd.SequenceGoneError):
            pool.step(0, [(seq, 41, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])
        b._lease.end(60)
        b.stop()


def host_is_registered(host):
    page = host.get("/metrics")[1]
    return "attnd_agent_registered 1\n" in page and "attnd_agent_registry_there 1\n" in page


def test_sigterm_sends_every_sequence_away_whole(hosts, members, gone):
    a, b = hosts("a", ttl=30).start(), hosts("b", ttl=30).start()
    await_members(members, "a", "b")
    with attnd.connect(a.url) as from_, attnd.connect(b.url) as to:
        pool, target = from_.create_pool(SPEC), to.create_pool(SPEC)
        await_("both pools", lambda: all("p" in (m.pools or {}) for m in members.now().values()))
        fed = [feed(pool, 20 + i) for i in range(8)]
        q = np.random.default_rng(1).standard_normal((1, 4, 64)).astype("f4")
        want = [pool.step(1, [(s, 19 + i, 1)], q=q).out for i, (s, _) in enumerate(fed)]
        a.signal_agent(signal.SIGTERM)
        assert a.agent.wait(120) == 0
        await_members(members, "b")
        for i, (s, _) in enumerate(fed):
            with pytest.raises(attnd.SequenceGoneError):
                pool.step(1, [(s, 19 + i, 1)], q=q)
            moved = target.adopt(s.id)
            assert moved.layer_len == (20 + i,) * SPEC.num_layers
            out = target.step(1, [(moved, 19 + i, 1)], q=q).out
            assert np.array_equal(out, want[i])
            moved.close()
        await_("that it is said to be gone", lambda: gone)  # no member a moment before
        assert [m.moved_to for m in gone] == [("b",)]
        # an empty daemon that left in order is no dead one when it comes back
        a.start_agent()
        await_members(members, "a", "b")
        assert "retired_total 0\n" in a.get("/metrics")[1]


def test_what_nobody_takes_stays_and_the_agent_says_so(hosts, members):
    host = hosts("a").start()
    await_members(members, "a")
    with attnd.connect(host.url) as client:
        pool = client.create_pool(SPEC)
        seq, kv = feed(pool)
        host.signal_agent(signal.SIGKILL)
        host.start_agent("--evacuate", "1")
        host.await_agent()
        host.signal_agent(signal.SIGTERM)
        assert host.agent.wait(120) == 0
        assert "1 sequences are left" in host.agent_log.read_text()
        pool.step(0, [(seq, 40, 1)], k=kv[0, 0, :1], v=kv[1, 0, :1])


@pytest.mark.parametrize(
    "options, named",
    [
        (["--ttl", "0.5"], "--ttl is 0.5"),
        (["--patience", "0.1"], "--patience is 0.1"),
        (["--tls-cert", "x"], "--tls-cert and --tls-key"),
        (["--fence", "2.5"], "--fence is 2.5"),
        (["--http", "nowhere"], "http is 'nowhere'"),
        (["--registry", "zk://a:1"], "registry is 'zk://a:1'"),
    ],
)
def test_wrong_options_are_named(options, named, capsys):
    from attnd_cluster import agent

    base = [
        "--registry",
        "etcd://127.0.0.1:1",
        "--url",
        "tcp://127.0.0.1:1",
        "--http",
        "127.0.0.1:0",
    ]
    old = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        with pytest.raises(SystemExit) as e:
            raise SystemExit(agent.main(base + options))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    assert e.value.code in (2, 78) and named in capsys.readouterr().err


def test_in_strict_mode_a_fence_and_its_lease_are_of_one_look_at_the_clock(etcd1, monkeypatch):
    """However long the agent waits in between: the lease does not end before the fence, also where a
    daemon is silent whose requests arrive."""
    options = ["--registry", etcd1.url, "--url", "tcp://127.0.0.1:1", "--http", "127.0.0.1:0"]
    a = agent.Agent(agent.arguments([*options, "--fence", "2"]))
    ended, sent, now = [], [], [1000.0]
    try:
        a._lease = type("ALease", (Lease,), {"end": lambda self, timeout: ended.append(now[0])})()
        monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])

        def fence(since):
            now[0] += 1.9  # it gets no time
            sent.append(since)

        monkeypatch.setattr(a._daemon, "fence", fence)
        a._kept_at = 999.0
        a._renew_fence()
        assert sent == [1000.0]  # 3 s of lease, kept a second ago
        a._renew_fence()
        assert sent == [1000.0]
        a._let_go()
        assert a._lease is not None and ended == []
        now[0] = 1002.0
        a._let_go()
        assert a._lease is None and ended == [1002.0]
    finally:
        monkeypatch.undo()
        a._registry.close()
        a._members.close()
