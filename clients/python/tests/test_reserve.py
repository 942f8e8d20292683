"""Blocks of a pool that a session sets aside; and pools that are given fewer blocks and more in use."""

import asyncio
import os
import signal
import threading

import numpy as np
import pytest

import attnd
import attnd.aio
from conftest import Daemon, Kept, worker_of
from reference import random

SPEC = attnd.PoolSpec("reserved", 1, 1, 1, 8, block_tokens=8, n_blocks=16)


def append(pool, seq, pos, n):
    """n tokens at pos."""
    k = np.random.default_rng(pos).normal(size=(n, 1, 8)).astype(np.float32)
    pool.step(0, [(seq, pos, n)], k=k, v=k)


@pytest.fixture
def two(daemon):
    with attnd.connect(daemon.url) as a, attnd.connect(daemon.url) as b:
        with a.create_pool(SPEC) as mine, b.create_pool(SPEC) as theirs:
            yield mine, theirs


def test_others_cannot_take_what_is_reserved(two):
    mine, theirs = two
    assert mine.reserve(10) == 16  # 10 of its own, and 6 that nobody has
    assert mine.probe() == (0, 0, 16, 16, 10) and theirs.probe() == (0, 0, 16, 6, 0)
    with theirs.open() as other, mine.open() as own:
        append(theirs, other, 0, 48)
        with pytest.raises(attnd.OutOfBlocksError, match="has 0 free for its session") as e:
            append(theirs, other, 48, 1)
        assert e.value.is_retryable
        for pos in range(0, 80, 8):
            append(mine, own, pos, 8)
        with pytest.raises(attnd.OutOfBlocksError, match="which has reserved 10 and has 10"):
            append(mine, own, 80, 1)
        with pytest.raises(attnd.OutOfBlocksError, match="of its 16 blocks 10 can be reserved"):
            mine.reserve(11)
        assert mine.reserve(0) == 0 and mine.probe().n_reserved_blocks == 0
    assert theirs.probe() == (0, 0, 16, 16, 0)


def test_raised_lowered_and_in_a_session_that_ends(daemon):
    with attnd.connect(daemon.url) as b, b.create_pool(SPEC) as theirs:
        with attnd.connect(daemon.url) as a, a.create_pool(SPEC) as mine:
            for n in 4, 12, 6:
                assert mine.reserve(n) == 16
                assert theirs.probe().n_free_blocks == 16 - n
            with pytest.raises(attnd.OutOfBlocksError):
                theirs.reserve(11)
            assert theirs.reserve(10) == 10
            assert a.stats()["blocks_reserved"] == 16
        assert theirs.reserve(16) == 16  # the other has said goodbye


def test_goodbye_gives_back_what_is_reserved_though_a_sequence_is_left(daemon):
    a = attnd.connect(daemon.url)
    mine = a.create_pool(SPEC)
    seq = mine.open(0x5EED)
    append(mine, seq, 0, 20)
    mine.reserve(16)
    a.close()
    with attnd.connect(daemon.url) as b, b.create_pool(SPEC) as theirs:
        assert theirs.probe().n_free_blocks == 13
        assert theirs.reserve(13) == 13  # 3 are the sequence's
        theirs.adopt(0x5EED).close()
        assert theirs.reserve(16) == 16


def test_a_lease_that_ends_gives_back():
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "1s"}) as d:
        pid = os.fork()
        if pid == 0:
            attnd.connect(d.url).create_pool(SPEC).reserve(16)
            os._exit(0)
        os.waitpid(pid, 0)
        with attnd.connect(d.url) as b, b.create_pool(SPEC) as pool:
            while True:  # the daemon's lease is what ends this
                try:
                    assert pool.reserve(16) == 16
                    return
                except attnd.OutOfBlocksError:
                    pool.client.ping()


def test_a_successor_keeps_reservations():
    with Kept(**{"device.kv_memory": "16M"}) as d:
        with attnd.connect(d.url, timeout=60, max_retries=1000) as a:
            with attnd.connect(d.url, timeout=60, max_retries=1000) as b:
                mine, theirs = a.create_pool(SPEC), b.create_pool(SPEC)
                own, other = mine.open(), theirs.open()
                append(mine, own, 0, 16)
                mine.reserve(10)
                for _ in range(2):
                    os.kill(worker_of(d.process.pid), signal.SIGKILL)
                    assert mine.probe() == (0, 0, 16, 14, 10)
                    assert theirs.probe() == (0, 0, 16, 6, 0)
                append(theirs, other, 0, 48)
                with pytest.raises(attnd.OutOfBlocksError):
                    append(theirs, other, 48, 1)
                append(mine, own, 16, 64)


def test_all_cards_or_none():
    with Daemon(**{"device.kv_memory": "16M", "device.index": "0,1"}) as d:
        with attnd.connect(d.url) as a, attnd.connect(d.url) as b:
            mine, theirs = a.create_pool(SPEC), b.create_pool(SPEC)
            append(theirs, theirs.open(), 0, 40)  # on one of them
            message = "card [01]: .*n_blocks is 12, of its 16 blocks 11 can be reserved"
            with pytest.raises(attnd.OutOfBlocksError, match=message):
                mine.reserve(12)
            assert a.stats()["blocks_reserved"] == 0
            assert mine.reserve(10) in (11, 16)  # of the first card
            assert a.stats()["blocks_reserved"] == 20  # 10 on each card
            split = a.create_pool(SPEC._replace(name="split", num_q_heads=2, num_kv_heads=2, split="heads"))
            assert split.reserve(16) == 16
            assert a.stats()["blocks_reserved"] == 36


def test_asyncio(daemon):
    async def run():
        async with attnd.aio.connect(daemon.url) as c:
            pool = await c.create_pool(SPEC._replace(name="reserved-aio"))
            assert await pool.reserve(5) == 16
            assert (await pool.probe()).n_reserved_blocks == 5

    asyncio.run(run())


# ---- resized

SIZED = attnd.PoolSpec("a", 1, 4, 2, 32, n_blocks=64, is_batch_invariant=True)


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
        calm, pool = client.create_pool(SIZED._replace(name="calm")), client.create_pool(SIZED)
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
        first = client.create_pool(SIZED)
        last = client.create_pool(SIZED._replace(name="last"))
        says = 'n_blocks is 65, pool "a" has room for 64'
        with pytest.raises(attnd.OutOfMemoryError, match=says):
            first.resize(65)
        with pytest.raises(attnd.InvalidArgumentError, match="n_blocks is 0"):
            first.resize(0)
        assert first.spec.n_blocks == 64
        first.resize(40)
        between = client.create_pool(SIZED._replace(name="between", n_blocks=24))
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
        assert client.create_pool(SIZED).spec.n_blocks == 40  # as it was made, and as it is
        assert client.create_pool(SIZED._replace(n_blocks=40)).spec.n_blocks == 40


def test_a_pool_of_a_loop_is_resized(daemon):
    async def main():
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(SIZED._replace(name="aio"))
            await pool.resize(8)
            assert pool.spec.n_blocks == 8

    asyncio.run(asyncio.wait_for(main(), 60))
