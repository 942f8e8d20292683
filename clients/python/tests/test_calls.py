"""Several requests in one message, and probes."""

import numpy as np
import pytest
from conftest import Daemon

import attnd

SPEC = attnd.PoolSpec("calls", 2, 4, 2, 32, n_blocks=64)


@pytest.fixture(scope="module")
def client():
    with Daemon(**{"device.kv_memory": "16M"}) as d, attnd.connect(d.url) as c:
        yield c


def append(pool, seq, pos, n):
    rng = np.random.default_rng(pos)
    q, k, v = (rng.standard_normal((n, heads, 32), np.float32) for heads in (4, 2, 2))
    for layer in range(2):
        pool.step(layer, [(seq, pos, n)], q, k, v)


def test_each_call_has_its_own_answer(client):
    with client.create_pool(SPEC) as pool:
        calls = pool.calls()
        for i in range(200):  # more than a message holds
            calls.open(1000 + i)
        calls.open(1000)
        assert len(calls) == 201
        *seqs, twice = calls.run()
        assert len(calls) == 0
        assert [s.id for s in seqs] == list(range(1000, 1200))
        assert isinstance(twice, attnd.AlreadyExistsError) and "1000" in twice.message
        append(pool, seqs[0], 0, 20)

        epoch = seqs[0].epoch
        calls.fork(seqs[0], n_tokens=3)
        calls.truncate(seqs[0], 10)
        calls.set_tokens(seqs[0], 0, range(10))
        calls.adopt(seqs[1].id)
        calls.adopt(77)
        fork, cut, told, adopted, gone = calls.run()
        assert fork.layer_len == (3, 3) and fork.id != seqs[0].id
        assert cut is seqs[0] and cut.epoch > epoch
        assert isinstance(told, attnd.StaleEpochError)  # named the epoch before the truncation
        assert adopted.id == 1001 and adopted.layer_len == (0, 0) and adopted.epoch > seqs[1].epoch
        assert isinstance(gone, attnd.NotFoundError)
        append(pool, cut, 10, 2)

        seqs[1] = adopted
        for s in [*seqs, fork, fork]:
            calls.close(s)
        *closed, again = calls.run()
        assert closed == [None] * 201 and all(s.is_closed for s in seqs)
        assert isinstance(again, attnd.NotFoundError)
        assert calls.run() == []


def test_a_probe_finds_what_an_open_finds(client):
    tokens = np.random.default_rng(3).integers(0, 2**32, 50, dtype=np.uint32)
    with client.create_pool(SPEC._replace(name="probed")) as pool:
        assert pool.probe(tokens) == (0, 0, 64, 64, 0)
        with pool.open(tokens=tokens) as seq:
            append(pool, seq, 0, 50)
            assert pool.probe(tokens) == (48, 0, 64, 60, 0)
            assert pool.probe(tokens, adapter=1).cached_tokens == 0
            calls = pool.calls()
            calls.probe(tokens[:33])
            calls.open(tokens=tokens)
            probe, other = calls.run()
            assert probe.cached_tokens == 32 and other.n_cached == 48
            other.close()


def test_calls_that_cannot_be_are_refused(client):
    with client.create_pool(SPEC) as pool:
        calls = pool.calls()
        with pytest.raises(ValueError, match="seq_id"):
            calls.open(-1)
        for token in -1, 1 << 32:
            with pytest.raises(ValueError, match=f"token is {token}, expected 0 to"):
                calls.open(tokens=[5, token])
        for token in 1.5, "a", None, [1]:
            with pytest.raises(TypeError, match="token is .*, expected a whole number"):
                calls.open(tokens=[5, token])
        assert calls.run() == []
    calls = pool.calls()
    calls.probe([1])
    with pytest.raises(attnd.AttndError):
        calls.run()  # the pool is closed
