"""lane.py against a daemon on the CPU, without vLLM: what a step's layers give over a lane, filled up to
a graph's size or with rows that are not computed, is what steps of the pool give; and versions.py on
what a scheduler and the two model runners say."""

import pathlib
import sys
import types

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/tests"), str(HERE.parent / "src")]

from conftest import Daemon  # noqa: E402

import attnd  # noqa: E402
from attnd.serving.requests import Requests, Row  # noqa: E402

torch = pytest.importorskip("torch", reason="torch is not installed")
from attnd_vllm import versions  # noqa: E402
from attnd_vllm.lane import Metadata, OverHost, OverLane, open_lane  # noqa: E402

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 3, 4, 2, 16, 8


def requests_of(url, name, n_blocks=64, **more):
    spec = attnd.PoolSpec(
        name,
        LAYERS,
        HEADS,
        KV_HEADS,
        DIM,
        n_blocks=n_blocks,
        block_tokens=BLOCK,
        is_batch_invariant=True,
    )
    return Requests(attnd.connect(url, timeout=30), lambda c: c.create_pool(spec), **more)


@pytest.fixture
def daemon():
    with Daemon(**{"device.kv_memory": "64M"}) as d:
        yield d


@pytest.fixture
def pair(daemon):
    """The same requests over a lane with graphs of up to 6 tokens, and through steps."""
    over, host = requests_of(daemon.url, "lane"), requests_of(daemon.url, "host")
    lane = OverLane(over, over.client.open_lane(), 6)
    lane.warm(torch.device("cpu"))
    yield (over, lane), (host, OverHost(host))
    lane.close()
    over.close()
    host.close()


