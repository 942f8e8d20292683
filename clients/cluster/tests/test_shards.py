"""Sequences over several daemons: every output against float64 over all that was acknowledged, with
windows, sink tokens, ALiBi and sink logits, while shards begin, are cut off, and are lost."""

import collections
import concurrent.futures
import ctypes
import importlib.util
import json
import os
import random
import signal
import threading

import attnd
import numpy as np
import pytest
from attnd._lib import library
from attnd._tensor import BF16, F16, F32, FP8_E4M3
from attnd.errors import check
from conftest import ROOT
from ledger import L, VOCAB, Text, rebuild, rows
from rig import SPEC, HostsInAFile

import attnd_cluster
from attnd_cluster import shard_decode
from attnd_cluster.shard_steps import merging
from attnd_cluster.shards import LongSequence, ShardLostError

_at = ROOT / "clients" / "python" / "tests" / "reference.py"
_spec = importlib.util.spec_from_file_location("attention_reference", _at)
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

SEED = random.randrange(1 << 30)
SLOPES = [0.4, 0.1, 0.02, 0.004]
LAYERS = {
    "plain": [attnd.LayerSpec()],
    "window": [attnd.LayerSpec(window_tokens=75), attnd.LayerSpec(alibi_slopes=SLOPES)],
    "sinks": [
        attnd.LayerSpec(window_tokens=30, sink_tokens=70),
        attnd.LayerSpec(sink_logits=[0.5, -1.0, 2.0, 0.0], soft_cap=5.0),
    ],
}


def wide(x):
    """As floats that numpy has; uint16 is bf16."""
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def narrow(x, dtype):
    if dtype != np.uint16:
        return x.astype(dtype)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@pytest.fixture
def hosts(tmp_path):
    print("seed", SEED)
    made = HostsInAFile(tmp_path, rebuild)
    yield made
    made.close()


class Long:
    """A worker's view of a sequence in shards."""

    def __init__(self, pool, **options):
        self.pool, self.ids = pool, []
        self.seq = pool.open(**options)

    def append(self, n, chunk=None):
        ids = [(7 * len(self.ids) + 31 * i + SEED) % VOCAB for i in range(n)]
        for at in range(0, n, chunk or n):
            pos, new = len(self.ids), ids[at : at + (chunk or n)]
            self.seq.set_tokens(pos, new)
            self.ids += new
            for layer in range(L):
                q, k, v = rows(layer, new, pos)
                items = [(self.seq, pos, len(new))]
                self.check(layer, pos, self.pool.step(layer, items, q, k, v, lse=True))

    def check(self, layer, pos, result):
        n = len(result.out)
        q = rows(layer, self.ids[pos : pos + n], pos)[0]
        _, k, v = rows(layer, self.ids[: pos + n], 0)
        layers = self.pool.spec.layers
        spec = layers[layer if len(layers) > 1 else 0]
        out, lse = reference.attention(q, k, v, pos, spec)
        np.testing.assert_allclose(result.out, out, atol=2e-5)
        np.testing.assert_allclose(result.lse, lse, atol=2e-5)

    def verify(self):
        """The last token's outputs, and that each token is there once."""
        pos = len(self.ids) - 1
        for layer in range(L):
            q = rows(layer, self.ids[pos:], pos)[0]
            self.check(layer, pos, self.pool.step(layer, [(self.seq, pos, 1)], q, lse=True))
        assert self.seq.layer_len == (len(self.ids),) * L
        ends = [s.base for s in self.seq.shards[1:]] + [len(self.ids)]
        for shard, past in zip(self.seq.shards, ends):
            shard.adopt()
            assert shard.layer_len == (past - shard.base,) * L


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_those_of_one_sequence(hosts, name):
    client = hosts.make("a", "b", "c")
    pool = client.create_pool(SPEC._replace(layers=LAYERS[name]))
    x = Long(pool, shard_tokens=48)
    x.append(200, chunk=70)  # of more tokens than a shard has
    for _ in range(12):
        x.append(1)
    assert [base for base, _ in x.seq.where] == [0, 48, 96, 144, 192]
    assert {host for _, host in x.seq.where[:3]} == {"a", "b", "c"}
    x.verify()
    x.seq.close()
    for host in client.hosts.all():
        assert host.client().stats()["sequences"] == 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_steps_of_one_token_are_made_once_and_give_the_same_bytes(hosts, monkeypatch, dtype):
    pool = hosts.make("a", "b").create_pool(SPEC._replace(q_dtype=dtype))
    kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
    seq = pool.open(shard_tokens=48)

    def step(layer, pos, n, has_kv=True):
        q, k, v = (narrow(x, np.dtype(kind)) for x in rows(layer, range(pos, pos + n), pos))
        kv = (k, v) if has_kv else ()
        return pool.step(layer, [(seq, pos, n)], q, *kv, lse=True)

    for layer in range(L):
        step(layer, 0, 90)
    real, n_done = shard_decode.decode, []

    def decode(*args):
        n_done.append(real(*args))
        return n_done[-1]

    monkeypatch.setattr(shard_decode, "decode", decode)
    monkeypatch.setattr(shard_decode, "_HAS_SPARE_CORES", True)
    got = {}
    for pos in range(90, 101):  # a third shard begins at 96
        for layer in range(L):
            for has_kv in (True, False):
                got[layer, pos, has_kv] = step(layer, pos, 1, has_kv)
    assert n_done.count(None) == 1, "the shard that begins is shard_steps.py's"
    monkeypatch.setattr(shard_decode, "decode", lambda *args: None)
    for (layer, pos, has_kv), one in got.items():
        want = step(layer, pos, 1, has_kv)
        assert one.out.tobytes() == want.out.tobytes() and one.lse.tobytes() == want.lse.tobytes()
    assert seq.layer_len == (101,) * L


