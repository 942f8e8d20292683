"""A client of a cluster: placement, steps over several daemons, moves, lost hosts; every output against
float64, every sequence against what was acknowledged."""

import inspect
import json
import os
import random
import signal
import threading
import time

import attnd
import numpy as np
import pytest
from conftest import await_
from ledger import L, VOCAB, Text, decode_together, rebuild, rows
from rig import SPEC, Host

import attnd_cluster
import attnd_cluster.calls
import attnd_cluster.hosts
import attnd_cluster.members
import attnd_cluster.pool
import attnd_cluster.sequence
from attnd_cluster.keys import LEAVING

SEED = random.randrange(1 << 30)
LONG = 600.0  # seconds that nothing here may wait for: what ends sooner ended by membership


@pytest.fixture
def cluster(tmp_path, etcd1):
    """make(n): hosts with agents, all registered, and a client's options."""
    print("seed", SEED)
    made, clients = [], []

    class Cluster:
        hosts = {}

        def start(self, *names, ttl=30):
            for name in names:
                host = Host(tmp_path, name, etcd1.url, ttl=ttl)
                made.append(host)
                self.hosts[name] = host.start()

        def connect(self, n=None, **options):
            options = {"rebuild": rebuild, "timeout": LONG, "idle": 0.5, **options}
            client = attnd.connect if not options else attnd_cluster.connect
            client = client(f"cluster+{etcd1.url}", **options)
            clients.append(client)
            want = set(self.hosts) if n is None else n
            assert client.members.wait(300, lambda now: set(now) == want)
            return client

    Cluster.hosts = {}
    yield Cluster()
    for client in clients:
        client.close()
    for host in made:
        host.close()


def prompt(rng, n):
    return [int(x) for x in rng.integers(0, VOCAB, n)]


def test_sequences_spread_and_prompts_go_where_their_beginning_is(cluster):
    cluster.start("a", "b", "c")
    client = cluster.connect()
    pool = client.create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, 100)) for _ in range(12)]
    counts = {n: sum(t.seq.where == n for t in texts) for n in "abc"}
    assert all(3 <= c <= 5 for c in counts.values()), counts
    for (
        t
    ) in texts:  # the next turn of each conversation, by this client and by one that knows nothing
        again = Text(pool, t.ids + prompt(rng, 30))
        assert again.seq.where == t.seq.where and again.seq.n_cached == 96
        again.seq.close()
    stranger = cluster.connect().create_pool(SPEC)
    again = Text(stranger, texts[0].ids + prompt(rng, 30))
    assert again.seq.where == texts[0].seq.where and again.seq.n_cached >= 96
    # one step for all of them, whoever is where
    for _ in range(3):
        rng.shuffle(texts)
        decode_together(pool, texts)
    for t in texts:
        t.verify()
        t.seq.close()


def test_the_methods_of_a_plain_client(cluster):
    cluster.start("a", "b")
    with attnd.connect(cluster.connect().url, timeout=LONG) as client:
        assert client.info.backend == "cpu" and client.ping() > 0
        assert sorted(client.stats()) == ["a", "b"]
        with pytest.raises(attnd.NotFoundError):
            client.pool("p")
        pool = client.create_pool(SPEC)
        assert client.pool("p").spec == pool.spec
        rng = np.random.default_rng(SEED)
        t = Text(pool, prompt(rng, 50))
        assert pool.probe(t.ids).cached_tokens == 48
        fork = t.seq.fork()
        assert fork.where == t.seq.where and fork.layer_len == (50,) * L and fork.tokens == t.ids
        t.seq.truncate(20)
        t.ids = t.ids[:20]
        t.decode(2)
        t.verify()
        calls = pool.calls()
        calls.open(tokens=fork.tokens)
        calls.adopt(1)
        calls.adopt(fork.id)
        calls.set_tokens(t.seq, 22, [1])
        calls.truncate(t.seq, 20)
        calls.probe(fork.tokens)
        calls.fork(t.seq)
        calls.close(t.seq.fork())
        opened, missing, adopted, nothing, cut, probe, forked, closed = calls.run()
        assert opened.n_cached == 48 and isinstance(missing, attnd.SequenceGoneError)
        assert adopted.id == fork.id and nothing is None and cut is t.seq
        assert probe.cached_tokens == 48 and forked.layer_len == (20,) * L and closed is None
        with pytest.raises(attnd.NotFoundError, match="'nobody'"):
            t.seq.move("nobody")
        other = "b" if t.seq.where == "a" else "a"
        t.ids = t.ids[:20]
        assert t.seq.move(other).where == other
        t.decode(2)
        t.verify()
        # moved by somebody else: its old daemon says where, and no other is asked
        old = t.seq._inner
        with attnd.connect(cluster.hosts[other].url) as x, attnd.connect(
            cluster.hosts["a" if other == "b" else "b"].url
        ) as y:
            x.move(t.seq.id, y.create_pool(SPEC))
            with pytest.raises(attnd.MovedError):
                old.truncate(1)
            at = x.locate(old.id, old.epoch)
            assert (at.url, at.id) == (y.url, old.id) and t.seq._moved_to() == y.url
            t.decode(2)
            assert t.seq.where != other
            t.verify()
        with pytest.raises(attnd.UnsupportedError):
            client.open_lane()
        with pytest.raises(attnd.InvalidArgumentError):
            pool.step(0, [(t.seq, 999, 1)], *rows(0, [1], 0))


