"""Pools whose V is in K, as latent attention (MLA) has it: the client, lanes, and what shares a cache."""

import numpy as np
import pytest
from reference import attention

import attnd

HEADS, LATENT, ROPE = 5, 512, 64
DIM = LATENT + ROPE
LAYER = attnd.LayerSpec(scale=0.05)


def make_pool(client, name, **options):
    options = {"n_blocks": 32, "is_batch_invariant": True, "layers": (LAYER,), **options}
    return client.create_pool(
        attnd.PoolSpec(name, 1, HEADS, 1, DIM, LATENT, is_v_in_k=True, **options)
    )


def tensors(seed, n):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, heads, DIM)).astype("f4") for heads in (HEADS, 1)]


def check(out, q, k, pos):
    want, _ = attention(q, k, k[..., :LATENT], pos, LAYER)
    assert out.shape == (len(q), HEADS, LATENT)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=2e-5)


def test_a_token_is_sent_and_stored_once(client):
    pool = make_pool(client, "latent")
    assert pool.spec.is_v_in_k and pool.spec.head_dim_v == LATENT
    q, k = tensors(1, 40)
    with pool.open() as s:
        check(pool.step(0, [(s, 0, 30)], q[:30], k[:30]).out, q[:30], k[:30], 0)
        for pos in range(30, 40):
            now = slice(pos, pos + 1)
            check(pool.step(0, [(s, pos, 1)], q[now], k[now]).out, q[now], k[: pos + 1], pos)
        again = pool.step(0, [(s, 35, 5)], q[35:]).out
        check(again, q[35:], k, 35)
        with pytest.raises(ValueError, match="v is given, the pool has it in k"):
            pool.step(0, [(s, 40, 1)], q[:1], k[:1], k[:1, :, :LATENT])
        with s.fork() as f:
            assert np.array_equal(pool.step(0, [(f, 35, 5)], q[35:]).out, again)


def test_what_cannot_be_is_named(client):
    for change, says in (
        ({"head_dim_k": 584}, "head_dim_k is 584, must be 8 to 576"),
        ({"head_dim_v": 520}, "head_dim_v is 520, must be 8 to 512"),
        ({"head_dim_k": 256}, "head_dim_v is 512, more than head_dim_k 256 with V in K"),
        ({"is_v_in_k": False}, "head_dim_k is 576, must be 8 to 256"),
    ):
        spec = attnd.PoolSpec("no", 1, HEADS, 1, DIM, LATENT, n_blocks=1, is_v_in_k=True)
        with pytest.raises(attnd.InvalidArgumentError, match=says):
            client.create_pool(spec._replace(**change))


def test_prefixes_files_and_lanes_have_latents(client, tmp_path):
    pool = make_pool(client, "latent shared", kv_dtype="int8")
    plain = make_pool(client, "latent plain")
    q, k = tensors(2, 40)
    ids = list(range(100, 140))
    with pool.open(tokens=ids) as a:
        want = pool.step(0, [(a, 0, 40)], q, k).out
        with pool.open(tokens=ids) as b:
            assert b.n_cached == 32
            out = pool.step(0, [(b, 32, 8)], q[32:], k[32:]).out
            assert np.array_equal(out, want[32:])
        a.export(tmp_path / "a")
        with pytest.raises(attnd.InvalidArgumentError, match="kv_dtype"):
            plain.import_sequence(tmp_path / "a")
    with pool.import_sequence(tmp_path / "a") as c:
        assert np.array_equal(pool.step(0, [(c, 32, 8)], q[32:]).out, want[32:])
    with client.open_lane() as lane, plain.open() as a, plain.open() as b:
        lane.plan(plain, [(a, 0, 40)])
        out = np.full((40, HEADS, LATENT), np.nan, "f4")
        lane.enqueue(plain, 40, q.ctypes.data, k.ctypes.data, out=out.ctypes.data)
        lane.check()
        assert np.array_equal(out, plain.step(0, [(b, 0, 40)], q, k).out)
        check(out, q, k, 0)