def test_outputs_that_do_not_fit_are_refused_before_anything_is_sent(hosts):
    pool = hosts.make("a", "b").create_pool(SPEC)
    x = Long(pool, shard_tokens=48)
    x.append(60)
    x.append(1)  # its steps are made once
    q, k, v = rows(0, [5], 61)
    for wrong in ({"out": np.empty((1, 4, 32), np.float32)}, {"lse": np.empty((1, 3), np.float32)}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} has shape"):
            pool.step(0, [(x.seq, 61, 1)], q, k, v, **wrong)
    assert x.seq.layer_len == (61,) * L
    for shard, n in zip(x.seq.shards, (48, 13)):
        shard.adopt()
        assert shard.layer_len == (n,) * L
    out, lse = np.full((1, 4, 64), np.nan, np.float32), np.full((1, 4), np.nan, np.float32)
    x.ids.append(5)
    for layer in range(L):
        result = pool.step(layer, [(x.seq, 61, 1)], *rows(layer, [5], 61), out=out, lse=lse)
        assert result.out is out and result.lse is lse
        x.check(layer, 61, result)


class Unanswered:
    """A host and a step of it whose answer does not come; `looks` counts who looks for it."""

    is_done = is_gone = False

    def __init__(self, looks):
        self._pool = self.client = self
        self._looks = looks

    def poll_once(self):
        self._looks[threading.get_ident()] += 1

    def wait(self, step):
        """Of the host."""
        if threading.get_ident() in self._looks:
            assert not shard_decode._spinner.locked(), "who waits so lets others look"


def test_one_thread_at_a_time_looks_for_answers_without_a_pause(monkeypatch):
    monkeypatch.setattr(shard_decode, "_HAS_SPARE_CORES", True)
    monkeypatch.setattr(shard_decode, "_WATCH_SECONDS", 0.05)
    looks = collections.Counter()
    step = Unanswered(looks)

    def watch():
        with shard_decode._Watch() as w:
            assert not w._looks, "nothing is waited for yet"
            w.wait(step, step)

    def poll(self=step, real=step.poll_once):
        real()
        if len(looks) == 1:  # another thread does not wait, nor look
            other = threading.Thread(target=watch)
            other.start()
            other.join()

    step.poll_once = poll
    watch()
    assert list(looks) == [threading.get_ident()]

    def fail():
        raise KeyError("a bug")

    step.poll_once = fail
    with pytest.raises(KeyError):
        watch()
    looks.clear()
    del step.poll_once
    watch()  # the one that failed has let others
    assert looks[threading.get_ident()] > 0


@pytest.mark.parametrize(
    "groups, files, n",
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "6400000 100000\n"}, 16),
        (
            "4:memory:/m\n1:cpu,cpuacct:/d/x\n0::/\n",
            {"cpu/d/x/cpu.cfs_quota_us": "50000\n", "cpu/d/x/cpu.cfs_period_us": "25000\n"},
            2,
        ),
        ("1:cpu:/d\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        (None, {}, 16),
    ],
)
def test_cores_are_those_of_affinity_and_quotas(tmp_path, monkeypatch, groups, files, n):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert shard_decode.n_cores(tmp_path / "root", tmp_path / "groups") == n