def attention(q, k, v, sees):
    """float64, of each row of q over those tokens of k and v that it sees."""
    out = np.empty(q.shape)
    for i, at in enumerate(sees):
        for h in range(SPEC.num_q_heads):
            g = h * SPEC.num_kv_heads // SPEC.num_q_heads
            s = k[at, g].astype(np.float64) @ q[i, h] / np.sqrt(SPEC.head_dim_k)
            w = np.exp(s - s.max())
            out[i, h] = w @ v[at, g] / w.sum()
    return out


def test_trees_full_steps_and_indices_of_sequences_on_two_daemons(cluster):
    """Rows of both in turns, so that each daemon gets copies of its own."""
    cluster.start("a", "b")
    pool = cluster.connect().create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, n)) for n in (40, 19, 33, 26)]
    assert {t.seq.where for t in texts} == {"a", "b"}
    parents, ancestors = [-1, 0, 0, 2], [[0], [0, 1], [0, 2], [0, 2, 3]]
    nodes = [prompt(rng, 4) for _ in texts]
    at = [len(t.ids) for t in texts]
    held = []  # of each layer and text: its k and v, the tree behind it
    for layer in range(L):
        given = [rows(layer, ids, pos) for ids, pos in zip(nodes, at)]
        q, k, v = (np.concatenate(x) for x in zip(*given))
        items = [(t.seq, pos, 4) for t, pos in zip(texts, at)]
        out = pool.step(layer, items, q, k, v, parents=iter(parents * 4)).out
        held.append([])
        for i, t in enumerate(texts):
            was = rows(layer, t.ids, 0)
            k, v = (np.concatenate([was[j], given[i][j]]) for j in (1, 2))
            held[-1].append((k, v))
            sees = [[*range(at[i]), *(at[i] + a for a in path)] for path in ancestors]
            want = attention(given[i][0], k, v, sees)
            np.testing.assert_allclose(out[4 * i : 4 * i + 4], want, atol=2e-5)
    with pytest.raises(ValueError, match="parents has 2 rows, the step has 8 tokens"):
        pool.step(0, [(t.seq, 9, 4) for t in texts[:2]], q[:8], parents=[-1, 0])
    with pytest.raises(attnd.InvalidArgumentError, match="no path"):
        texts[0].seq.commit([0, 3])
    calls = pool.calls()
    for t in texts[1:]:
        calls.commit(t.seq, [0, 2, 3])
    texts[0].seq.commit([0, 2, 3])
    assert calls.run() == [t.seq for t in texts[1:]]
    t = texts[0]  # what its client knows of it is what is kept: it follows the sequence elsewhere
    other = "b" if t.seq.where == "a" else "a"
    assert t.seq._lens == [at[0] + 3] * L and t.seq.move(other).where == other
    for layer in range(L):
        q = rng.standard_normal((8, SPEC.num_q_heads, SPEC.head_dim_k)).astype(np.float32)
        items = [(t.seq, pos + 1, 2) for t, pos in zip(texts, at)]
        named = np.stack([rng.choice(pos, 5, replace=False) for pos in at for _ in range(2)])
        full = pool.step(layer, items, q, is_full=True).out
        some = pool.step(layer, items, q, indices=named.astype(np.int32)).out
        blocks = pool.step(layer, items, q, choose_blocks=64).out
        for i, (k, v) in enumerate(held[layer]):
            kept = [*range(at[i]), *(at[i] + a for a in (0, 2, 3))]
            k, v, mine = k[kept], v[kept], slice(2 * i, 2 * i + 2)
            seen = [range(at[i] + 3), named[2 * i], range(at[i] + 2)], \
                [range(at[i] + 3), named[2 * i + 1], range(at[i] + 3)]
            for j, out in enumerate((full, some, blocks)):
                want = attention(q[mine], k, v, [list(s[j]) for s in seen])
                np.testing.assert_allclose(out[mine], want, atol=2e-5)


