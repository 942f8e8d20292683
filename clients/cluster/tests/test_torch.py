"""Steps of sequences in shards by lanes, on the CPU: byte for byte the outputs that steps by messages give
where one daemon has all, and float64's where what several give is merged."""

import json
import os
import random
import signal
import threading

import attnd
import numpy as np
import pytest
import test_projections as projections
from conftest import await_
from ledger import L, VOCAB, reference, rows
from rig import SPEC, Host

import attnd_cluster

torch = pytest.importorskip("torch")
from attnd_cluster.torch import Attention  # noqa: E402

SEED = random.randrange(1 << 30)
LONG = 3600.0  # a time-out that no test waits for


def rebuild(seq):
    first, ids = seq.n_cached, seq.tokens[seq.n_cached :]
    for layer in range(L):
        _, k, v = rows(layer, ids, first)
        seq.pool.step(layer, [(seq, first, len(ids))], k=k, v=v)


class Cluster:
    def __init__(self, tmp_path):
        self.path, self.hosts = tmp_path / "members.json", {}
        for name in "abc":
            host = self.hosts[name] = Host(tmp_path, name, "unused")
            self.start(name)
        self.say("abc")
        self.client = attnd_cluster.connect(
            f"cluster+file://{self.path}", rebuild=rebuild, idle=0.05, timeout=LONG
        )
        self.pool = self.client.create_pool(SPEC)
        self.attention = Attention(self.pool)

    def start(self, name):
        host = self.hosts[name]
        host.start_daemon("--listen", f"gpu://{host.socket}.lanes")

    def say(self, names):
        new = self.path.with_suffix(".new")
        members = [{"name": n, "url": self.hosts[n].url} for n in names]
        new.write_text(json.dumps({"members": members}))
        os.replace(new, self.path)

    def kill(self, name):
        self.hosts[name].signal_daemon(signal.SIGKILL)
        self.say(n for n in self.hosts if n != name)

    def stop(self, name):
        """It answers nothing from now on, and takes what comes."""
        self.hosts[name].signal_daemon(signal.SIGSTOP)

    def close(self):
        self.attention.close()
        self.client.close()
        for host in self.hosts.values():
            host.close()


@pytest.fixture
def cluster(tmp_path):
    print("seed", SEED)
    made = Cluster(tmp_path)
    yield made
    made.close()


class Text:
    """A worker's view of a sequence: its prompt goes by messages, tokens by lanes."""

    def __init__(self, pool, n, **options):
        self.ids = [(31 * i * i + SEED) % VOCAB for i in range(n)]
        self.seq = pool.open(tokens=self.ids, **options)
        for layer in range(L):
            pool.step(layer, [(self.seq, 0, n)], *rows(layer, self.ids, 0))

    def more(self, n=1):
        """(sequence, pos, n) of its next tokens, whose ids it tells."""
        pos = len(self.ids)
        ids = [(self.ids[-1] * 31 + pos + i) % VOCAB for i in range(n)]
        self.seq.set_tokens(pos, ids)
        self.ids += ids
        return self.seq, pos, n


def layers(attention, texts, items):
    """All layers of a plan, each output against float64."""
    for layer in range(L):
        made = [rows(layer, t.ids[pos : pos + n], pos) for t, (_, pos, n) in zip(texts, items)]
        qkv = [torch.from_numpy(np.concatenate(x)) for x in zip(*made)]
        out = attention(*qkv, out=torch.full_like(qkv[0], float("nan"))).numpy()
        at = 0
        for t, (_, pos, n) in zip(texts, items):
            for i in range(n):
                want = reference(layer, t.ids, pos + i)
                np.testing.assert_allclose(out[at], want, atol=2e-5)
                at += 1
    attention.check()


def test_heads_of_latents_are_merged_as_heads(cluster):
    """In place of latents: each daemon projects what its shard gives."""
    pool, n = cluster.client.create_pool(projections.SPEC), 150
    projections.give(pool)
    with Attention(pool) as attention, pool.open(shard_tokens=64) as seq:
        for layer in range(projections.LAYERS):
            pool.step(layer, [(seq, 0, n)], None, projections.K[layer, :n])
        assert len(seq.shards) == 3
        for pos in range(n, n + 3):
            attention.plan([(seq, pos, 1)])
            for layer in range(projections.LAYERS):
                q, k = projections.Q[layer, pos : pos + 1], projections.K[layer, pos : pos + 1]
                out = attention(torch.from_numpy(q), torch.from_numpy(k)).numpy()
                want = projections.chain(layer, pos)[0]
                np.testing.assert_allclose(out[0], want, rtol=1e-3, atol=1e-4)
            attention.check()


