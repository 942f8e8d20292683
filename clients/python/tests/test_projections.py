"""Pools whose steps carry the heads of a model of latent attention, which the daemon projects to latents and
back: the weights are sent when a step finds none, stay with the cache, and come again after it."""

import asyncio
import hashlib
import os
import signal

import numpy as np
import pytest
from conftest import Daemon, Kept, worker_of
from reference import attention, from_bf16, to_bf16

import attnd
import attnd.aio

HEADS, LATENT, ROPE, NOPE, OUT, LAYERS = 3, 48, 16, 24, 32, 2
LAYER = attnd.LayerSpec(scale=0.1)
SPEC = attnd.PoolSpec(
    "heads",
    LAYERS,
    HEADS,
    1,
    LATENT + ROPE,
    LATENT,
    n_blocks=16,
    layers=(LAYER,),
    is_v_in_k=True,
    q_nope_dim=NOPE,
    out_dim=OUT,
)


def weights_of(layer, seed=7):
    rng = np.random.default_rng(seed + layer)
    return (rng.standard_normal((HEADS, NOPE + OUT, LATENT)) / 4).astype("f4")


def give(pool, seed=7):
    for layer in range(LAYERS):
        pool.weights(layer, weights_of(layer, seed))


def tensors(n, seed=1):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((n, HEADS, NOPE + ROPE)).astype("f4")
    return q, rng.standard_normal((n, 1, LATENT + ROPE)).astype("f4")


def chain(q, k, pos, weights, layer=LAYER):
    """All of it in float64: what the queries q at pos.. get of their heads."""
    w = weights.astype("f8")
    wide = np.einsum("thn,hnc->thc", q[..., :NOPE].astype("f8"), w[:, :NOPE])
    wide = np.concatenate((wide, q[..., NOPE:]), axis=2)
    out, lse = attention(wide, k, k[..., :LATENT], pos, layer)
    return np.einsum("thc,hvc->thv", out, w[:, NOPE:]), lse


def check(result, q, k, pos, weights, layer=LAYER):
    want, lse = chain(q, k, pos, weights, layer)
    assert result.out.shape == (len(q), HEADS, OUT)
    np.testing.assert_allclose(result.out, want, rtol=1e-3, atol=1e-4)
    if result.lse is not None:
        np.testing.assert_allclose(result.lse, lse, rtol=1e-4, atol=1e-4)


def test_heads_go_in_and_come_out(client):
    pool = client.create_pool(SPEC)
    assert (pool.spec.q_nope_dim, pool.spec.out_dim) == (NOPE, OUT)
    give(pool)
    q, k = tensors(40)
    with pool.open() as s:
        for layer in range(LAYERS):
            w = weights_of(layer)
            check(pool.step(layer, [(s, 0, 30)], q[:30], k[:30], lse=True), q[:30], k[:30], 0, w)
            for pos in range(30, 40):
                now = slice(pos, pos + 1)
                check(pool.step(layer, [(s, pos, 1)], q[now], k[now]), q[now], k[: pos + 1], pos, w)
        with s.fork(33) as f:
            more = tensors(2, 5)
            both = pool.step(0, [(s, 39, 1), (f, 33, 1)], more[0], more[1]).out
            keys = np.concatenate((k[:33], more[1][1:]))
            want = chain(more[0][1:], keys, 33, weights_of(0))[0]
            np.testing.assert_allclose(both[1:], want, rtol=1e-3, atol=1e-4)
        started = pool.step_start(1, [(s, 20, 20)], q[20:])
        check(started.wait(), q[20:], k, 20, weights_of(1))


