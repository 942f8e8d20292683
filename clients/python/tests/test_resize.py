"""A pool is given fewer blocks and more while threads decode in it: the same bytes come out."""

import asyncio
import threading

import numpy as np
import pytest
from reference import random

import attnd
import attnd.aio

SPEC = attnd.PoolSpec("a", 1, 4, 2, 32, n_blocks=64, is_batch_invariant=True)


def tensors(seed, n):
    rng = np.random.default_rng(seed)
    return [random(rng, n, heads, 32) for heads in (4, 2, 2)]


def decode(pool, seed, n_tokens):
    """What the tokens of a sequence give, one after another."""
    rng = np.random.default_rng(seed)
    with pool.open() as seq:
        outs = []
        for pos in range(n_tokens):
            q, k, v = (random(rng, 1, heads, 32) for heads in (4, 2, 2))
            outs.append(pool.step(0, [(seq, pos, 1)], q, k, v).out.copy())
    return outs


def test_bytes_are_the_same_while_the_pool_is_resized(daemon):
    n_tokens, seeds = 200, range(4)  # 13 blocks each
    with attnd.connect(daemon.url) as client:
        calm, pool = client.create_pool(SPEC._replace(name="calm")), client.create_pool(SPEC)
        want = [decode(calm, seed, n_tokens) for seed in seeds]
        got = {}
        threads = [
            threading.Thread(target=lambda s=s: got.update({s: decode(pool, s, n_tokens)}))
            for s in seeds
        ]
        with pool.open() as before:  # the others' blocks lie behind it, at first
            pool.step(0, [(before, 0, 150)], *tensors(9, 150))
            for t in threads:
                t.start()
        n_resizes = 0
        while any(t.is_alive() for t in threads) or n_resizes == 0:
            for n_blocks in (62, 64, 63):
                pool.resize(n_blocks)
                assert pool.spec.n_blocks == n_blocks
                n_resizes += 1
        for t in threads:
            t.join()
        for seed in seeds:
            for a, b in zip(want[seed], got[seed], strict=True):
                np.testing.assert_array_equal(a, b)
        pool.resize(1)
        assert (pool.spec.n_blocks, pool.n_free_blocks) == (1, 1)


def test_blocks_that_one_pool_gives_up_are_anothers(own_daemon):
    with attnd.connect(own_daemon.url) as client:
        first = client.create_pool(SPEC)
        last = client.create_pool(SPEC._replace(name="last"))
        says = 'n_blocks is 65, pool "a" has room for 64'
        with pytest.raises(attnd.OutOfMemoryError, match=says):
            first.resize(65)
        with pytest.raises(attnd.InvalidArgumentError, match="n_blocks is 0"):
            first.resize(0)
        assert first.spec.n_blocks == 64
        first.resize(40)
        between = client.create_pool(SPEC._replace(name="between", n_blocks=24))
        with pytest.raises(attnd.OutOfMemoryError, match="has room for 40"):
            first.resize(64)
        between.resize(20)
        assert between.spec.n_blocks == 20
        last.resize(100)
        seq = last.open()
        n = 64 * 16 + 5
        last.step(0, [(seq, 0, n)], *tensors(1, n))
        with pytest.raises(attnd.OutOfBlocksError, match="n_blocks is 64, 65 blocks are in use"):
            last.resize(64)
        assert client.create_pool(SPEC).spec.n_blocks == 40  # as it was made, and as it is
        assert client.create_pool(SPEC._replace(n_blocks=40)).spec.n_blocks == 40


def test_a_pool_of_a_loop_is_resized(daemon):
    async def main():
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(SPEC._replace(name="aio"))
            await pool.resize(8)
            assert pool.spec.n_blocks == 8

    asyncio.run(asyncio.wait_for(main(), 60))