def step(attention, texts, counts=None):
    items = [t.more(n) for t, n in zip(texts, counts or [1] * len(texts))]
    attention.plan(items)
    layers(attention, texts, items)
    return items


def verify(text):
    """Each token is there once, also for steps by messages."""
    if not text.seq.is_long:
        text.seq.adopt()
    assert text.seq.layer_len == (len(text.ids),) * L
    seq, pos, n = text.more()
    for layer in range(L):
        out = text.seq.pool.step(layer, [(seq, pos, n)], *rows(layer, text.ids[pos:], pos)).out
        np.testing.assert_allclose(out[0], reference(layer, text.ids, pos), atol=2e-5)


def test_outputs_of_sequences_in_shards_are_float64s(cluster):
    texts = [
        Text(cluster.pool, 90, shard_tokens=48),
        Text(cluster.pool, 20),
        Text(cluster.pool, 200, shard_tokens=48),  # more shards than daemons
        Text(cluster.pool, 30, shard_tokens=48),
    ]
    seen = {cluster.attention.layout}
    for _ in range(20):  # shards begin at 96 and 48
        step(cluster.attention, texts)
        seen.add(cluster.attention.layout)
    assert [len(t.seq.shards) for t in texts if t.seq.is_long] == [3, 5, 2]
    assert len(seen) == 4, "another layout for each shard that began"
    step(cluster.attention, texts[1:2], [7])  # several tokens of one that is not split
    for t in texts:
        verify(t)


def test_a_lost_shard_is_made_anew_and_the_step_goes_on(cluster):
    texts = [Text(cluster.pool, 140, shard_tokens=48), Text(cluster.pool, 60)]
    step(cluster.attention, texts)
    n_hosts = len({where for _, where in texts[0].seq.where})
    assert n_hosts == 3
    lost = texts[0].seq.where[1][1]
    cluster.kill(lost)
    items = [t.more() for t in texts]
    cluster.attention.plan(items)
    layers(cluster.attention, texts, items)
    assert lost not in {where for _, where in texts[0].seq.where} and texts[0].seq.n_rebuilt == 1
    step(cluster.attention, texts)
    for t in texts:
        verify(t)