PAIRS = [
    (attnd.Pool, attnd_cluster.pool.ClusterPool),
    (attnd.Sequence, attnd_cluster.sequence.ClusterSequence),
    (attnd.Calls, attnd_cluster.calls.ClusterCalls),
]
ONE_DAEMONS = {"import_sequence", "resize", "step_start", "weights"}  # not of a cluster


@pytest.mark.parametrize("plain, of_cluster", PAIRS)
def test_a_clusters_methods_take_what_those_of_one_daemon_do(plain, of_cluster):
    def options(f):
        return {p.name: p.default for p in inspect.signature(f).parameters.values()}

    missing = []
    for name, method in inspect.getmembers(plain, inspect.isfunction):
        if name.startswith("_") or name in ONE_DAEMONS:
            continue
        theirs = getattr(of_cluster, name, None)
        if theirs is None:
            missing.append(name)
            continue
        has = options(theirs)
        passes_on = "options" in has
        missing += [f"{name}({o}=)" for o in options(method) if o not in has and not passes_on]
        different = {o for o, value in options(method).items() if has.get(o, value) != value}
        assert not different, name
    assert missing == []


def test_pools_are_made_with_the_options_of_one_daemon(cluster):
    made = (attnd.Client.create_pool, attnd_cluster.client.ClusterClient.create_pool)
    plain, of_cluster = (inspect.signature(f).parameters.values() for f in made)
    assert [(p.name, p.default) for p in plain] == [(p.name, p.default) for p in of_cluster]
    cluster.start("a")
    client = cluster.connect()
    spec = SPEC._replace(name="w", q_dtype="bf16")
    pool = client.create_pool(spec, array_dtype="f32", wire_dtype="fp8_e4m3")
    with pool.open() as seq:
        q, k, v = rows(0, [1], 0)
        out = pool.step(0, [(seq, 0, 1)], q, k, v).out[0]
    sent = np.repeat(v[0], 2, axis=0)  # a token alone sees itself: V, as codes
    assert out.dtype == np.float32 and np.abs(out - sent).max() < np.abs(v).max() / 16
    assert np.abs(out - sent).max() > np.abs(v).max() / 1000
    with pytest.raises(ValueError, match="wire_dtype"):
        client.create_pool(spec._replace(name="x"), wire_dtype="fp9")


class Worker(threading.Thread):
    """Decodes a text until it is told to stop; what goes wrong is raised by join()."""

    def __init__(self, texts, pool):
        super().__init__(daemon=True)
        self.texts, self.pool, self.failed = list(texts), pool, None
        self.n, self.ends = 0, threading.Event()
        self.start()

    def run(self):
        try:
            while not self.ends.is_set():
                decode_together(self.pool, self.texts)
                self.n += 1
                if len(self.texts[0].ids) > 150:  # a pool holds so many
                    for t in self.texts:
                        t.seq.truncate(20)
                        del t.ids[20:]
        except BaseException as e:
            self.failed = e

    def more(self, n=3):
        want = self.n + n
        await_("tokens", lambda: self.n >= want or self.failed)
        if self.failed:
            raise self.failed

    def stop(self):
        self.ends.set()
        self.join(300)
        assert not self.is_alive()
        if self.failed:
            raise self.failed


