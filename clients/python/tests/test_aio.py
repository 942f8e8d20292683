"""attnd.aio against the real daemon."""

import asyncio
import inspect

import numpy as np
import pytest
from reference import attention, random

import attnd
import attnd.aio

PLAIN = attnd.PoolSpec("aio", 1, 4, 2, 32, n_blocks=64)


def tokens(seed, n):
    rng = np.random.default_rng(seed)
    return random(rng, n, 4, 32), random(rng, n, 2, 32), random(rng, n, 2, 32)


def run(main, *args):
    asyncio.run(asyncio.wait_for(main(*args), 60))


def test_many_steps_are_in_flight_at_once(daemon):
    async def one(pool, seed):
        q, k, v = tokens(seed, 12)
        async with await pool.open() as seq:
            starts = [
                pool.step(0, [(seq, i, 1)], *(x[i : i + 1] for x in (q, k, v))) for i in range(12)
            ]
            for i, r in enumerate(await asyncio.gather(*starts)):
                want = attention(q[i : i + 1], k[: i + 1], v[: i + 1], i)[0]
                np.testing.assert_allclose(r.out, want, atol=1e-5)

    async def main():
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            await asyncio.gather(*(one(pool, 30 + i) for i in range(6)))
            assert client.counters().n_in_flight == 0

    run(main)


def test_sequences_fork_truncate_and_are_adopted(daemon):
    async def main():
        q, k, v = tokens(40, 4)
        client = await attnd.aio.connect(daemon.url)
        pool = await client.create_pool(PLAIN)
        seq = await pool.open()
        await pool.step(0, [(seq, 0, 4)], q, k, v)
        fork = await seq.fork(n_tokens=2)
        assert fork.layer_len == (2,)
        await fork.truncate(1)
        await fork.close()
        theirs = await pool.adopt(seq.id)
        assert theirs.epoch > seq.epoch and theirs.layer_len == (4,)
        await client.ping()
        assert await client.stats()
        await client.close()
        await client.close()
        assert client.is_closed

    run(main)


def test_calls_go_in_one_message(daemon):
    async def main():
        async with await attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            calls = pool.calls()
            calls.open(tokens=[1, 2, 3])
            calls.open()
            calls.adopt(77)
            a, b, gone = await calls.run()
            assert isinstance(a, attnd.aio.Sequence) and isinstance(gone, attnd.NotFoundError)
            calls.set_tokens(b, 0, [4])
            calls.fork(a, n_tokens=0)
            calls.truncate(b, 0)
            calls.probe([1, 2])
            _, fork, cut, probe = await calls.run()
            assert cut.epoch == b.epoch and probe.cached_tokens == 0
            assert (await pool.probe()).n_blocks == probe.n_blocks
            for s in (a, b, fork):
                calls.close(s)
            assert await calls.run() == [None] * 3

    run(main)