def test_threads_decode_layers_of_one_sequence_at_once(hosts):
    pool = hosts.make("a", "b").create_pool(SPEC._replace(layers=LAYERS["sinks"]))
    x = Long(pool, shard_tokens=48)
    x.append(80)
    new = [(3 * i + SEED) % VOCAB for i in range(40)]
    x.seq.set_tokens(80, new)
    x.ids += new

    def decode(layer):
        for pos in range(80, 120):
            q, k, v = rows(layer, x.ids[pos : pos + 1], pos)
            x.check(layer, pos, pool.step(layer, [(x.seq, pos, 1)], q, k, v, lse=True))

    with concurrent.futures.ThreadPoolExecutor(L) as threads:
        for done in [threads.submit(decode, layer) for layer in range(L)]:
            done.result()
    x.verify()


def test_another_shard_begins_where_a_daemon_has_no_blocks_left(hosts):
    pool = hosts.make("a", "b").create_pool(SPEC._replace(n_blocks=6))
    x = Long(pool, shard_tokens=6 * 16 * 10)
    x.append(80)
    x.append(30)  # into 16 free places: all of them go elsewhere
    for _ in range(30):
        x.append(1)
    (first, a), (second, b) = x.seq.where
    assert (first, second) == (0, 80) and a != b
    x.verify()
    with pytest.raises(attnd.OutOfBlocksError):
        x.append(100)


@pytest.mark.parametrize("which", [0, 1, -1], ids=["first", "middle", "last"])
def test_a_lost_shard_is_computed_anew_and_the_others_are_kept(hosts, which):
    pool = hosts.make("a", "b", "c", "d").create_pool(
        SPEC._replace(layers=LAYERS["window"])
    )
    x = Long(pool, shard_tokens=64)
    x.append(150)
    x.append(3, chunk=1)
    lost = x.seq.shards[which].where
    assert len({s.where for s in x.seq.shards}) == 3
    hosts.kill(lost)
    x.append(3, chunk=1)
    x.append(40)  # and into another shard
    assert [s.n_rebuilt for s in x.seq.shards[:3]] == [int(i == which % 3) for i in range(3)]
    assert lost not in [host for _, host in x.seq.where]
    x.verify()


def test_shards_move_like_any_sequence(hosts):
    client = hosts.make("a", "b")
    pool = client.create_pool(SPEC._replace(layers=LAYERS["sinks"]))
    x = Long(pool, shard_tokens=48)
    x.append(130)
    for shard in x.seq.shards:
        to = "b" if shard.where == "a" else "a"
        if shard.base == 48:  # by somebody else, as an agent does
            urls = {n: m.url for n, m in client.members.now().items()}
            with attnd.connect(urls[shard.where]) as old, attnd.connect(urls[to]) as new:
                old.move(shard.id, new.pool("p"))
                x.append(3, chunk=1)
        else:
            shard.move(to)
            x.append(3, chunk=1)
        assert shard.where == to and x.seq.n_rebuilt == 0
    x.verify()


def test_two_shards_of_one_host_are_both_computed_anew(hosts):
    pool = hosts.make("a", "b").create_pool(SPEC)
    x = Long(pool, shard_tokens=32)
    x.append(120)
    at = [host for _, host in x.seq.where]
    assert at[0] == at[2] != at[1] == at[3]
    hosts.kill(at[0])
    x.append(5, chunk=1)
    assert [s.n_rebuilt for s in x.seq.shards] == [1, 0, 1, 0]
    x.verify()


def attend_again(seq):
    """As a model does: each layer attends, too, to the shards before."""
    first, ids = seq.n_cached, seq.tokens[seq.n_cached :]
    for layer in range(L):
        q, k, v = rows(layer, ids, first)
        out = seq.pool.step(layer, [(seq, first, len(ids))], q, k, v).out
        want, _ = reference.attention(q, *rows(layer, seq.tokens, 0)[1:], first)
        np.testing.assert_allclose(out, want, atol=2e-5)