def test_a_move_that_its_target_refuses_leaves_the_sequence_as_it_was(cluster, tmp_path, etcd1):
    cluster.start("a")
    b = Host(tmp_path, "b", etcd1.url, ttl=30)
    try:
        b.start_daemon("--engine.fence", "1s")  # its agent does not renew it: nothing is appended
        client = cluster.connect()
        pool = client.create_pool(SPEC)
        t = Text(pool, prompt(np.random.default_rng(SEED), 10))  # all of it goes at the stop
        b.start_agent()
        assert client.members.wait(300, lambda now: "b" in now)
        with pytest.raises(attnd.FencedError):
            t.seq.move("b")
        assert t.seq.where == "a"
        t.decode(3)
        t.verify()
    finally:
        b.close()


def test_an_evacuation_loses_no_token_of_sequences_that_decode_meanwhile(cluster):
    cluster.start("a", "b")
    pool = cluster.connect().create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, 20)) for _ in range(4)]
    workers = [Worker(texts[:2], pool), Worker(texts[2:], pool)]
    for w in workers:
        w.more()
    a = cluster.hosts["a"]
    a.signal_agent(signal.SIGTERM)
    assert a.agent.wait(300) == 0
    a.signal_daemon(signal.SIGKILL)
    for w in workers:
        w.more()
        w.stop()
    for t in texts:
        assert t.seq.where == "b" and t.seq.n_rebuilt == 0
        t.verify()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_lost_host_costs_its_own_sequences_a_rebuild_and_nobody_a_timeout(cluster, number):
    cluster.start("a", "b", "c", ttl=3)
    pool = cluster.connect().create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, 40)) for _ in range(6)]
    for i, t in enumerate(texts):
        t.seq.set_note(b"text %d" % i)
    worker = Worker(texts, pool)
    worker.more()
    lost = texts[0].seq.where
    host = cluster.hosts[lost]
    at = {t: t.seq.where for t in texts}
    if number == signal.SIGKILL:
        host.signal_agent(number)
    host.signal_daemon(number)
    start = time.monotonic()
    await_("that it is noticed", lambda: lost not in pool.client.members.now())
    seen = time.monotonic() - start
    worker.more()
    print(f"seen after {seen:.2f} s, three tokens later after {time.monotonic() - start:.2f} s")
    worker.stop()
    for t in texts:
        assert t.seq.n_rebuilt == (at[t] == lost), (at[t], lost)
        assert t.seq.where != lost
        t.verify()
    # whoever adopts them learns what they were, also of those that were made anew
    other = cluster.connect(set(cluster.hosts) - {lost}).create_pool(SPEC)
    assert [other.adopt(t.seq.id).note for t in texts] == [b"text %d" % i for i in range(6)]
    if number == signal.SIGSTOP:  # it comes back, with what it had freed
        host.signal_daemon(signal.SIGCONT)
        assert pool.client.members.wait(300, lambda now: lost in now)
        with attnd.connect(f"ipc://{host.socket}") as operator:
            await_("nothing in it", lambda: operator.inspect("sequences")["sequences"] == [])


def test_what_a_move_has_left_elsewhere_is_not_taken_for_the_sequence_and_freed(cluster):
    cluster.start("a", "b")
    pool = cluster.connect().create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    t = Text(pool, prompt(rng, 40))
    lost = cluster.hosts[t.seq.where]
    other = cluster.hosts["b" if t.seq.where == "a" else "a"]
    with attnd.connect(other.url) as mover:
        there = mover.create_pool(SPEC)
        copy = there.open(t.seq.id)
        for layer in range(L):
            _, k, v = rows(layer, t.ids[:16], 0)
            there.step(layer, [(copy, 0, 16)], k=k, v=v)
        with attnd.connect(f"ipc://{lost.socket}") as operator:
            operator.kill_sequence(t.seq.id)
        t.decode(2)
        assert t.seq.n_rebuilt == 1
        t.verify()
        with attnd.connect(f"ipc://{other.socket}") as operator:
            listed = operator.inspect("sequences")["sequences"]
            there = [t.seq.id] if t.seq.where == other.name else []
            assert [int(s["sequence"]) for s in listed] == there