def test_bf16_over_the_wire_windows_trees_and_full(client):
    window = attnd.LayerSpec(scale=0.1, window_tokens=9, sink_tokens=2, sink_logits=(0.5, -1.0, 0.0))
    pool = client.create_pool(
        SPEC._replace(name="heads bf16", q_dtype="bf16", layers=(window, LAYER)), array_dtype="f32"
    )
    for layer in range(LAYERS):
        pool.weights(layer, to_bf16(weights_of(layer)))
    q, k = (from_bf16(to_bf16(x)) for x in tensors(40, 3))
    with pool.open() as s:
        for layer, spec in enumerate((window, LAYER)):
            w = from_bf16(to_bf16(weights_of(layer)))
            out = pool.step(layer, [(s, 0, 40)], q, k).out
            want, _ = chain(q, k, 0, w, spec)
            assert np.linalg.norm(out - want) < 0.02 * np.linalg.norm(want)
        out = pool.step(1, [(s, 20, 20)], q[20:], is_full=True).out
        want, _ = chain(q[20:], k, 20, w, LAYER._replace(is_full=True))
        assert np.linalg.norm(out - want) < 0.02 * np.linalg.norm(want)
        tree = tensors(3, 9)
        out = pool.step(1, [(s, 40, 3)], *tree, parents=[-1, 0, -1]).out
        keys = np.concatenate((k, tree[1][2:]))
        want, _ = chain(tree[0][2:], keys, 40, w)
        assert np.linalg.norm(out[2:] - want) < 0.02 * np.linalg.norm(want)


def test_a_step_in_several_messages_asks_once():
    with Daemon(**{"listen.max_message": "256K"}) as d, attnd.connect(d.url) as c:
        pool = c.create_pool(SPEC._replace(n_blocks=64))
        give(pool)
        q, k = tensors(600)  # 442 KB
        with pool.open() as s:
            out = pool.step(0, [(s, 0, 600)], q, k).out
            for pos in (0, 250, 599):
                want = chain(q[pos : pos + 1], k[: pos + 1], pos, weights_of(0))[0]
                np.testing.assert_allclose(out[pos : pos + 1], want, rtol=1e-3, atol=1e-4)


def test_steps_of_an_event_loop_have_them_sent(daemon):
    q, k = tensors(20)

    async def one(pool, layer):
        async with await pool.open() as s:
            result = await pool.step(layer, [(s, 0, 20)], q, k, lse=True)
            check(result, q, k, 0, weights_of(layer))

    async def main():
        async with attnd.aio.connect(daemon.url) as c:
            pool = await c.create_pool(SPEC._replace(name="loop"))
            async with await pool.open() as s:
                with pytest.raises(attnd.NoWeightsError, match="layer 0 of pool loop has 0 of"):
                    await pool.step(0, [(s, 0, 20)], q, k)
            await asyncio.gather(*(pool.weights(i, weights_of(i)) for i in range(LAYERS)))
            await asyncio.gather(*(one(pool, i % LAYERS) for i in range(6)))

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_step_without_weights_is_refused_and_changes_nothing(client):
    pool = client.create_pool(SPEC._replace(name="none"))
    q, k = tensors(20)
    with pool.open() as s:
        with pytest.raises(attnd.NoWeightsError, match="layer 0 of pool none has 0 of its 32256 bytes"):
            pool.step(0, [(s, 0, 20)], q, k)
        pool.step(0, [(s, 0, 5)], None, k[:5])  # an append needs none
        with pytest.raises(attnd.InvalidArgumentError, match="pos is 20, layer 0 has 5 tokens"):
            pool.step(0, [(s, 20, 1)], None, k[:1])
        give(pool)
        check(pool.step(0, [(s, 5, 15)], q[5:], k[5:]), q[5:], k, 5, weights_of(0))