def test_a_truncation_finds_its_shard_and_those_before_it_lost(hosts):
    pool = hosts.make("a", "b", rebuild=attend_again).create_pool(SPEC)
    x = Long(pool, shard_tokens=32)
    x.append(120)
    hosts.kill(x.seq.shards[0].where)
    x.seq.truncate(90)
    del x.ids[90:]
    assert [s.n_rebuilt for s in x.seq.shards] == [1, 0, 1]
    x.append(20, chunk=3)
    x.verify()


def test_without_a_callback_a_lost_shard_is_said_with_its_tokens(hosts):
    pool = hosts.make("a", "b", "c", rebuild=None).create_pool(SPEC)
    x = Long(pool, shard_tokens=64)
    x.append(150)
    hosts.kill(x.seq.shards[1].where)
    q, k, v = rows(0, [1], 150)
    out = np.empty_like(q)
    with pytest.raises(ShardLostError, match="shard lost: tokens 64 to 128 of a sequence") as e:
        pool.step(0, [(x.seq, 150, 1)], q, k, v, out=out)
    assert (e.value.first, e.value.past) == (64, 128) and np.isnan(out).all()


def test_the_methods_of_a_sequence(hosts):
    client = hosts.make("a", "b")
    pool = client.create_pool(SPEC)
    with pytest.raises(attnd.InvalidArgumentError, match="shard_tokens is 40, must be a multiple"):
        pool.open(shard_tokens=40)
    x = Long(pool, shard_tokens=48)
    assert isinstance(x.seq, LongSequence)
    with pytest.raises(attnd.InvalidArgumentError, match="pos is 3, 0 ids are known"):
        x.seq.set_tokens(3, [1])
    x.append(130)
    other = Long(pool, shard_tokens=48)
    other.seq, other.ids = x.seq.fork(100), x.ids[:100]
    assert [s.base for s in other.seq.shards] == [0, 48, 96] and other.seq.tokens == x.ids[:100]
    other.append(10)
    other.verify()
    x.seq.truncate(96)
    del x.ids[96:]
    x.append(20)
    x.seq.truncate(50)
    del x.ids[50:]
    x.append(2, chunk=1)
    x.verify()
    other.verify()
    # one step of sequences with shards and of others
    plain = Long(pool)
    plain.append(5)
    items = [(plain.seq, 4, 1), (x.seq, 51, 1), (other.seq, 108, 2)]
    q = np.concatenate(
        [rows(0, t.ids[pos : pos + n], pos)[0] for t, (_, pos, n) in zip((plain, x, other), items)]
    )
    result = pool.step(0, items, q, lse=True)
    for t, a, b in ((plain, 0, 1), (x, 1, 2), (other, 2, 4)):
        pos = len(t.ids) - (b - a)
        t.check(0, pos, result._replace(out=result.out[a:b], lse=result.lse[a:b]))
    # what is wrong with one is said of it alone
    with pytest.raises(attnd.InvalidArgumentError, match="layer 0 has 4 tokens") as e:
        _, k, v = rows(0, [1, plain.ids[4]], 3)
        pool.step(0, [(x.seq, 77, 1), (plain.seq, 4, 1)], q[:2], k, v)
    assert e.value.result.item_status[0] != 0 and e.value.result.item_status[1] == 0
    assert np.isnan(e.value.result.out[0]).all() and np.isfinite(e.value.result.out[1]).all()


@pytest.mark.parametrize("lost", [None, 0, 1, 3], ids=["none", "first", "middle", "last"])
def test_another_worker_takes_over_all_shards(hosts, lost):
    """Those that went with their host, while nobody had the sequence, are computed anew."""
    one = hosts.make("a", "b", "c", "d", "e").create_pool(SPEC._replace(layers=LAYERS["sinks"]))
    x = Long(one, shard_tokens=48)
    x.append(160)
    x.append(3, chunk=1)
    told = json.loads(json.dumps(x.seq.shard_ids))  # as a worker writes it down
    assert [first for first, _ in told] == [0, 48, 96, 144]
    if lost is not None:
        hosts.kill(x.seq.shards[lost].where)
    other = hosts.make(*(n for n in "abcde" if lost is None or n != x.seq.shards[lost].where))
    pool = other.create_pool(SPEC._replace(layers=LAYERS["sinks"]))
    y = Long(pool)
    y.seq.close()
    y.seq, y.ids = pool.adopt_shards(told, 48, tokens=x.ids), list(x.ids)
    assert y.seq.layer_len == (163,) * L
    assert [i for i, (a, b) in enumerate(zip(told, y.seq.shard_ids)) if tuple(a) != b] == (
        [] if lost is None else [lost]
    )
    y.verify()
    y.append(50)  # and into another shard
    y.append(2, chunk=1)
    y.verify()
    # the first worker's handles are old
    q, k, v = rows(0, [1], 163)
    if lost != 3:  # it would make that one anew, for itself
        with pytest.raises(attnd.StaleEpochError):
            one.step(0, [(x.seq.shards[-1], 19, 1)], q, k, v)
    y.seq.close()