@pytest.mark.parametrize("note", [b"new", b""], ids=["set", "cleared"])
def test_what_is_found_after_its_host_s_death_has_its_worker_s_latest_note(
    cluster, monkeypatch, note
):
    cluster.start("a", "b")
    pool = cluster.connect().create_pool(SPEC)
    t = Text(pool, prompt(np.random.default_rng(SEED), 40))
    t.seq.set_note(b"old")
    t.seq.set_note(note)
    lost, member = t.seq._host, t.seq._host.member._replace(state=LEAVING)
    other = cluster.hosts["b" if lost.name == "a" else "a"]
    with attnd.connect(other.url) as mover:  # that read the note before it was set, and ended then
        there = mover.create_pool(SPEC)
        copy = there.open(t.seq.id)
        copy.set_tokens(0, t.ids)
        copy.set_note(b"old")
        for layer in range(L):
            _, k, v = rows(layer, t.ids, 0)
            there.step(layer, [(copy, 0, len(t.ids))], k=k, v=v)
        monkeypatch.setattr(t.seq, "_member", lambda: member)
        pool.client.hosts.end(member)
        t.decode()
        assert (t.seq.where, t.seq.n_rebuilt) == (other.name, 0)
        assert mover.note(t.seq.id) == note
    t.verify()


def test_who_takes_a_sequence_back_has_the_note_that_another_worker_left(cluster, monkeypatch):
    cluster.start("a")
    pool, others = (cluster.connect().create_pool(SPEC) for _ in range(2))
    t = Text(pool, prompt(np.random.default_rng(SEED), 40))
    t.seq.set_note(b"ours")
    for left in (b"theirs", b""):
        others.adopt(t.seq.id).set_note(left)
        t.seq.adopt()
        assert t.seq.note == left
    t.seq.set_note(b"ours")

    def refuse(self, seq_id, **options):
        raise attnd.UnsupportedError(f"note of {seq_id}")

    monkeypatch.setattr(attnd.Client, "note", refuse)  # as an older daemon
    t.seq.adopt()
    assert t.seq.note == b"ours"
    t.verify()


def test_nobody_finds_a_sequence_while_its_note_changes(cluster, monkeypatch):
    cluster.start("a")
    t = Text(cluster.connect().create_pool(SPEC), [1, 2, 3])
    set_note, found = attnd.Sequence.set_note, []

    def look(self, note, **options):  # on another thread
        set_note(self, note, **options)
        found.append(t.seq._lock.acquire(blocking=False))

    monkeypatch.setattr(attnd.Sequence, "set_note", look)
    t.seq.set_note(b"new")
    assert found == [False] and t.seq.note == b"new"


def test_a_sequence_is_placed_though_all_that_were_asked_are_gone_when_it_is_opened(
    cluster, monkeypatch
):
    cluster.start("a", "b")
    client = cluster.connect()
    pool = client.create_pool(SPEC)
    candidates, ended = pool.candidates, []

    def and_they_go(*asked):
        found = candidates(*asked)
        if not ended:
            for _, host in found:
                ended.append(host.name)
                client.hosts.end(host.member)
            cluster.start("c")
        return found

    monkeypatch.setattr(pool, "candidates", and_they_go)
    t = Text(pool, prompt(np.random.default_rng(SEED), 40))
    assert len(ended) == 2 and t.seq.where == "c"
    t.verify()


def test_a_host_is_of_one_registration(cluster):
    cluster.start("a")
    client = cluster.connect()
    hosts, first = client.hosts, client.members.now()["a"]
    host = client.host(first)
    again = first._replace(registration="again", was=())
    other = client.host(again)  # seen before what came first is said to be gone
    assert other is not host and not host.is_gone
    hosts.end(first)
    assert host.is_gone and not other.is_gone
    assert client.host(again) is other
    assert client.host(first).is_gone  # for who has listed members before
    back = again._replace(registration="back", was=("again",))
    assert client.host(back) is other and client.host(again) is other
    assert hosts.all() == [other]
    hosts.end(back)
    assert other.is_gone and hosts.all() == [] and client.host(again).is_gone


def test_a_member_that_does_not_answer_is_not_waited_for_by_each_that_opens(cluster, monkeypatch):
    cluster.start("a", "b")
    client = cluster.connect(connect_timeout=2)
    cluster.hosts["b"].signal_agent(signal.SIGSTOP)  # it stays a member
    cluster.hosts["b"].signal_daemon(signal.SIGKILL)
    tries, connect = [], attnd.connect
    monkeypatch.setattr(attnd_cluster.hosts, "_PAUSE_SECONDS", 1e9)
    monkeypatch.setattr(
        attnd_cluster.hosts.attnd,
        "connect",
        lambda url, **options: (tries.append(url), connect(url, **options))[1],
    )
    pool = client.create_pool(SPEC)
    texts = [Text(pool, prompt(np.random.default_rng(i), 40)) for i in range(5)]
    assert all(t.seq.where == "a" for t in texts)
    assert tries.count(cluster.hosts["b"].url) == 1
    for t in texts:
        t.verify()


