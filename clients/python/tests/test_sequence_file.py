"""Sequences in files and between daemons, by Python at real daemons."""

import threading
import time

import numpy as np
import pytest
from conftest import Daemon
from reference import random

import attnd

LAYERS = 2
SPEC = attnd.PoolSpec("files", LAYERS, 4, 2, 32, n_blocks=64, is_batch_invariant=True, model="m")


def append(pool, seq, pos, n, seed=0):
    """Tokens pos to pos + n of all layers, a function of layer and position."""
    for layer in range(LAYERS):
        rows = [np.random.default_rng((seed, layer, pos + i)) for i in range(n)]
        k = np.concatenate([random(r, 1, 2, 32) for r in rows])
        v = np.concatenate([random(r, 1, 2, 32) for r in rows])
        pool.step(layer, [(seq, pos, n)], None, k, v)


def looked_at(pool, seq, n):
    q = random(np.random.default_rng(5), 4, 4, 32)
    return np.stack([pool.step(x, [(seq, n - 4, 4)], q).out for x in range(LAYERS)])


@pytest.fixture
def there():
    """Another daemon's pool."""
    with Daemon(**{"device.kv_memory": "16M"}) as d, attnd.connect(d.url) as c:
        yield c.create_pool(SPEC)


@pytest.mark.parametrize("kv_dtype", ["f32", "int8", "fp8_e4m3", "nvfp4", "mxfp4"])
def test_a_sequence_goes_through_a_file(client, there, tmp_path, kv_dtype):
    spec = SPEC._replace(name=kv_dtype, kv_dtype=kv_dtype)
    here, path = client.create_pool(spec), tmp_path / "a.seq"
    there = there.client.create_pool(spec)
    ids = list(range(100, 170))
    with here.open(tokens=ids, adapter=9) as seq:
        append(here, seq, 0, 70)
        file = seq.export(path)
        assert file == attnd.sequence_file(path)
        assert (file.id, file.pool, file.n_tokens, file.n_ids) == (seq.id, kv_dtype, 70, 70)
        assert (file.n_blocks, file.adapter, file.kv_dtype) == (5, 9, kv_dtype)
        assert file.n_bytes == path.stat().st_size
        with there.import_sequence(path) as got:
            assert got.id == seq.id and got.layer_len == (70, 70)
            np.testing.assert_array_equal(looked_at(here, seq, 70), looked_at(there, got, 70))
            append(there, got, 70, 3)
            with there.open(tokens=ids, adapter=9) as more:
                assert more.n_cached == 64
        with pytest.raises(attnd.AlreadyExistsError):
            here.import_sequence(path)
        with here.import_sequence(str(path), 12345) as got:
            assert got.id == 12345


def test_blocks_larger_than_a_message_go_in_pieces(client, tmp_path):
    spec, path = SPEC._replace(name="pieces", block_tokens=64), tmp_path / "a.seq"
    here = client.create_pool(spec)  # blocks of 64 KiB
    with Daemon(**{"device.kv_memory": "16M", "listen.max_message": "64K"}) as d:
        with attnd.connect(d.url) as c, here.open() as seq:
            narrow = c.create_pool(spec)
            append(here, seq, 0, 150)
            expected = looked_at(here, seq, 150)
            seq.export(path)
            got = narrow.import_sequence(path, 1)
            np.testing.assert_array_equal(looked_at(narrow, got, 150), expected)
            got.export(path)
            with here.import_sequence(path, 2) as again:
                np.testing.assert_array_equal(looked_at(here, again, 150), expected)
            with got.move(here) as moved:
                np.testing.assert_array_equal(looked_at(here, moved, 150), expected)


def test_refusals_are_named(client, there, tmp_path):
    here, path = client.create_pool(SPEC), tmp_path / "a.seq"
    with here.open() as seq:
        append(here, seq, 0, 20)
        seq.export(path)
        with pytest.raises(attnd.FileError, match="no/where.*No such file"):
            seq.export(tmp_path / "no" / "where")
    good = path.read_bytes()
    for bad in good[:-1], good[:50], b"", good[:3000] + bytes([good[3000] ^ 1]) + good[3001:]:
        path.write_bytes(bad)
        with pytest.raises(attnd.ProtocolError, match="a.seq"):
            there.import_sequence(path, 7)
    path.write_bytes(good)
    other = client.create_pool(attnd.PoolSpec("x", LAYERS, 4, 2, 32, n_blocks=4, model="other"))
    with pytest.raises(attnd.InvalidArgumentError, match='model is "m" in the file, "other" in'):
        other.import_sequence(path, 7)
    with pytest.raises(attnd.FileError):
        attnd.sequence_file(tmp_path / "nothing")
    with pytest.raises(attnd.SequenceGoneError):
        there.adopt(7)