def test_wrong_weights_and_pools_are_refused_by_name(client):
    pool = client.create_pool(SPEC._replace(name="wrong"))
    w = weights_of(0)
    with pytest.raises(ValueError, match="weights"):
        pool.weights(0, w[:, 1:])
    with pytest.raises(TypeError, match="weights"):
        pool.weights(0, w.astype("f8"))
    with pytest.raises(attnd.InvalidArgumentError, match="layer is 2, the pool has 2 layers"):
        pool.weights(LAYERS, w)
    plain = client.create_pool(SPEC._replace(name="plain", q_nope_dim=0, out_dim=0))
    with pytest.raises(ValueError, match="'plain' has no projections"):
        plain.weights(0, w)
    for change, says in (
        ({"out_dim": 0}, "out_dim is 0, must be 8 to 512"),
        ({"q_nope_dim": 12}, "q_nope_dim is 12, not a multiple of 8"),
        ({"q_nope_dim": 1024}, "q_nope_dim is 1024, must be 8 to 512"),
        ({"is_v_in_k": False}, "q_nope_dim is 24 in a pool without is_v_in_k"),
    ):
        with pytest.raises(attnd.InvalidArgumentError, match=says):
            client.create_pool(SPEC._replace(name="no", **change))
    with pytest.raises(attnd.AlreadyExistsError, match="exists with out_dim 32, asked for 40"):
        client.create_pool(SPEC._replace(name="wrong", out_dim=40))
    q, k = tensors(1)
    with pool.open() as s, pytest.raises(ValueError, match="q has shape"):
        pool.step(0, [(s, 0, 1)], np.zeros((1, HEADS, LATENT + ROPE), "f4"), k)


def test_a_pool_is_as_large_as_its_weights_leave(daemon):
    with Daemon(**{"device.kv_memory": "8M"}) as d, attnd.connect(d.url) as c:
        wide = SPEC._replace(name="wide", num_q_heads=64, head_dim_k=576, head_dim_v=512, n_blocks=0)
        wide = wide._replace(q_nope_dim=64, out_dim=64)  # 33.6 MB of weights
        with pytest.raises(attnd.OutOfMemoryError, match="does not fit beside the pool's weights"):
            c.create_pool(wide)
        with pytest.raises(attnd.OutOfMemoryError, match="n_blocks 1 takes 33"):
            c.create_pool(wide._replace(n_blocks=1))
        small = c.create_pool(wide._replace(num_q_heads=4, num_layers=1))
        assert small.spec.n_blocks == 100  # half of what 1 MiB of weights leaves