def test_without_a_callback_a_lost_sequence_is_said_to_be_gone_and_others_are_answered(cluster):
    cluster.start("a", "b", ttl=3)
    pool = cluster.connect(rebuild=None).create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, 40)) for _ in range(4)]
    lost = [t for t in texts if t.seq.where == "a"]
    assert 0 < len(lost) < 4
    cluster.hosts["a"].signal_agent(signal.SIGKILL)
    cluster.hosts["a"].signal_daemon(signal.SIGKILL)
    qkv = [rows(0, t.ids[39:], 39) for t in texts]
    q = np.concatenate([x[0] for x in qkv])
    out = np.full_like(q, np.nan)
    with pytest.raises(attnd.SequenceGoneError, match="went with a") as e:
        pool.step(0, [(t.seq, 39, 1) for t in texts], q, out=out)
    for i, t in enumerate(texts):
        if t in lost:
            assert e.value.result.item_status[i] != 0
        else:
            assert e.value.result.item_status[i] == 0
            t.check(0, out[i], 39)
            t.verify()


def test_a_registry_that_stops_is_not_noticed_by_steps_nor_by_new_sequences(cluster, etcd1):
    cluster.start("a", "b", ttl=3)
    client = cluster.connect()
    pool = client.create_pool(SPEC)
    rng = np.random.default_rng(SEED)
    texts = [Text(pool, prompt(rng, 40)) for _ in range(4)]
    worker = Worker(texts, pool)
    worker.more()
    etcd1.signal(0, signal.SIGSTOP)
    await_("that members are frozen", lambda: client.members.is_frozen)
    worker.more(20)
    texts.append(Text(pool, prompt(rng, 40)))
    time.sleep(3.5)  # more than the lease: that nothing comes of it is what is tested
    worker.more(20)
    etcd1.signal(0, signal.SIGCONT)
    await_("that they are not", lambda: not client.members.is_frozen)
    assert client.members.wait(300, lambda now: set(now) == {"a", "b"})
    worker.more(5)
    worker.stop()
    for t in texts:
        assert t.seq.n_rebuilt == 0
        t.verify()


def test_a_sequence_is_found_at_a_member_whose_agent_is_late(cluster, etcd1, monkeypatch):
    monkeypatch.setattr(attnd_cluster.members, "GRACE_SECONDS", LONG)
    cluster.start("a", "b", ttl=3)
    client = cluster.connect()
    pool = client.create_pool(SPEC)
    t = Text(pool, prompt(np.random.default_rng(SEED), 40))
    for host in cluster.hosts.values():  # so that no agent decides who is dead
        host.signal_agent(signal.SIGSTOP)
    etcd1.signal(0, signal.SIGSTOP)
    await_("that members are frozen", lambda: client.members.is_frozen)
    etcd1.signal(0, signal.SIGCONT)
    await_("that its lease has ended", lambda: t.seq.where not in client.members.now())
    t.decode(2)
    t.verify()  # adopts it
    assert t.seq.n_rebuilt == 0
    with pytest.raises(attnd.SequenceGoneError):
        pool.adopt(t.seq.id + 1)
    for host in cluster.hosts.values():
        host.signal_agent(signal.SIGCONT)
    assert client.members.wait(300, lambda now: set(now) == {"a", "b"})
    t.decode(2)
    t.verify()
    assert t.seq.n_rebuilt == 0