# What blocks by its nature: what an event loop has instead is in aio's own docstring.
BLOCKING = {
    "Client": {"fileno", "open_lane", "poll", "poll_once"},
    "Pool": {"step_start"},
    "Sequence": set(),
    "Calls": set(),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_there_is_every_method_of_the_blocking_classes(name):
    blocking, awaited = getattr(attnd, name), getattr(attnd.aio, name)
    public = {n for n in dir(blocking) if not n.startswith("_")} - BLOCKING[name]
    assert public - set(dir(awaited)) == set()
    for n in public:
        if callable(getattr(blocking, n)):
            of, here = (inspect.signature(getattr(c, n)).parameters for c in (blocking, awaited))
            assert (n, list(here)) == (n, list(of))


def test_a_sequence_goes_through_its_life(daemon, own_daemon, tmp_path):
    async def main():
        q, k, v = tokens(46, 32)
        client, far = await attnd.aio.connect(daemon.url), await attnd.aio.connect(own_daemon.url)
        async with client, far:
            async with await client.create_pool(PLAIN) as pool:
                free = pool.n_free_blocks
                seq = await pool.open(tokens=range(800, 816), adapter=7)
                await pool.step(0, [(seq, 0, 32)], q, k, v)
                await seq.set_tokens(16, range(816, 832))
                await seq.retain(priority=2)
                async with await pool.open(tokens=range(800, 832), adapter=7) as again:
                    assert again.n_cached == 16
                await seq.set_note(b"request 7")
                with pytest.raises(attnd.InvalidArgumentError, match="note has 4097 bytes"):
                    await seq.set_note(bytes(4097))
                listed = (await client.inspect("sequences"))["sequences"]
                assert {s["sequence"]: s["note"] for s in listed}[str(seq.id)] == "request 7"
                written = await seq.export(tmp_path / "seq")
                assert (written.n_tokens, written.n_ids, written.adapter) == (32, 32, 7)
                async with await pool.import_sequence(tmp_path / "seq", 99) as copy:
                    assert copy.layer_len == (32,) and copy.id == 99
                assert copy.is_closed
                async with await far.create_pool(PLAIN) as there:
                    async with await seq.move(there) as moved:
                        assert seq.is_closed and moved.pool is there and moved.id == seq.id
                        r = await there.step(0, [(moved, 31, 1)], q[31:], k[31:], v[31:])
                        np.testing.assert_allclose(r.out, attention(q[31:], k, v, 31)[0], atol=1e-5)
                        assert await far.locate(seq.id) == attnd.Place("", seq.id, moved.sync.epoch)
                        assert await far.note(seq.id) == b"request 7"
                        at = await client.locate(seq.id, seq.sync.epoch)
                        assert at == attnd.Place(far.url, seq.id, moved.sync.epoch)
                        with pytest.raises(attnd.MovedError, match=far.url):
                            await pool.adopt(seq.id)
                        with pytest.raises(attnd.SequenceGoneError):
                            await client.locate(12345)
                    other = await pool.open()
                    async with await client.move(other.id, there) as moved:  # without its handle
                        assert moved.pool is there and moved.id == other.id
                assert pool.n_free_blocks == free
            with pytest.raises(attnd.InvalidArgumentError, match="is closed"):
                await pool.open()

    run(main)


def test_a_client_is_reopened(own_daemon):
    async def main():
        async with attnd.aio.connect(own_daemon.url) as client:
            before = client.info.session
            await client.create_pool(PLAIN)
            await client.reopen()
            assert client.info.session != before
            async with await client.create_pool(PLAIN) as pool, await pool.open():
                pass

    run(main)


def test_arguments_are_those_of_the_blocking_calls(daemon):
    for name in ("open", "adopt", "resize"):
        of = inspect.signature(getattr(attnd.Pool, name))
        assert inspect.signature(getattr(attnd.aio.Pool, name)) == of

    async def main():
        q, k, v = tokens(45, 32)
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            async with await pool.open(tokens=range(700, 732)) as seq:
                await pool.step(0, [(seq, 0, 32)], q, k, v)
            async with await pool.open(tokens=range(700, 732)) as seq:
                assert seq.sync.n_cached == 16

    run(main)


def test_failures_are_raised_where_they_are_awaited(daemon):
    async def main():
        q, k, v = tokens(41, 1)
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            async with await pool.open() as seq:
                with pytest.raises(attnd.InvalidArgumentError, match="pos is 7"):
                    await pool.step(0, [(seq, 7, 1)], q, k, v)
                with pytest.raises(TypeError, match="q has dtype"):
                    await pool.step(0, [(seq, 0, 1)], q.astype(float), k, v)
            with pytest.raises(attnd.NotFoundError):
                await client.pool("nothing")

    run(main)


def test_deadlines_are_kept_while_the_daemon_is_silent(own_daemon):
    async def main():
        q, k, v = tokens(42, 1)
        async with attnd.aio.connect(own_daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            seq = await pool.open()
            own_daemon.freeze()
            with pytest.raises(attnd.TimedOutError):
                await pool.step(0, [(seq, 0, 1)], q, k, v, timeout=0.1)
            own_daemon.go_on()
            await pool.step(0, [(seq, 0, 1)], q, k, v)

    run(main)


def test_closing_ends_steps_in_flight(own_daemon):
    async def main():
        q, k, v = tokens(43, 1)
        client = await attnd.aio.connect(own_daemon.url)
        pool = await client.create_pool(PLAIN)
        seq = await pool.open()
        own_daemon.freeze()
        step = asyncio.ensure_future(pool.step(0, [(seq, 0, 1)], q, k, v, timeout=60))
        while client.counters().n_in_flight == 0:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(attnd.ConnectionLostError):
            await step

    run(main)


def test_a_cancelled_wait_leaves_the_client_usable(daemon):
    async def main():
        q, k, v = tokens(44, 2)
        async with attnd.aio.connect(daemon.url) as client:
            pool = await client.create_pool(PLAIN)
            async with await pool.open() as seq:
                step = asyncio.ensure_future(pool.step(0, [(seq, 0, 1)], q[:1], k[:1], v[:1]))
                while client.counters().n_sent < 4 and not step.done():
                    await asyncio.sleep(0)
                step.cancel()
                r = await pool.step(0, [(seq, 0, 2)], q, k, v)
                np.testing.assert_allclose(r.out, attention(q, k, v, 0)[0], atol=1e-5)

    run(main)