def test_weights_count_as_blocks_of_their_tenant(tmp_path):
    token, tenants = tmp_path / "token", tmp_path / "tenants.conf"
    token.write_text("secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    tenants.touch(mode=0o600)
    tenants.write_text(f"[team]\ntoken_sha256 = {digest}\nblocks = 40\n")
    with Daemon(**{"device.kv_memory": "16M", "listen.tenants": tenants}) as d:
        with attnd.connect(d.url, token_file=str(token)) as c:
            first = c.create_pool(SPEC)  # 16 and 8: 64,512 bytes, of 8,192 a block
            says = "weights take as much as 8 blocks, and n_blocks is 16: tenant team has 16 left of its 40"
            with pytest.raises(attnd.OverQuotaError, match=says):
                c.create_pool(SPEC._replace(name="second"))
            with c.create_pool(SPEC._replace(name="third", n_blocks=0)) as third:
                assert third.spec.n_blocks <= 8
            with pytest.raises(attnd.OverQuotaError):
                c.create_pool(SPEC._replace(name="fourth", n_blocks=9))
            plain = SPEC._replace(name="plain", n_blocks=8, q_nope_dim=0, out_dim=0)
            with c.create_pool(plain):  # leaves room for the weights alone
                with pytest.raises(attnd.OverQuotaError, match="8 blocks, and n_blocks is 0: tenant team has 8"):
                    c.create_pool(SPEC._replace(name="sixth", n_blocks=0))
            c.create_pool(SPEC._replace(name="fifth", n_blocks=8))
            give(first)
            q, k = tensors(9)
            with first.open() as s:
                check(first.step(0, [(s, 0, 9)], q, k), q, k, 0, weights_of(0))


def test_a_step_whose_weights_can_not_be_sent_says_why(tmp_path):
    token, tenants = tmp_path / "token", tmp_path / "tenants.conf"
    token.write_text("secret")
    digest = hashlib.sha256(b"secret").hexdigest()
    tenants.touch(mode=0o600)
    tenants.write_text(f"[team]\ntoken_sha256 = {digest}\nbytes_in_flight = 64K\n")
    with Daemon(**{"listen.tenants": tenants}) as d:
        with attnd.connect(d.url, token_file=str(token)) as c:
            pool = c.create_pool(SPEC._replace(out_dim=256))
            pool.weights(0, np.zeros((HEADS, NOPE + 256, LATENT), "f4"))  # 161,280 bytes
            q, k = tensors(2)
            with pool.open() as s:
                with pytest.raises(attnd.OverQuotaError, match="bytes_in_flight"):
                    pool.step(0, [(s, 0, 1)], q[:1], k[:1])
                with pytest.raises(attnd.OverQuotaError, match="bytes_in_flight"):
                    pool.step_start(0, [(s, 0, 1)], q[:1], k[:1]).wait()


def test_a_successor_keeps_weights():
    """Whoever asks: another client of the pool gives none, and is not asked."""
    with Kept(**{"device.kv_memory": "16M"}) as d:
        with attnd.connect(d.url, timeout=60, max_retries=1000) as a:
            pool = a.create_pool(SPEC)
            give(pool)
            q, k = tensors(30)
            s = pool.open()
            for layer in range(LAYERS):
                pool.step(layer, [(s, 0, 20)], q[:20], k[:20])
            for pos in range(20, 24):
                os.kill(worker_of(d.process.pid), signal.SIGKILL)
                now = slice(pos, pos + 1)
                for layer in range(LAYERS):
                    check(
                        pool.step(layer, [(s, pos, 1)], q[now], k[now]),
                        q[now],
                        k[: pos + 1],
                        pos,
                        weights_of(layer),
                    )
            with attnd.connect(d.url, timeout=60, max_retries=1000) as b:
                other = b.create_pool(SPEC)
                with other.open() as t:
                    check(other.step(1, [(t, 0, 9)], q[:9], k[:9]), q[:9], k[:9], 0, weights_of(1))


def test_a_daemon_that_began_empty_is_given_them_again(own_daemon):
    q, k = tensors(20)
    with attnd.connect(own_daemon.url, timeout=60) as c:
        for _ in range(2):
            pool = c.create_pool(SPEC)
            give(pool)
            with pool.open() as s:
                check(pool.step(1, [(s, 0, 20)], q, k), q, k, 0, weights_of(1))
                own_daemon.restart()
                with pytest.raises(attnd.NotFoundError):
                    pool.step(1, [(s, 19, 1)], q[19:])
                c.reopen()


def addresses(*arrays):
    return [x.ctypes.data for x in arrays]


def test_layers_of_a_lane_are_those_of_steps(own_daemon):
    """The first plan sends the weights of its layers; at a daemon that began empty, again."""
    with attnd.connect(own_daemon.url, timeout=60) as c:
        for seed in (7, 8):
            pool = c.create_pool(SPEC._replace(is_batch_invariant=True))
            give(pool, seed)
            q, k = tensors(40)
            with c.open_lane() as lane, pool.open() as a, pool.open() as b:
                assert lane.is_host
                for pos, n in ((0, 30), *((pos, 1) for pos in range(30, 40))):
                    now = slice(pos, pos + n)
                    lane.plan(pool, [(a, pos, n)], lse=True)
                    for layer in range(LAYERS):
                        out = np.full((n, HEADS, OUT), np.nan, "f4")
                        lse = np.full((n, HEADS), np.nan, "f4")
                        at = addresses(q[now], k[now], out, lse)
                        lane.enqueue(pool, n, *at[:2], out=at[2], lse=at[3])
                        want = pool.step(layer, [(b, pos, n)], q[now], k[now], lse=True)
                        check(want, q[now], k[: pos + n], pos, weights_of(layer, seed))
                        assert np.array_equal(out, want.out) and np.array_equal(lse, want.lse)
                    lane.check()
            own_daemon.restart()
            c.reopen()


def test_the_operator_takes_heads(client):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import attnd.torch

    pool = client.create_pool(SPEC._replace(name="operator", is_batch_invariant=True))
    give(pool)
    q, k = tensors(9)
    with client.open_lane() as lane, pool.open() as s:
        attention = attnd.torch.Attention(lane, pool)
        for pos, n in ((0, 6), (6, 3)):
            now = slice(pos, pos + n)
            attention.plan([(s, pos, n)])
            for layer in range(LAYERS):
                got = attention(torch.from_numpy(q[now]), torch.from_numpy(k[now]), None)
                want, _ = chain(q[now], k[: pos + n], pos, weights_of(layer))
                np.testing.assert_allclose(got.numpy(), want, rtol=1e-3, atol=1e-4)
        attention.check()
        attention.plan([(s, 9, 1)])
        with pytest.raises(ValueError, match=rf"q is torch.float32 \(1, {HEADS}, {LATENT + ROPE}\)"):
            attention(torch.zeros(1, HEADS, LATENT + ROPE), torch.zeros(1, 1, LATENT + ROPE), None)


def test_layers_larger_than_the_lane_go_in_pieces(client):
    n, heads, rng = 700, 24, np.random.default_rng(4)
    wide = SPEC._replace(name="pieces", num_q_heads=heads, n_blocks=128, is_batch_invariant=True)
    pool = client.create_pool(wide)
    weights = (rng.standard_normal((heads, NOPE + OUT, LATENT)) / 4).astype("f4")
    for layer in range(LAYERS):
        pool.weights(layer, weights)
    q, k = rng.standard_normal((n, heads, NOPE + ROPE)).astype("f4"), tensors(n)[1]
    with client.open_lane(in_bytes=1, out_bytes=1) as lane, pool.open() as a, pool.open() as b:
        assert q.nbytes > lane.in_bytes
        lane.plan(pool, [(a, 0, n)], lse=True)
        for layer in range(LAYERS):
            out, lse = np.full((n, heads, OUT), np.nan, "f4"), np.full((n, heads), np.nan, "f4")
            at = addresses(q, k, out, lse)
            lane.enqueue(pool, n, *at[:2], out=at[2], lse=at[3])
            want = pool.step(layer, [(b, 0, n)], q, k, lse=True)
            assert np.array_equal(out, want.out) and np.array_equal(lse, want.lse)
        lane.check()


def test_a_plan_names_the_layer_that_has_no_weights(client):
    pool = client.create_pool(SPEC._replace(name="planned"))
    q, k = tensors(2)
    with client.open_lane() as lane, pool.open() as s:
        pool.weights(1, weights_of(1))
        with pytest.raises(attnd.NoWeightsError, match="layer 0 of pool planned has 0 of"):
            lane.plan(pool, [(s, 0, 2)])
        lane.plan(pool, [(s, 0, 2)], layers=[0], is_attend=False)  # an append needs none
        lane.enqueue(pool, 2, k=addresses(k)[0])
        lane.plan(pool, [(s, 0, 2)], layers=[1])
        out = np.full((2, HEADS, OUT), np.nan, "f4")
        at = addresses(q, k, out)
        lane.enqueue(pool, 2, *at[:2], out=at[2])
        np.testing.assert_allclose(out, chain(q, k, 0, weights_of(1))[0], rtol=1e-3, atol=1e-4)
        lane.check()


def cards_of_sequences(operator):
    cards, after = set(), 0
    while True:
        page = operator.inspect("sequences", after)
        cards |= {x["card"] for x in page["sequences"]}
        after = page.get("next", 0)
        if after == 0:
            return cards


def test_all_cards_have_them():
    """Two clients' sequences lie on a card each, where only one of them has given weights."""
    with Daemon(**{"device.kv_memory": "16M", "device.index": "0,1"}) as d:
        with attnd.connect(d.url) as a, attnd.connect(d.url) as b:
            q, k = tensors(40)
            mine, theirs = a.create_pool(SPEC), b.create_pool(SPEC)
            give(mine)
            with mine.open() as s, theirs.open() as t:
                check(mine.step(0, [(s, 0, 40)], q, k), q, k, 0, weights_of(0))
                check(theirs.step(0, [(t, 0, 40)], q, k), q, k, 0, weights_of(0))
                assert cards_of_sequences(a) == {0, 1}
            spec = SPEC._replace(name="by heads", num_q_heads=4, num_kv_heads=2, split="heads")
            with pytest.raises(attnd.UnsupportedError, match="split heads: q_nope_dim is 24, such pools are split"):
                a.create_pool(spec)


@pytest.mark.parametrize("n_cards", [2, 4])
def test_cards_that_have_stripes_of_a_pool_project_their_own(n_cards):
    """Each is given the weights, and has them after a kill. The canary compares every item that it can."""
    cards = ",".join(map(str, range(n_cards)))
    settings = {"device.kv_memory": "16M", "device.index": cards, "stats.canary": 1}
    with Kept(**settings) as d, attnd.connect(d.url, timeout=60, max_retries=1000) as c:
        pool = c.create_pool(SPEC._replace(split="tokens", block_tokens=16 * n_cards))
        q, k = tensors(150)
        with pool.open() as s, pytest.raises(attnd.NoWeightsError, match="layer 1 of pool heads has 0 of"):
            pool.step(1, [(s, 0, 1)], q[:1], k[:1])
        give(pool)
        with pool.open() as s:
            for pos, n in ((0, 70), (70, 65), *((pos, 1) for pos in range(135, 150))):
                now = slice(pos, pos + n)
                for layer in range(LAYERS):
                    result = pool.step(layer, [(s, pos, n)], q[now], k[now], lse=True)
                    check(result, q[now], k[: pos + n], pos, weights_of(layer))
                if pos == 140:
                    os.kill(worker_of(d.process.pid), signal.SIGKILL)
            out = pool.step(0, [(s, 100, 50)], q[100:], is_full=True).out
            want, _ = chain(q[100:], k, 100, weights_of(0), LAYER._replace(is_full=True))
            np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-4)
            with s.fork(99) as f:
                check(pool.step(1, [(f, 99, 5)], q[99:104], k[99:104]), q[99:104], k[:104], 99, weights_of(1))
        stats = c.stats()
        while stats["canary_items_total"] == 0:  # it looks while the daemon is idle
            assert stats["canary_skipped_total"] < 1000
            stats = c.stats()
        assert stats["canary_wrong_total"] == stats["canary_unrepeated_total"] == 0


def test_a_sequence_goes_on_at_a_daemon_with_other_weights_of_the_same_model():
    """They are the pool's, not the sequence's: the target asks for its own."""
    with Daemon() as here, Daemon() as there:
        with attnd.connect(here.url) as a, attnd.connect(there.url) as b:
            pool, target = a.create_pool(SPEC), b.create_pool(SPEC)
            give(pool)
            q, k = tensors(30)
            s = pool.open()
            for layer in range(LAYERS):
                pool.step(layer, [(s, 0, 29)], q[:29], k[:29])
            moved = a.move(s.id, target)
            with pytest.raises(attnd.NoWeightsError):
                target.step(0, [(moved, 29, 1)], q[29:], k[29:])
            give(target)
            check(target.step(0, [(moved, 29, 1)], q[29:], k[29:]), q[29:], k, 29, weights_of(0))