def test_who_knows_the_first_shard_takes_over_all_of_a_dead_workers(hosts):
    one = hosts.make("a", "b", "c", "d").create_pool(SPEC)
    x = Long(one, shard_tokens=48)
    x.append(160)
    x.seq.set_note(b"request 7")
    x.append(40, chunk=8)  # and another shard
    x.seq.truncate(145)  # and one less
    x.ids = x.ids[:145]
    first = x.seq.shard_ids[0][1]
    other = hosts.make("a", "b", "c", "d").create_pool(SPEC)
    y = Long(other)
    y.seq.close()
    y.seq, y.ids = other.adopt(first), list(x.ids)
    y.seq.set_tokens(0, y.ids)
    assert y.seq.shard_ids == x.seq.shard_ids and y.seq.note == b"request 7"
    assert (y.seq.shard_tokens, y.seq.layer_len) == (48, (145,) * L)
    y.verify()
    y.append(60)
    y.verify()
    with pytest.raises(attnd.InvalidArgumentError, match="note has 2049 bytes, at most 2048"):
        y.seq.set_note(bytes(2049))
    again = other.adopt(first)  # what it wrote itself
    assert again.shard_ids == y.seq.shard_ids and len(again.shards) == 5
    again.close()


def test_a_workers_own_note_may_begin_as_a_list_of_shards_does(hosts):
    one = hosts.make("a", "b").create_pool(SPEC)
    for text in (b"attnd-shards\nnot one", b"attnd-shards\n{}", b"attnd-shards\n[]"):
        seq = one.open()
        seq.set_note(text)
        found = hosts.make("a", "b").create_pool(SPEC).adopt(seq.id)
        assert found.id == seq.id and found.note == text
        found.close()


def no_note(self, note, *, timeout=None):
    raise attnd.OutOfMemoryError(f"no room for {len(note)} bytes within {timeout} s")


def test_a_note_that_is_not_kept_is_not_there(hosts, monkeypatch):
    pool = hosts.make("a", "b").create_pool(SPEC)
    x = Long(pool, shard_tokens=48)
    x.append(60)
    x.seq.set_note(b"old")
    monkeypatch.setattr(attnd.Sequence, "set_note", no_note)
    with pytest.raises(attnd.OutOfMemoryError, match="within 7 s"):
        x.seq.set_note(b"new", timeout=7)
    assert x.seq.note == b"old"
    x.append(40)  # and a shard that is not written down
    x.verify()


def test_a_lost_sequence_is_made_anew_where_there_is_no_room_for_its_note(hosts, monkeypatch):
    pool = hosts.make("a", "b").create_pool(SPEC)
    x = Text(pool, range(30))
    x.seq.set_note(b"what it was")
    monkeypatch.setattr(attnd.Sequence, "set_note", no_note)
    hosts.kill(x.seq.where)
    x.decode(3)
    assert x.seq.n_rebuilt == 1
    x.verify()


def test_what_is_wrong_with_shards_to_adopt_is_said(hosts):
    pool = hosts.make("a", "b", "c", rebuild=None).create_pool(SPEC)
    x = Long(pool, shard_tokens=48)
    x.append(130)
    told = x.seq.shard_ids
    with pytest.raises(attnd.InvalidArgumentError, match=r"shards begin at \[48, 96\]"):
        pool.adopt_shards(told[1:], 48, tokens=x.ids)
    with pytest.raises(attnd.InvalidArgumentError, match=r"shards begin at \[0, 96, 48\]"):
        pool.adopt_shards([told[0], told[2], told[1]], 48, tokens=x.ids)
    with pytest.raises(attnd.InvalidArgumentError, match="from 0 has 48 tokens, but the next .* 32"):
        pool.adopt_shards([told[0], (32, told[1][1])], 48, tokens=x.ids)
    with pytest.raises(attnd.InvalidArgumentError, match="from 96 has 34 .* shard_tokens is 32"):
        pool.adopt_shards(told, 32, tokens=x.ids)
    x.seq = pool.adopt_shards(told, 48, tokens=x.ids)
    x.verify()
    x.seq.shards[1].close()
    with pytest.raises(ShardLostError, match="tokens 48 to 96") as e:
        pool.adopt_shards(told, 48, tokens=x.ids)
    assert (e.value.first, e.value.past) == (48, 96)