def layers(requests, way, rows, n_padded, seed):
    """Outputs of all layers [n_padded, HEADS, DIM]; rows of rubbish where no row is."""
    torch.manual_seed(seed)
    n = rows[-1].start + rows[-1].n
    is_uniform = all(r.n == rows[0].n for r in rows)
    m = way.plan(requests.step(rows), n, n_padded, is_uniform)
    outs = []
    for at in range(LAYERS):
        qkv = torch.randn(n_padded, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = torch.full((n_padded, HEADS, DIM), torch.nan)
        if not way.attend(at, m, q, k, v, out):
            out.zero_()
        outs.append(out)
    way.check()
    return outs


def test_a_filled_step_is_the_step(pair):
    both = [
        [
            layers(requests, way, [Row("a", 0, 5, 0, True), Row("b", 0, 3, 5, True)], 8, 1),
            layers(requests, way, [Row("b", 3, 1, 0, True), Row("a", 5, 1, 1, True)], 6, 2),
            layers(requests, way, [Row("a", 6, 2, 0, True), Row("b", 4, 2, 2, True)], 5, 3),
            layers(requests, way, [Row("a", 8, 1, 0, True)], 1, 4),
        ]
        for requests, way in pair
    ]
    for step, (lane, host) in enumerate(zip(*both)):
        n = (8, 2, 4, 1)[step]
        for a, b in zip(lane, host):
            assert torch.equal(a[:n], b[:n]) and a[:n].isfinite().all(), step


def test_rows_that_are_not_computed_leave_the_others_alone(pair):
    """b's tokens are not there (its engine believes in 4): its row fails, in a graph and in a chunk."""
    both = []
    for requests, way in pair:
        for name in "abc":
            layers(requests, way, [Row(name, 0, 4, 0, True)], 4, ord(name))
        requests.held["b"].n_tokens, requests.held["b"].is_behind = 2, True
        rows = [Row(name, 4, 1, i, True) for i, name in enumerate("abc")]
        decode = layers(requests, way, rows, 3, 7)
        assert requests.take_failed() == {"b": 2}
        requests.held["b"].is_behind = True
        rows = [Row("a", 5, 1, 0, True), Row("b", 5, 1, 1, True), Row("c", 5, 8, 2, True)]
        chunk = layers(requests, way, rows, 10, 8)
        assert requests.take_failed() == {"b": 2}
        both.append((decode, chunk))
    for (decode, chunk), (decode_, chunk_) in [both]:
        for a, b in zip(decode, decode_):
            assert torch.equal(a[[0, 2]], b[[0, 2]])
        for a, b in zip(chunk, chunk_):
            assert torch.equal(a, b) and a[1].eq(0).all()


def test_a_trial_fills_a_graph_and_computes_nothing_larger(pair):
    (_, lane), (_, host) = pair
    q, k = torch.randn(8, HEADS, DIM), torch.randn(8, KV_HEADS, DIM)
    m = lane.plan(None, 6, 6, True)
    assert m.is_planned and m.is_filled
    for at in range(LAYERS):
        out = torch.full_like(q, torch.nan)
        assert lane.attend(at, m, q, k, k, out) and out[:6].isfinite().all()
    for way, n in (lane, 7), (host, 6):
        m = way.plan(None, n, n, True)
        assert not m.is_planned and not way.attend(0, m, q, k, k, torch.empty_like(q))
    assert not lane.attend(0, lane.capture(4), q, k, k, torch.empty_like(q))  # before a capture


def test_a_full_pool_fails_the_rows_that_grow(daemon):
    requests = requests_of(daemon.url, "small", n_blocks=6)
    lane = OverLane(requests, requests.client.open_lane(), 2)
    lane.warm(torch.device("cpu"))  # takes two
    layers(requests, lane, [Row("a", 0, 8, 0, True)], 8, 1)
    layers(requests, lane, [Row("b", 0, 15, 0, True)], 15, 2)
    other = requests.pool.open()
    for at in range(LAYERS):
        q, k = np.ones((1, HEADS, DIM), "f4"), np.ones((1, KV_HEADS, DIM), "f4")
        requests.pool.step(at, [(other, 0, 1)], q, k, k)
    outs = layers(requests, lane, [Row("a", 8, 1, 0, True), Row("b", 15, 1, 1, True)], 2, 3)
    assert requests.take_failed() == {"a": 7}
    assert all(out[1].isfinite().all() for out in outs) and requests.held["b"].n_tokens == 16
    other.close()
    layers(requests, lane, [Row("a", 8, 1, 0, True), Row("b", 16, 1, 1, True)], 2, 4)
    assert requests.take_failed() == {"b": 15}
    lane.close()
    requests.close()


def test_a_lane_that_is_over_is_opened_anew(daemon):
    requests = requests_of(daemon.url, "anew")
    lane = OverLane(requests, requests.client.open_lane(), 4)
    lane.warm(torch.device("cpu"))
    layers(requests, lane, [Row("a", 0, 3, 0, False)], 3, 1)
    daemon.restart()
    step = [Row("a", 3, 1, 0, True), Row("b", 0, 1, 1, True)]
    layers(requests, lane, step, 2, 2)
    assert requests.take_failed() == {"a": 0}
    lane._has_captured = True  # its graphs would write to memory that is gone
    daemon.restart()
    with pytest.raises(RuntimeError, match="CUDA graphs were captured"):
        layers(requests, lane, [Row("b", 0, 1, 0, True)], 1, 3)


def n_open(d):
    """Sequences of the daemon."""
    with attnd.connect(d.url) as c:
        return c.stats()["sequences"]


def fail_a_trial(requests, lane):
    """A step whose sequence is closed before its layers run, as where a GPU is far behind its host;
    nobody asks for its tokens."""
    m = lane.plan(requests.step([Row("trial", 0, 2, 0, True)]), 2, 2, True)
    requests.begin(["trial"], (), ())
    q, k = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    with pytest.raises(attnd.NotFoundError, match="a layer of the lane failed"):
        lane.attend(0, m, q, k, k, torch.empty_like(q))  # over a GPU's lane nothing would be raised


def test_a_trial_that_failed_is_not_taken_for_sequences_that_are_lost(daemon, monkeypatch):
    monkeypatch.setattr(Requests, "_without_sequences", lambda *a: pytest.fail("all are open"))
    requests = requests_of(daemon.url, "trial")
    lane = OverLane(requests, requests.client.open_lane(), 4)
    lane.warm(torch.device("cpu"))
    held = layers(requests, lane, [Row("a", 0, 3, 0, True)], 3, 1)
    fail_a_trial(requests, lane)
    outs = layers(requests, lane, [Row("a", 3, 1, 0, True), Row("b", 0, 1, 1, True)], 2, 2)
    assert not requests.take_failed() and all(out.isfinite().all() for out in [*held, *outs])
    assert n_open(daemon) == len("ab") + len(lane._fillers)
    lane.close()
    requests.close()


def test_a_scheduler_that_is_ahead_is_told_of_a_step_that_failed(daemon, monkeypatch):
    """Its tokens are asked for later, when the lane must still know."""
    monkeypatch.setattr(Requests, "_without_sequences", lambda *a: pytest.fail("all are open"))
    requests = requests_of(daemon.url, "ahead", gives_up=False)
    lane = OverLane(requests, requests.client.open_lane(), 4, is_ahead=True)
    lane.warm(torch.device("cpu"))
    fail_a_trial(requests, lane)
    with pytest.raises(RuntimeError, match="a layer of an earlier step has failed"):
        layers(requests, lane, [Row("b", 0, 1, 0, True)], 1, 2)
    with pytest.raises(attnd.NotFoundError, match="a layer of the lane failed"):
        lane.check()
    lane.close()
    requests.close()


@pytest.mark.parametrize("which", ["row", "filler"])
def test_what_a_plan_does_not_find_leaves_no_sequence_behind(daemon, monkeypatch, which):
    """An operator has ended a sequence: a plan fails as a whole, and where it was a row's, all of its
    rows begin anew."""
    monkeypatch.setattr(Requests, "_without_sequences", lambda *a: pytest.fail("all are open"))
    requests = requests_of(daemon.url, "ended")
    lane = OverLane(requests, requests.client.open_lane(), 4)
    lane.warm(torch.device("cpu"))
    layers(requests, lane, [Row("a", 0, 3, 0, True), Row("b", 0, 3, 3, True)], 6, 1)
    seq = requests.held["a"].seq if which == "row" else lane._fillers[0]
    with attnd.connect(daemon.url) as thief:
        thief.pool("ended").adopt(seq.id).close()
    layers(requests, lane, [Row("a", 3, 1, 0, True), Row("c", 0, 1, 1, True)], 4, 2)
    assert requests.take_failed() == ({"a": 0} if which == "row" else {})
    assert set(requests.held) == set("bc" if which == "row" else "abc")
    assert n_open(daemon) == len(requests.held) + len(lane._fillers)
    lane.close()
    requests.close()


def test_an_engine_that_ends_leaves_no_sequence_behind(daemon):
    """Nor does it leave those that have filled its graphs."""
    requests = requests_of(daemon.url, "ends")
    lane = OverLane(requests, requests.client.open_lane(), 6)
    lane.warm(torch.device("cpu"))
    layers(requests, lane, [Row("a", 0, 1, 0, True)], 6, 1)
    with attnd.connect(daemon.url) as other:
        assert other.stats()["sequences"] == 6  # a, and what fills a graph of 6 tokens
        lane.close()
        requests.close()
        assert other.stats()["sequences"] == 0


def test_a_cpu_has_no_lane():
    assert open_lane(None, torch.device("cpu"), None) is None


def test_index_follows_the_rows_that_are_left():
    step = types.SimpleNamespace(rows=[Row("a", 0, 2, 0, True), Row("b", 0, 1, 2, True)])
    m = Metadata(step, 3)
    assert m.index("cpu") is None
    step.rows = step.rows[1:]
    assert m.index("cpu").tolist() == [2]


# ---- versions.py


def common(starts, lens):
    return types.SimpleNamespace(
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens_cpu_upper_bound=torch.tensor(lens),
        num_reqs=len(lens),
    )


def test_rows_of_both_runners():
    """V1 says them by its input batch, V2 by what it prepares; rows behind the requests are padding."""
    want = [Row("x", 6, 1, 0, True), Row("y", 2, 4, 1, False)]
    metadata = common([0, 1, 5, 5, 5], [7, 6, 0, 0])
    v1 = types.SimpleNamespace(
        input_batch=types.SimpleNamespace(req_ids=["x", "y"]),
        requests={n: types.SimpleNamespace(num_tokens=t) for n, t in (("x", 7), ("y", 9))},
    )
    batch = versions.Batch(v1)
    assert not batch.is_v2 and batch.rows(metadata) == want
    prepared = types.SimpleNamespace(req_ids=["x", "y"], prefill_len_np=np.array([7, 9]))
    v2 = types.SimpleNamespace(req_states=object(), prepare_inputs=lambda a, b=None: prepared)
    batch = versions.Batch(v2)
    assert batch.is_v2 and batch.rows(metadata) == []  # a trial
    assert v2.prepare_inputs(1, b=2) is prepared and batch.rows(metadata) == want
    batch.forget()
    assert batch.rows(metadata) == []


def test_blocks_follow_the_scheduler():
    def output(new=(), cached=(), resumed=(), finished=(), preempted=None):
        return types.SimpleNamespace(
            finished_req_ids=set(finished),
            preempted_req_ids=preempted,
            scheduled_new_reqs=[types.SimpleNamespace(req_id=n, block_ids=(b,)) for n, b in new],
            scheduled_cached_reqs=types.SimpleNamespace(
                req_ids=[n for n, _ in cached],
                new_block_ids=[b and (b,) for _, b in cached],
                resumed_req_ids=set(resumed),
            ),
        )

    blocks = versions.Blocks()
    blocks.follow(output(new=[("a", [5]), ("b", [6, 7])]))
    blocks.follow(output(cached=[("a", [9]), ("b", None)]))
    assert [blocks.at("a", t, 4) for t in (0, 3, 4)] == [5, 5, 9] and blocks.at("b", 4, 4) == 7
    blocks.follow(output(finished=["a"], preempted={"b"}))
    assert blocks.at("a", 0, 4) is None and blocks.at("b", 0, 4) is None
    blocks.follow(output(cached=[("b", [3])], resumed=["b"]))
    assert blocks.at("b", 0, 4) == 3


def test_another_vllm_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(versions, "found", lambda: "0.33.0")
    with pytest.raises(RuntimeError, match="knows vLLM 0.25.1 and 0.32.0, this is 0.33.0"):
        versions.check()
    for version in *versions.KNOWN, None:
        monkeypatch.setattr(versions, "found", lambda: version)
        versions.check()
