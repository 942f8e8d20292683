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


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_operator_writes_where_it_is_told(client, dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    spec = attnd.PoolSpec(
        f"to-{dtype}", 2, HEADS, KV_HEADS, DIM, n_blocks=64, q_dtype=dtype, is_batch_invariant=True
    )
    pool, kind = client.create_pool(spec), {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.manual_seed(4)
    with client.open_lane() as lane, pool.open() as a, pool.open() as b:
        attention = attnd.torch.Attention(lane, pool)
        for pos in range(0, 9, 3):
            attention.plan([(a, pos, 3)])
            for layer in range(2):
                # q, k and v are parts of one tensor, out of a larger one
                qkv = torch.randn(3, HEADS + 2 * KV_HEADS, DIM).to(kind)
                q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
                room = torch.full((7, HEADS, DIM), torch.nan, dtype=kind)
                got = attention(q, k, v, out=room[2:5], layer=layer)
                assert got.data_ptr() == room[2:5].data_ptr()
                want = pool.step(
                    layer, [(b, pos, 3)], q.contiguous(), k.contiguous(), v.contiguous()
                ).out
                assert torch.equal(room[2:5], want)
                assert room[:2].isnan().all() and room[5:].isnan().all()
        attention.check()


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_operator_takes_views(client, dtype):
    """Tokens far apart, heads or elements apart, at odd places, one token for all, and pieces."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    n, kind = 5, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    spec = attnd.PoolSpec(
        f"views-{dtype}", 1, HEADS, KV_HEADS, DIM, n_blocks=2048, q_dtype=dtype, is_batch_invariant=True
    )
    pool = client.create_pool(spec)
    torch.manual_seed(5)
    wide = torch.randn(n, HEADS + 2 * KV_HEADS, DIM).to(kind)
    q = wide[:, :HEADS]
    views = (
        wide[:, HEADS : HEADS + KV_HEADS],
        torch.randn(n, KV_HEADS, 2 * DIM).to(kind)[:, :, ::2],
        torch.randn(KV_HEADS, n, DIM).to(kind).transpose(0, 1),
        torch.randn(n, KV_HEADS * DIM + 1).to(kind)[:, 1:].unflatten(1, (KV_HEADS, DIM)),
        torch.randn(1, KV_HEADS, DIM).to(kind).expand(n, KV_HEADS, DIM),
        torch.randn(2 * n, KV_HEADS, DIM).to(kind)[::2],
    )
    with client.open_lane() as lane, client.open_lane(in_bytes=1, out_bytes=1) as small:
        attention, by_pieces = attnd.torch.Attention(lane, pool), attnd.torch.Attention(small, pool)
        assert views[3].data_ptr() % 16 != 0
        for k in views:
            for v in views:
                with pool.open() as a, pool.open() as b:
                    attention.plan([(a, 0, n)])
                    want = pool.step(0, [(b, 0, n)], *(x.contiguous() for x in (q, k, v))).out
                    assert torch.equal(attention(q, k, v), want)
        attention.check()
        n = 5000 if dtype == "f32" else 10000
        wide = torch.randn(n, HEADS + 2 * KV_HEADS, DIM).to(kind)
        assert wide.nbytes > small.in_bytes
        q, k, v = wide.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        with pool.open() as a, pool.open() as b:
            by_pieces.plan([(b, 0, n)])
            want = by_pieces(*(x.contiguous() for x in (q, k, v)))
            by_pieces.plan([(a, 0, n)])
            assert torch.equal(by_pieces(q, k, v), want)
        by_pieces.check()


def test_the_operator_refuses_what_is_wrong(pool, lane):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    attention = attnd.torch.Attention(lane, pool)
    q, k = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ValueError, match="layer is 0, the plan's next one is none"):
        attention(q, k, k, layer=0)
    with pool.open() as a:
        attention.plan([(a, 0, 2)])
        with pytest.raises(ValueError, match="layer is 1, the plan's next one is 0"):
            attention(q, k, k, out=out, layer=1)
        with pytest.raises(ValueError, match="out is torch.float32 \\(1, 4, 16\\)"):
            attention(q, k, k, out=out[:1], layer=0)
        with pytest.raises(ValueError, match="out has strides"):
            attention(q, k, k, out=torch.empty(2, HEADS, 2 * DIM)[:, :, ::2], layer=0)
        with pytest.raises(ValueError, match="k is torch.float64"):
            attention(q, k.double(), k, out=out, layer=0)
        assert out.isnan().all()  # and the plan is where it was
        for layer in range(LAYERS):
            attention(q, k, k, out=out, layer=layer)
            assert out.isfinite().all()
        with pytest.raises(ValueError, match="the plan's next one is none"):
            attention(q, k, k, out=out, layer=0)
        attention.plan([(a, 2, 2)], layers=[2, 0])
        with pytest.raises(ValueError, match="layer is 0, the plan's next one is 2"):
            attention(q, k, k, layer=0)
        attention.plan([(a, 2, 2)], is_restart=True)
    number = attention._number
    del attention
    with pytest.raises(ValueError, match="no such Attention"):
        torch.ops.attnd.attend(q, k, k, out, -1, number)


def test_the_operator_is_traceable(pool, lane):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    attention = attnd.torch.Attention(lane, pool)
    q, k = torch.randn(2, HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    with pool.open() as a:

        class Planned:
            """opcheck calls the operator as often as it likes: each call is layer 0 again."""

            def enqueue(self, q, k, v, out, layer):
                attention.plan([(a, 0, 2)], is_restart=True)
                attention.enqueue(q, k, v, out, layer)

        planned = Planned()
        attnd.torch._bound[0] = planned
        torch.library.opcheck(torch.ops.attnd.attend.default, (q, k, k, torch.empty_like(q), 0, 0))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # nothing is planned, and nothing runs
        fake = [torch.empty(9, n, DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        assert attention(*fake).shape == (9, HEADS, DIM)
        with pytest.raises(RuntimeError, match="not q's tokens and heads"):
            attention(*fake, out=torch.empty(8, HEADS, DIM))


def test_a_compiled_model_appends_where_nobody_reads(pool, lane):
    """One graph without breaks for steps of any size, which writes to a buffer of the caller's and
    keeps a layer whose output is not used."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    attention = attnd.torch.Attention(lane, pool)

    def layers(x, out):
        attention(x, x[:, :KV_HEADS], x[:, KV_HEADS:], layer=0)
        attention(x + 1, x[:, :KV_HEADS], x[:, KV_HEADS:], out=out, layer=1)
        return attention(out * 2, x[:, :KV_HEADS], x[:, KV_HEADS:], layer=2) + 1

    torch.manual_seed(6)
    run = torch.compile(layers, backend="aot_eager", fullgraph=True, dynamic=True)
    with pool.open() as a, pool.open() as b:
        pos = 0
        for n in 3, 1, 4:
            x, out = torch.randn(n, HEADS, DIM), torch.full((n, HEADS, DIM), torch.nan)
            attention.plan([(a, pos, n)])
            got = run(x, out)
            kv = [x[:, :KV_HEADS].contiguous(), x[:, KV_HEADS:].contiguous()]
            pool.step(0, [(b, pos, n)], x, *kv)
            middle = pool.step(1, [(b, pos, n)], x + 1, *kv).out
            want = pool.step(2, [(b, pos, n)], middle * 2, *kv).out + 1
            assert torch.equal(out, middle)
            assert torch.allclose(got, want, rtol=0, atol=1e-6)
            pos += n  # which a plan refuses where a layer has not so many
        with a.fork() as c:
            assert c.layer_len == (pos,) * LAYERS
    attention.check()


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