def test_a_sequence_moves_while_it_decodes(client, there):
    here = client.create_pool(SPEC)
    seq, twin = here.open(), here.open()
    append(here, seq, 0, 300)
    has_decoded, has_moved, moved, n = threading.Event(), threading.Event(), [], 300

    def decode():
        nonlocal n
        pool, s = here, seq
        while n < 420:
            try:
                append(pool, s, n, 1)
            except (attnd.StaleEpochError, attnd.SequenceGoneError):
                assert has_moved.wait(300)
                pool, s = there, moved[0]
                continue  # the same token again: layers that have it write the same
            n += 1
            has_decoded.set()

    worker = threading.Thread(target=decode)
    worker.start()
    assert has_decoded.wait(300)
    moved.append(seq.move(there))
    has_moved.set()
    worker.join()
    assert n == 420 and seq.is_closed
    append(here, twin, 0, 420)
    np.testing.assert_array_equal(looked_at(here, twin, 420), looked_at(there, moved[0], 420))
    moved[0].adopt()
    assert moved[0].layer_len == (420, 420)
    with pytest.raises(attnd.SequenceGoneError):
        here.adopt(seq.id)
    twin.close()
    moved[0].close()


def test_a_drained_daemon_serves_its_sequences_until_they_have_moved(there):
    ids = list(range(100, 170))
    with Daemon(**{"device.kv_memory": "16M"}) as daemon:
        client = attnd.connect(daemon.url)
        here = client.create_pool(SPEC)
        seqs = [here.open(tokens=ids) for _ in range(2)]
        for seed, seq in enumerate(seqs):
            append(here, seq, 0, 70, seed)
        client.drain(hold=600)
        with pytest.raises(attnd.DrainingError):
            here.open()
        with attnd.connect(daemon.url) as operator:  # who moves them may come later
            assert operator.ping() > 0
        for seed, seq in enumerate(seqs):
            assert daemon.process.poll() is None
            append(here, seq, 70, 1, seed)
            before = looked_at(here, seq, 71)
            moved = seq.move(there)
            np.testing.assert_array_equal(looked_at(there, moved, 71), before)
            moved.close()
        assert daemon.process.wait(60) == 0
        client.close()


def test_handles_of_a_retired_sequence_are_stale(own_daemon):
    with attnd.connect(own_daemon.url) as client:
        pool = client.create_pool(SPEC)
        with pool.open() as seq:
            append(pool, seq, 0, 20)
            client.retire(seq.id)
            with pytest.raises(attnd.StaleEpochError):
                append(pool, seq, 20, 1)
            seq.adopt()
            assert seq.layer_len == (20, 20)
            append(pool, seq, 20, 1)
        with pytest.raises(attnd.NotFoundError):
            client.retire(12345)
        with pytest.raises(attnd.InvalidArgumentError, match=r"engine\.fence is 0"):
            client.fence()


def test_appends_are_fenced_without_an_operators_word():
    fence = min(3600, int(time.monotonic() / 2))  # of a clock that may have begun a minute ago
    with (
        Daemon(**{"device.kv_memory": "16M", "engine.fence": f"{fence}s"}) as daemon,
        attnd.connect(daemon.url) as client,
    ):
        pool = client.create_pool(SPEC)
        with pool.open() as seq:
            with pytest.raises(attnd.FencedError, match=r"engine\.fence"):
                pool.step(0, [(seq, 0, 1)], None, *np.ones((2, 1, 2, 32), "f4"), timeout=0.2)
            client.fence(since=time.monotonic() - fence - 1)  # who looked so long ago allows nothing
            with pytest.raises(attnd.FencedError, match=r"engine\.fence"):
                pool.step(0, [(seq, 0, 1)], None, *np.ones((2, 1, 2, 32), "f4"), timeout=0.2)
            client.fence(since=time.monotonic() - fence / 2)
            append(pool, seq, 0, 20)
            client.fence()
            seq.adopt()
            assert seq.layer_len == (20, 20)