def test_a_host_that_dies_between_layers_is_told_and_planned_anew(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    items = [text.more()]
    cluster.attention.plan(items)
    cluster.kill(text.seq.where[0][1])
    with pytest.raises(attnd.AttndError):
        layers(cluster.attention, [text], items)
    cluster.attention.plan(items)
    layers(cluster.attention, [text], items)
    verify(text)


def beside(what):
    """what() on a thread, for a stopped daemon's sake; await_() its result()."""
    ended = []

    def run():
        try:
            what()
            ended.append(None)
        except Exception as e:
            ended.append(e)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_a_stopped_host_ends_plans_and_layers_with_its_membership(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    step(cluster.attention, [text])
    items = [text.more()]
    cluster.attention.plan(items)
    first = text.seq.where[0][1]
    cluster.stop(first)
    ended = beside(lambda: layers(cluster.attention, [text], items))
    cluster.say(n for n in cluster.hosts if n != first)
    await_("the layers' end", lambda: ended)
    assert isinstance(ended[0], attnd.ConnectionLostError), ended
    cluster.attention.plan(items)
    layers(cluster.attention, [text], items)
    assert text.seq.n_rebuilt == 1

    items = [text.more()]
    second = text.seq.where[0][1]
    cluster.stop(second)
    ended = beside(lambda: cluster.attention.plan(items))
    cluster.say(n for n in cluster.hosts if n not in (first, second))
    await_("the plan's end", lambda: ended)
    assert ended == [None]
    layers(cluster.attention, [text], items)
    verify(text)


def test_a_lane_to_a_stopped_host_is_not_waited_for(cluster):
    text = on(cluster, "a")
    items = [text.more()]
    cluster.stop("a")
    ended = beside(lambda: cluster.attention.plan(items))
    cluster.say("bc")
    await_("the plan's end", lambda: ended)
    assert ended == [None]
    layers(cluster.attention, [text], items)
    verify(text)


def test_a_shard_that_moved_is_followed(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    step(cluster.attention, [text])
    before, to = cluster.attention.layout, text.seq.where[1][1]
    text.seq.shards[0].move(to)
    step(cluster.attention, [text])
    assert text.seq.where[0][1] == to and cluster.attention.layout > before
    verify(text)


def on(cluster, name, n=40):
    """A text there."""
    text = Text(cluster.pool, n)
    text.seq.move(name)
    return text



def test_the_neighbours_of_a_sequence_that_moved_stay_as_they_are(cluster):
    texts = [on(cluster, "a"), on(cluster, "a"), Text(cluster.pool, 60)]
    step(cluster.attention, texts)
    before = texts[0].seq.id, texts[0].seq.epoch
    items = [t.more() for t in texts]
    with attnd.connect(cluster.hosts["a"].url) as a, attnd.connect(cluster.hosts["b"].url) as b:
        a.move(texts[1].seq.id, b.pool(SPEC.name))
    cluster.attention.plan(items)
    layers(cluster.attention, texts, items)
    assert [t.seq.n_rebuilt for t in texts] == [0, 0, 0]
    assert (texts[0].seq.id, texts[0].seq.epoch) == before and texts[1].seq.where == "b"
    for t in texts:
        verify(t)


def test_a_plan_left_on_a_lane_is_forgotten_though_the_next_plan_lacks_the_lane(cluster):
    x, y = on(cluster, "a"), on(cluster, "b")
    step(cluster.attention, [x, y])
    with pytest.raises(attnd.AttndError):
        cluster.attention.plan([x.more(), (y.seq, len(y.ids) + 5, 1)])  # of x it is sent
    pos = len(x.ids) - 1
    for layer in range(L):
        cluster.pool.step(layer, [(x.seq, pos, 1)], *rows(layer, x.ids[pos:], pos))
    step(cluster.attention, [y])
    step(cluster.attention, [x, y])
    for t in (x, y):
        verify(t)


def test_a_lane_without_rows_is_not_asked(cluster):
    x, y = on(cluster, "a"), on(cluster, "b")
    step(cluster.attention, [x, y])
    step(cluster.attention, [y])
    idle = next(lane for (host, _), lane in cluster.attention._lanes.items() if host.name == "a")
    cluster.kill("a")

    def hung_up():
        try:
            idle.check()
        except attnd.ConnectionLostError:
            return True

    await_("the lane's end", hung_up)
    step(cluster.attention, [y])
    step(cluster.attention, [x, y])
    assert (x.seq.n_rebuilt, y.seq.n_rebuilt) == (1, 0)
    for t in (x, y):
        verify(t)


def test_a_layer_that_some_lanes_have_is_planned_anew_whatever_failed(cluster, monkeypatch):
    texts = [on(cluster, "a"), on(cluster, "b")]
    items = [t.more() for t in texts]
    cluster.attention.plan(items)
    for t in texts:
        t.seq._host._pools.clear()  # as another thread does that begins a session anew
    layers(cluster.attention, texts, items)
    items = [t.more() for t in texts]
    cluster.attention.plan(items)
    enqueue, n_left = Attention._enqueue, [1]

    def without_memory(self, *args):
        if not n_left[0]:
            raise torch.OutOfMemoryError("none")
        n_left[0] -= 1
        enqueue(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Attention, "_enqueue", without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            layers(cluster.attention, texts, items)
    with pytest.raises(ValueError, match="plan\\(\\) it anew"):
        layers(cluster.attention, texts, items)
    cluster.attention.plan(items)
    layers(cluster.attention, texts, items)
    for t in texts:
        verify(t)


def test_a_daemon_restarted_where_it_was_has_another_layout(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    step(cluster.attention, [text])
    before, where = cluster.attention.layout, text.seq.where
    name = where[1][1]
    cluster.hosts[name].signal_daemon(signal.SIGKILL)
    cluster.start(name)
    step(cluster.attention, [text])
    assert text.seq.where == where and text.seq.n_rebuilt == 1
    assert cluster.attention.layout > before
    verify(text)


def test_a_pass_given_up_half_way_begins_anew(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    items = [text.more()]
    cluster.attention.plan(items)
    cluster.attention(*(torch.from_numpy(x) for x in rows(0, text.ids[140:], 140)))
    cluster.attention.plan(items, is_restart=True)
    layers(cluster.attention, [text], items)
    verify(text)


def test_only_check_acknowledges_and_a_plan_does_not_swallow_what_failed(cluster, monkeypatch):
    x, y = on(cluster, "a"), on(cluster, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "check", lambda self: None)
        step(cluster.attention, [x])
    cluster.attention.plan([y.more()])
    assert x.seq._lens == [40] * L
    layers(cluster.attention, [y], [(y.seq, 40, 1)])
    assert x.seq._lens == y.seq._lens == [41] * L
    with monkeypatch.context() as patch:
        patch.setattr(Attention, "check", lambda self: None)
        step(cluster.attention, [y])
    (lane,) = (lane for (host, _), lane in cluster.attention._lanes.items() if host.name == "b")

    def lost():
        raise attnd.DeviceLostError("a layer of the lane failed")

    items = [(y.seq, 41, 1)]
    with attnd.connect(cluster.hosts["b"].url) as b, attnd.connect(cluster.hosts["c"].url) as c:
        b.move(y.seq.id, c.pool(SPEC.name))  # so that the next plan is refused
    with monkeypatch.context() as patch:
        patch.setattr(lane, "check", lost)
        with pytest.raises(attnd.DeviceLostError):
            cluster.attention.plan([(y.seq, 42, 1)])
    cluster.attention.plan(items)
    layers(cluster.attention, [y], items)
    for t in (x, y):
        verify(t)


def test_shards_begin_also_where_nobody_checks(cluster, monkeypatch):
    text = Text(cluster.pool, 90, shard_tokens=48)
    check = cluster.attention.check
    for _ in range(20):
        items = [text.more()]
        cluster.attention.plan(items)
        monkeypatch.setattr(cluster.attention, "check", lambda: None)
        layers(cluster.attention, [text], items)
        monkeypatch.setattr(cluster.attention, "check", check)
    assert [s.base for s in text.seq.shards] == [0, 48, 96]
    cluster.attention.check()
    verify(text)


def test_the_end_of_a_host_closes_no_lane_under_its_layers(cluster):
    text = Text(cluster.pool, 140, shard_tokens=48)
    items = [text.more()]
    cluster.attention.plan(items)
    host, inner = text.seq.shards[-1]._host, cluster.attention._pools
    lanes = [lane for (h, _), lane in cluster.attention._lanes.items() if h is host]
    name = host.name
    cluster.say(n for n in cluster.hosts if n != name)  # its daemon lives
    await_("the host's end", host.is_released.is_set)
    assert lanes and not any(lane.is_closed for lane in lanes)
    with pytest.raises(attnd.ConnectionLostError):
        layers(cluster.attention, [text], items)
    host._pools[SPEC.name] = inner[host, True]  # as one who has looked just before its end
    cluster.attention.plan(items)
    assert all(lane.is_closed for lane in lanes)
    layers(cluster.attention, [text], items)
    verify(text)


def test_what_lanes_do_not_take_is_refused_by_name(cluster):
    text = Text(cluster.pool, 60, shard_tokens=48)
    with pytest.raises(ValueError, match="pos 60, n_tokens 3 of a sequence in 2 shards"):
        cluster.attention.plan([(text.seq, 60, 3)])
    with pytest.raises(ValueError, match="no plan was made"):
        cluster.attention(*(torch.zeros(1, 4, 64),) * 3)
    with pytest.raises(ValueError, match="items is empty"):
        cluster.attention.plan([])
    window = cluster.client.create_pool(
        SPEC._replace(name="w", layers=[attnd.LayerSpec(window_tokens=70)])
    )
    other = Attention(window)
    with pytest.raises(attnd.UnsupportedError, match="layer 0 has window_tokens"):
        other.plan([(Text(window, 60, shard_tokens=48).seq, 60, 1)])
    items = [text.more()]
    cluster.attention.plan(items)
    q, k, v = (torch.from_numpy(x) for x in rows(0, text.ids[60:], 60))
    with pytest.raises(ValueError, match="k is missing"):
        cluster.attention(q, None, v)
    with pytest.raises(ValueError, match="v is torch.float16"):
        cluster.attention(q, k, v.half())
    layers(cluster.attention, [text], items)  # nothing was lost
    verify(text)
