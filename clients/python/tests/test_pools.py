"""Pools that are released: their blocks are others' then, and no handle pulls one from under another."""

import os
import threading

import numpy as np
import pytest
from conftest import Daemon
from reference import random

import attnd

SPEC = attnd.PoolSpec("a", 1, 4, 2, 32, n_blocks=64)


@pytest.fixture
def url():
    """Of a daemon that has two pools at most."""
    with Daemon(**{"device.kv_memory": "16M", "cache.max_pools": 2}) as d:
        yield d.url
        assert d.stop() == 0, d.log.read_text()


def has_room(client):
    """Whether one more pool can be made, which is released at once."""
    try:
        client.create_pool(SPEC._replace(name="room")).close()
    except attnd.OverQuotaError:
        return False
    return True


def test_a_closed_pool_makes_way_while_its_client_lives(url):
    with attnd.connect(url) as client:
        kept, pool = client.create_pool(SPEC._replace(name="kept")), client.create_pool(SPEC)
        assert not has_room(client)
        pool.close()
        pool.close()
        assert has_room(client)
        with pytest.raises(attnd.NotFoundError):
            client.pool("a")
        with client.create_pool(SPEC._replace(n_blocks=128)) as larger:  # by the same name
            assert larger.spec.n_blocks == 128
        kept.open().close()


def test_a_client_that_is_closed_lets_its_pools_go(url):
    for name in "abcdef":  # two is the most
        with attnd.connect(url) as client:
            pool = client.create_pool(SPEC._replace(name=name))
            with pool.open():
                pass
    with attnd.connect(url) as client:
        left = client.create_pool(SPEC._replace(name="left")).open()
    with attnd.connect(url) as client:
        assert has_room(client)
        client.create_pool(SPEC)
        assert not has_room(client)  # a sequence is left, until its lease ends
        client.pool("left").adopt(left.id).close()


def test_a_pool_that_nobody_has_is_made_anew_of_another_size(url):
    with attnd.connect(url) as client:
        for n_blocks in 64, 128, 32:
            with client.create_pool(SPEC._replace(n_blocks=n_blocks)) as pool:
                assert pool.spec.n_blocks == n_blocks
                with pytest.raises(attnd.AlreadyExistsError, match=f"n_blocks {n_blocks}, asked for 65"):
                    client.create_pool(SPEC._replace(n_blocks=65))
        with pytest.raises(attnd.AlreadyExistsError, match="identity.model"):
            client.create_pool(SPEC._replace(n_blocks=0, model="another"))


def test_the_last_handle_of_a_client_lets_go(url):
    with attnd.connect(url) as client:
        kept = client.create_pool(SPEC._replace(name="kept"))
        first = client.create_pool(SPEC)
        for late in client.pool("a"), client.create_pool(SPEC):
            first.close()
            assert not has_room(client)
            first = late
        assert not has_room(client)
        first.close()
        assert has_room(client)
        kept.open().close()


def test_each_client_holds_for_itself(url):
    with attnd.connect(url) as client, attnd.connect(url) as other:
        client.create_pool(SPEC._replace(name="kept"))
        mine, others = client.create_pool(SPEC), other.pool("a")
        mine.close()
        assert not has_room(client)
        others.open().close()
        others.close()
        assert has_room(client)


def test_sequences_keep_their_pool_behind_its_handle(url):
    q, k, v = (random(np.random.default_rng(1), 1, n, 32) for n in (4, 2, 2))
    with attnd.connect(url) as client:
        client.create_pool(SPEC._replace(name="kept"))
        pool = client.create_pool(SPEC)
        seq = pool.open()
        pool.step(0, [(seq, 0, 1)], q, k, v)
        pool.close()
        assert not has_room(client)
        again = client.pool("a")
        adopted = again.adopt(seq.id)
        assert adopted.layer_len == (1,)
        again.close()
        with client.pool("a") as last:
            last.adopt(seq.id).close()
        assert has_room(client)


def test_handles_that_come_and_go_in_many_threads_leave_none(url):
    with attnd.connect(url) as client:
        client.create_pool(SPEC._replace(name="kept"))
        failures = []

        def come_and_go():
            try:
                for _ in range(50):
                    with client.create_pool(SPEC) as pool, pool.open():
                        pass
            except Exception as e:
                failures.append(e)

        threads = [threading.Thread(target=come_and_go) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert failures == []
        assert has_room(client)


def test_what_the_session_took_with_it_is_released_already(own_daemon):
    with attnd.connect(own_daemon.url) as client:
        pool = client.create_pool(SPEC)
        own_daemon.restart()
        pool.close()
        old = client
        old.reopen()
        pool = client.create_pool(SPEC)
        client.reopen()
        pool.close()


def test_a_forked_child_lets_go_of_nothing(url):
    with attnd.connect(url) as client:
        client.create_pool(SPEC._replace(name="kept"))
        pool = client.create_pool(SPEC)
        pid = os.fork()
        if pid == 0:
            pool.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not has_room(client)
        pool.open().close()