def test_in_strict_mode_a_daemon_without_its_registry_appends_nothing_until_it_is_back(
    tmp_path, cluster, etcd1
):
    host = Host(tmp_path, "a", etcd1.url, ttl=3)
    try:
        host.start_daemon("--engine.fence", "2s")
        host.start_agent("--fence", "2")
        cluster.hosts["a"] = host
        pool = cluster.connect().create_pool(SPEC)
        t = Text(pool, prompt(np.random.default_rng(SEED), 40))
        inner = t.seq._inner
        etcd1.signal(0, signal.SIGSTOP)
        q, k, v = rows(0, t.ids[:1], 0)

        def is_fenced():
            try:
                inner.pool.step(0, [(inner, 0, 1)], k=k, v=v)
            except attnd.FencedError:
                return True

        await_("the fence", is_fenced)
        t.verify()  # what is there can be read
        waits = threading.Thread(target=t.decode, daemon=True)
        waits.start()
        time.sleep(0.5)  # that it waits is what is tested
        assert waits.is_alive()
        etcd1.signal(0, signal.SIGCONT)
        waits.join(300)
        assert not waits.is_alive() and t.n_checked >= 6
        t.verify()
    finally:
        host.close()


def test_a_daemon_that_restarts_empty_has_its_sequences_made_anew(cluster):
    cluster.start("a")
    pool = cluster.connect().create_pool(SPEC)
    t, other = (Text(pool, prompt(np.random.default_rng(SEED), 40)) for _ in range(2))
    host = cluster.hosts["a"]
    host.signal_daemon(signal.SIGKILL)
    host.start_daemon()
    other.seq.adopt()  # its first request there
    assert other.seq.n_rebuilt == 1 and other.seq.layer_len == (40,) * L
    t.decode(3)
    assert t.seq.n_rebuilt == 1
    t.verify()
    other.verify()


def test_a_static_file_serves_without_agents(tmp_path, cluster, etcd1):
    hosts = [Host(tmp_path, name, etcd1.url) for name in ("x", "y")]
    try:
        for host in hosts:
            host.start_daemon()
        path = tmp_path / "members.json"
        path.write_text(json.dumps({"members": [{"name": h.name, "url": h.url} for h in hosts]}))
        with attnd_cluster.connect(f"cluster+file://{path}", idle=0.05) as client:
            pool = client.create_pool(SPEC)
            rng = np.random.default_rng(SEED)
            texts = [Text(pool, prompt(rng, 40)) for _ in range(4)]
            assert {t.seq.where for t in texts} == {"x", "y"}
            decode_together(pool, texts)
            for t in texts:
                t.verify()
            new = tmp_path / "new.json"
            new.write_text(json.dumps({"members": [{"name": "y", "url": hosts[1].url}]}))
            os.replace(new, path)
            assert client.members.wait(300, lambda now: set(now) == {"y"})
            assert Text(pool, prompt(rng, 40)).seq.where == "y"
    finally:
        for host in hosts:
            host.close()


def test_what_was_opened_on_a_daemon_that_is_said_to_be_gone_is_freed_by_who_hears_of_it(
    tmp_path, etcd1
):
    host, path = Host(tmp_path, "x", etcd1.url), tmp_path / "members.json"
    try:
        host.start_daemon("--engine.lease", "1h")
        path.write_text(json.dumps({"members": [{"name": "x", "url": host.url}]}))
        with (
            attnd_cluster.connect(f"cluster+file://{path}", idle=0.05) as client,
            attnd.connect(host.url) as other,
            attnd.connect(f"ipc://{host.socket}") as operator,
        ):
            pool = client.create_pool(SPEC)
            texts = [Text(pool, prompt(np.random.default_rng(SEED), 40)) for _ in range(3)]
            taken = other.pool(SPEC.name).adopt(texts[0].seq.id)
            assert len(operator.inspect("sequences")["sequences"]) == 3
            new = tmp_path / "new.json"
            new.write_text(json.dumps({"members": []}))
            os.replace(new, path)
            def left():
                return [s["sequence"] for s in operator.inspect("sequences")["sequences"]]

            await_("that others' alone is left", lambda: left() == [str(taken.id)])
    finally:
        host.close()


@pytest.mark.parametrize(
    "url, error, named",
    [
        ("cluster+zk://a:1", attnd.InvalidArgumentError, "registry is"),
        ("cluster+file:///nowhere.json", attnd.ConnectionLostError, "nowhere.json"),
        ("cluster+etcd://127.0.0.1:9", attnd.ConnectionLostError, "127.0.0.1:9"),
    ],
)
def test_a_registry_that_is_wrong_or_away_is_named(url, error, named):
    with pytest.raises(error, match=named):
        attnd.connect(url, connect_timeout=0.5)