def merged(kind, outs, lses):
    out, lse = np.full(outs.shape[1:], 77, outs.dtype), np.full(lses.shape[1:], 77, np.float32)
    merging(kind, outs, lses, out, lse)()
    return out, lse


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_merges_agree_with_float64(kind):
    dtype = {F32: np.float32, F16: np.float16, BF16: np.uint16}[kind]
    rng = np.random.default_rng(SEED)
    s = rng.normal(size=(5, 3, 40)) * 20
    v = rng.normal(size=(40, 200))
    s[0, :, :20] = s[1] = -np.inf  # queries that see nothing of a part, or at all
    outs, lses = [], []
    for keys in (slice(0, 20), slice(20, 25), slice(25, 40)):
        most = s[..., keys].max(-1, keepdims=True)
        e = np.exp(s[..., keys] - np.where(np.isneginf(most), 0, most))
        total = e.sum(-1)
        with np.errstate(divide="ignore"):
            lse = np.log(total) + np.where(np.isneginf(most), 0, most)[..., 0]
        out = narrow(e @ v[keys] / np.where(total == 0, 1, total)[..., None], np.dtype(dtype))
        out[np.isneginf(lse)] = narrow(np.array([np.nan]), np.dtype(dtype))  # is not looked at
        outs.append(out)
        lses.append(lse.astype(np.float32))
    out, lse = merged(kind, np.stack(outs), np.stack(lses))
    assert np.isneginf(lse[1]).all() and (out[1] == 0).all()
    keep = [0, 2, 3, 4]
    w = np.exp(s[keep] - s[keep].max(-1, keepdims=True))
    want = w @ v / w.sum(-1)[..., None]
    bound = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}[kind]
    np.testing.assert_allclose(wide(out)[keep], want, atol=2 * bound)
    np.testing.assert_allclose(
        lse[keep], np.log(w.sum(-1)) + s[keep].max(-1), rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("kind", [F16, BF16])
def test_merges_round_to_the_nearest(kind):
    rng = np.random.default_rng(SEED)
    bits = np.arange(1 << 16, dtype=np.uint16)
    outs = np.stack([bits, rng.permutation(bits)]).reshape(2, 1, 64, 1024)
    lses = np.zeros((2, 1, 64), np.float32)
    lses[1, 0, 32:] = -np.inf  # of the second half the first part is all: every number stays as it is

    def as_floats(x):
        return wide(x) if kind == BF16 else x.view(np.float16).astype(np.float32)

    with np.errstate(invalid="ignore", over="ignore"):
        want = as_floats(outs).astype(np.float64).sum(0) / 2
        want[:, 32:] = as_floats(outs)[0, :, 32:]
        want = want.astype(np.float32)
        want = narrow(want, np.dtype(np.uint16)) if kind == BF16 else want.astype(np.float16)
    outs = outs if kind == BF16 else outs.view(np.float16)
    out, _ = merged(kind, outs, lses)
    have, want = (as_floats(x.view(np.uint16)) for x in (out, want))
    np.testing.assert_array_equal(np.isnan(have), np.isnan(want))
    np.testing.assert_array_equal(have[~np.isnan(want)], want[~np.isnan(want)])


def test_wrong_merges_are_refused_by_name():
    lib, x = library(), (ctypes.c_float * 64)()
    for args, named in (
        ((F32, 0, 4, 4, x, x, x, None), "n_parts is 0"),
        ((F32, 2, 4, 0, x, x, x, None), "dim 0"),
        ((FP8_E4M3, 2, 4, 4, x, x, x, None), "dtype is fp8_e4m3"),
        ((F32, 2, 4, 4, None, x, x, None), "^outs is NULL"),
        ((F32, 2, 4, 4, x, None, x, None), "^lses is NULL"),
        ((F32, 2, 4, 4, x, x, None, None), "^out is NULL"),
    ):
        with pytest.raises(attnd.InvalidArgumentError, match=named):
            check(lib.attn_merge(*args))
