"""A sequence whose beginning is in another pool: full steps, and their merge with the rest."""

import numpy as np
import pytest
from conftest import Daemon
from reference import attention, random

import attnd

OLD, NEW = 70, 23
SPEC = attnd.PoolSpec("old", 1, 8, 2, 32, n_blocks=32)


def merged(parts):
    """Of (out, lse) over disjoint keys."""
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    weights = np.exp(lses - lses.max(0))
    outs = np.stack([out for out, _ in parts]).astype(np.float64)
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None]


@pytest.fixture(scope="module")
def two_cards():
    with Daemon(**{"device.index": "0,1", "device.kv_memory": "64M"}) as d, attnd.connect(d.url) as c:
        yield c


@pytest.mark.parametrize("split", ["whole", "heads", "tokens"])
def test_a_prompt_sees_all_of_what_is_elsewhere(two_cards, split):
    rng = np.random.default_rng(7)
    q, k, v = random(rng, OLD + NEW, 8, 32), *(random(rng, OLD + NEW, 2, 32) for _ in range(2))
    old = two_cards.create_pool(SPEC._replace(name=f"old-{split}", split=split))
    new = two_cards.create_pool(SPEC._replace(name=f"new-{split}", split=split))
    expected, _ = attention(q[OLD:], k, v, OLD)
    with old.open() as a, new.open() as b:
        old.step(0, [(a, 0, OLD)], None, k[:OLD], v[:OLD])
        rest = new.step(0, [(b, 0, NEW)], q[OLD:], k[OLD:], v[OLD:], lse=True)
        far = old.step(0, [(a, OLD - NEW, NEW)], q[OLD:], lse=True, is_full=True)
        np.testing.assert_allclose(
            merged([(far.out, far.lse), (rest.out, rest.lse)]), expected, rtol=2e-5, atol=2e-6
        )
        # a causal step, which hides what lies behind each query's place there, does not
        causal = old.step(0, [(a, OLD - NEW, NEW)], q[OLD:], lse=True)
        wrong = merged([(causal.out, causal.lse), (rest.out, rest.lse)])
        assert np.abs(wrong - expected).max() > 1e-3


def test_more_queries_than_a_message_holds_all_see_it(two_cards):
    rng = np.random.default_rng(8)
    n, spec = 600, SPEC._replace(name="large", n_blocks=64)
    q, k, v = random(rng, n, 8, 32), *(random(rng, n, 2, 32) for _ in range(2))
    pool = two_cards.create_pool(spec)
    with pool.open() as s:
        pool.step(0, [(s, 0, n)], None, k, v)
        got = pool.step(0, [(s, 0, n)], q, lse=True, is_full=True)
    expected, lse = attention(q, k, v, 0, attnd.LayerSpec(is_full=True))
    np.testing.assert_allclose(got.out, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer, word",
    [
        (attnd.LayerSpec(window_tokens=20), "window_tokens"),
        (attnd.LayerSpec(alibi_slopes=(0.5,) * 8), "alibi_slopes"),
        (attnd.LayerSpec(sink_logits=(0.5,) * 8), "sink_logits"),
        (attnd.LayerSpec(branches=((8, 1), (16, 2))), "branch_rates"),
    ],
)
def test_what_depends_on_positions_is_refused(two_cards, layer, word):
    rng = np.random.default_rng(9)
    q, k, v = random(rng, 4, 8, 32), *(random(rng, 4, 2, 32) for _ in range(2))
    pool = two_cards.create_pool(SPEC._replace(name=word, n_blocks=4, layers=(layer,)))
    with pool.open() as s:
        pool.step(0, [(s, 0, 4)], None, k, v)
        with pytest.raises(attnd.UnsupportedError, match=word):
            pool.step(0, [(s, 0, 4)], q, is_full=True)
        with pytest.raises(attnd.InvalidArgumentError, match="is_full"):
            pool.step(0, [(s, 4, 4)], q, k, v, is_full=True)
        assert np.isfinite(pool.step(0, [(s, 0, 4)], q).out).all()
