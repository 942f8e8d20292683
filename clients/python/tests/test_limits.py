"""Limits of the daemon: each refusal names its setting as attnd.conf spells it."""

import contextlib
import re
import subprocess

import numpy as np
import pytest
from conftest import BUILD, Daemon
from reference import attention, random

import attnd

HELP = subprocess.run([BUILD / "bin" / "attnd", "--help"], capture_output=True, text=True).stdout
SETTINGS = set(re.findall(r"--([a-z]+\.[a-z_]+)", HELP))
PLAIN = attnd.PoolSpec("limits", 2, 4, 2, 32, n_blocks=64)


@pytest.fixture(scope="module")
def small():
    """A daemon of small limits, a client, and its pool."""
    limits = {
        "device.kv_memory": "2M",
        "cache.max_pools": 2,
        "cache.max_layers": 3,
        "cache.max_sequences": 4,
        "cache.max_seq_tokens": 40,
        "engine.max_step_items": 2,
        "engine.max_step_tokens": 8,
        "engine.max_sessions": 3,
        "listen.max_message": "64K",
    }
    with Daemon(**limits) as daemon, attnd.connect(daemon.url) as client:
        yield daemon, client, client.create_pool(PLAIN)


def tokens(n, dim=32):
    rng = np.random.default_rng(n)
    return [random(rng, n, heads, dim) for heads in (4, 2, 2)]


@contextlib.contextmanager
def refused(error, setting):
    assert setting in SETTINGS
    with pytest.raises(error, match=rf"\b{re.escape(setting)}\b") as e:
        yield
    named = set(re.findall(r"\b(?:device|listen|cache|engine|log)\.[a-z_]+", str(e.value)))
    assert named <= SETTINGS


def test_refusals_name_the_setting(small):
    daemon, client, pool = small
    create = client.create_pool
    with refused(attnd.InvalidArgumentError, "cache.max_layers"):
        create(PLAIN._replace(name="layers", num_layers=4))
    with refused(attnd.OutOfMemoryError, "device.kv_memory"):
        create(PLAIN._replace(name="memory", n_blocks=4096))
    create(PLAIN._replace(name="second", n_blocks=1))
    with refused(attnd.AttndError, "cache.max_pools"):
        create(PLAIN._replace(name="third", n_blocks=1))
    with pool.open() as seq:
        pool.step(0, [(seq, 0, 40)], *tokens(40))
        with refused(attnd.InvalidArgumentError, "cache.max_seq_tokens"):
            pool.step(0, [(seq, 40, 1)], *tokens(1))
    with refused(attnd.OverloadedError, "engine.max_sessions"):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(attnd.connect(daemon.url))
    opened = [pool.open() for _ in range(client.info.max_sequences)]
    with refused(attnd.OverloadedError, "cache.max_sequences"):
        pool.open()
    with refused(attnd.InvalidArgumentError, "engine.max_step_items"):
        pool.step(0, [(s, 0, 1) for s in opened[:3]], *tokens(3))
    for s in opened:
        s.close()


def test_a_prompt_larger_than_a_step_and_a_message_goes_in_pieces(small):
    """Of 40 tokens, each 2 KiB with q, k and v, in steps of 8."""
    _, client, pool = small
    q, k, v = tokens(40)
    n_sent = client.counters().n_sent
    with pool.open() as seq:
        r = pool.step(1, [(seq, 0, 40)], q, k, v, lse=True)
    want, lse = attention(q, k, v, 0)
    np.testing.assert_allclose(r.out, want, atol=1e-5)
    np.testing.assert_allclose(r.lse, lse, atol=1e-5)
    assert client.counters().n_sent >= n_sent + 5


def test_pieces_of_f32_arrays_over_bf16_are_what_the_whole_is():
    spec = PLAIN._replace(name="wide", q_dtype="bf16")
    outs = []
    for limits in {}, {"engine.max_step_tokens": 8}:
        with Daemon(**limits) as daemon, attnd.connect(daemon.url) as client:
            with client.create_pool(spec, array_dtype="f32").open() as seq:
                outs.append(seq.pool.step(0, [(seq, 0, 40)], *tokens(40)).out)
            n_sent = client.counters().n_sent
    assert n_sent >= 5
    np.testing.assert_allclose(*outs, atol=2e-2)
    np.testing.assert_allclose(outs[1], attention(*tokens(40), 0)[0], atol=5e-2)


def test_a_prompt_larger_than_a_clients_shared_memory_goes_in_pieces():
    with Daemon(**{"listen.shm_client": "1M"}) as daemon:
        with attnd.connect(daemon.url) as client, client.create_pool(PLAIN).open() as seq:
            q, k, v = tokens(1000)  # 1 MiB of q, k and v
            r = seq.pool.step(0, [(seq, 0, 1000)], q, k, v)
            np.testing.assert_allclose(r.out, attention(q, k, v, 0)[0], atol=1e-5)


def test_what_is_pinned_is_not_evicted():
    """A pinned prefix stays while others come and go; then "out of blocks" says what is pinned."""
    with Daemon(**{"cache.max_seq_tokens": 512}) as daemon, attnd.connect(daemon.url) as client:
        pool = client.create_pool(PLAIN._replace(n_blocks=8))

        def run(prompt, n=64, **retention):
            with pool.open(tokens=[prompt * 1000 + i for i in range(n)]) as seq:
                if retention:
                    seq.retain(**retention)
                for layer in range(2):
                    pool.step(layer, [(seq, seq.n_cached, n - seq.n_cached)], *tokens(n - seq.n_cached))
                return seq.n_cached

        assert run(1, pinned=True) == 0
        for prompt in range(2, 9):
            run(prompt)
        assert run(1) == 48
        text = subprocess.run(
            [BUILD / "bin" / "attnctl", "--endpoint", daemon.url + ".admin", "cache"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert re.search(r"blocks_pinned\s+4", text) and "next_evicted" in text
        with pytest.raises(attnd.OutOfBlocksError, match="4 are pinned"):
            run(20, 96)
        with pool.open() as seq:
            for wrong in ({"priority": 4}, {"time_to_live": 2**21}):
                with pytest.raises(attnd.InvalidArgumentError, match=next(iter(wrong))):
                    seq.retain(**wrong)
        assert run(1, pinned=False) == 48
        assert run(20, 96) == 0
