"""Lanes at a daemon on the CPU: plain, and as a PyTorch operator. test_hf.py with ATTN_LANE has models."""

import concurrent.futures

import numpy as np
import pytest

import attnd

LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16


@pytest.fixture
def pool(client):
    spec = attnd.PoolSpec(
        "lane",
        num_layers=LAYERS,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_k=DIM,
        n_blocks=64,
        is_batch_invariant=True,
    )
    return client.create_pool(spec)


@pytest.fixture
def lane(client):
    with client.open_lane() as lane:
        assert lane.is_host
        yield lane


def tensors(rng, n):
    shapes = (n, HEADS, DIM), (n, KV_HEADS, DIM), (n, KV_HEADS, DIM)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_layers_of_a_lane_are_those_of_steps(pool, lane):
    rng = np.random.default_rng(1)
    with pool.open() as a, pool.open() as b, pool.open() as c, pool.open() as d:
        lens = [0, 0]
        for _ in range(20):
            n = [int(x) for x in rng.integers(1, 6, 2)]
            lane.plan(pool, [(a, lens[0], n[0]), (b, lens[1], n[1])])
            for layer in range(LAYERS):
                q, k, v = tensors(rng, sum(n))
                out = np.full_like(q, np.nan)
                lane.enqueue(
                    pool, sum(n), q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data
                )
                want = pool.step(layer, [(c, lens[0], n[0]), (d, lens[1], n[1])], q, k, v).out
                assert np.array_equal(out, want)
            lens = [x + y for x, y in zip(lens, n)]
        lane.check()


def test_a_prompt_larger_than_the_lane_is_that_of_a_step(client):
    spec = attnd.PoolSpec(
        "wide", 2, 32, 1, 256, n_blocks=64, block_tokens=8, is_batch_invariant=True
    )
    pool, rng, n = client.create_pool(spec), np.random.default_rng(5), 140
    with client.open_lane(in_bytes=1, out_bytes=1) as lane, pool.open() as a, pool.open() as b:
        lane.plan(pool, [(a, 0, n)], lse=True)
        for layer in range(2):
            q, k, v = (rng.standard_normal((n, h, 256)).astype("f4") for h in (32, 1, 1))
            assert q.nbytes > 2 * lane.in_bytes
            out, lse = np.full_like(q, np.nan), np.full((n, 32), np.nan, "f4")
            lane.enqueue(pool, n, *(x.ctypes.data for x in (q, k, v, out, lse)))
            want = pool.step(layer, [(b, 0, n)], q, k, v, lse=True)
            assert np.array_equal(out, want.out) and np.array_equal(lse, want.lse)
        lane.check()


def test_what_is_wrong_is_told(pool, lane, client):
    with pool.open() as a:
        with pytest.raises(attnd.InvalidArgumentError, match="pos is 3, layer 0 has 0 tokens"):
            lane.plan(pool, [(a, 3, 1)])
        with pytest.raises(attnd.ProtocolError, match="is of no plan"):
            lane.enqueue(pool, 1, *(x.ctypes.data for x in tensors(np.random.default_rng(2), 1)))
        with pytest.raises(attnd.ProtocolError, match="is of no plan"):
            lane.plan(pool, [(a, 0, 1)])
        lane.plan(pool, [(a, 0, 1)], is_restart=True)
    with pytest.raises(attnd.ConnectionLostError, match="nobody"):
        client.open_lane("gpu:///nobody")
    lane.close()
    with pytest.raises(attnd.InvalidArgumentError, match="closed"):
        lane.check()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_operator_is_the_step(pool, lane, is_compiled):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    attention = attnd.torch.Attention(lane, pool)
    torch.manual_seed(3)

    def layers(x):
        for _ in range(LAYERS):
            q, k, v = x, x[:, :KV_HEADS] * 2, x[:, KV_HEADS:] - 1
            x = torch.tanh(attention(q, k, v)) + x
        return x

    run = torch.compile(layers, backend="aot_eager", fullgraph=True) if is_compiled else layers
    with pool.open() as a, pool.open() as b:
        for pos in range(5):
            x = torch.randn(2, HEADS, DIM)
            attention.plan([(a, pos, 1), (b, pos, 1)])
            got = run(x)
            with pool.open() as c, pool.open() as d:  # all of it again, in other sequences
                if pos == 0:
                    want = x
                    for layer in range(LAYERS):
                        q, k, v = want, want[:, :KV_HEADS] * 2, want[:, KV_HEADS:] - 1
                        items = [(c, 0, 1), (d, 0, 1)]
                        out = pool.step(layer, items, q, k.contiguous(), v.contiguous()).out
                        want = torch.tanh(out) + want
                    assert torch.equal(got, want)
        attention.check()
    with pytest.raises(ValueError, match="k is torch.float32 \\(1, 3, 16\\)"):
        attention(x[:1], torch.zeros(1, 3, DIM), x[:1, :KV_HEADS])


def test_a_daemon_that_dies_ends_the_lane(own_daemon):
    with attnd.connect(own_daemon.url, timeout=5) as client:
        lane = client.open_lane()
        own_daemon.restart()
        with pytest.raises(attnd.ConnectionLostError, match="open another"):
            while True:  # until the watcher has seen it
                lane.check()
        lane.close()
        client.open_lane().close()


def test_of_a_models_threads_one_has_the_lane(client):
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
    import attnd.hf
    from hf_models import GREEDY, llama, make, prompts

    model = make(llama)
    inputs = [prompts(model, lengths) for lengths in ((9, 4), (13, 6))]
    wants = [model.generate(**i, **GREEDY) for i in inputs]
    with attnd.hf.attach(model, client, n_blocks=256, lane=True) as worker:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            gots = list(threads.map(lambda i: worker.generate(**i, **GREEDY), inputs * 3))
        assert worker.layers.is_used and worker.spent.n_steps > 0  # and the other one steps
    for got, want in zip(gots, wants * 3):
        assert (got == want).all()
