"""A day of a worker's life in compressed time: long idle times and daemons that are restarted.

A day has 2880 leases of 30 seconds. Here a lease has 50 ms, and forty workers live at once. That leases
pass meanwhile is seen by workers that died: their sessions end. A machine that is too busy to keep forty
sessions so often is given more time: the day begins again with longer leases.
"""

import contextlib
import os
import time

import numpy as np
from conftest import Daemon
from reference import attention, random

import attnd

LEASES = (0.05, 0.2, 0.8)
PATIENCE = 300.0
N_WORKERS, N_HOURS = 40, 24
LEASES_PER_HOUR = 120 // N_WORKERS
RESTART_HOURS = (3, 4, 10, 17, 23)
MOST_LOST = N_WORKERS * (N_HOURS - len(RESTART_HOURS)) // 20
SPEC = attnd.PoolSpec("day", 1, 2, 1, 32, n_blocks=4 * N_WORKERS)


class Worker:
    """A client with one sequence, which it feeds again when it is gone."""

    def __init__(self, url, seed):
        self.rng = np.random.default_rng(seed)
        self.tokens = [np.empty((0, heads, 32), np.float32) for heads in (2, 1, 1)]
        self.client = attnd.connect(url)
        self.n_gone = 0
        self.seq = None

    def work(self):
        """One more token, whose attention is that over all before it."""
        n = len(self.tokens[0])
        new = [random(self.rng, 1, t.shape[1], 32) for t in self.tokens]
        self.tokens = [np.concatenate(pair) for pair in zip(self.tokens, new)]
        while True:
            try:
                if self.seq is None:
                    n, new = 0, self.tokens
                    self.seq = self.client.create_pool(SPEC).open()
                out = self.seq.pool.step(0, [(self.seq, n, len(new[0]))], *new).out
                break
            except attnd.SessionGoneError:
                self.n_gone += 1
                self.seq = None
                self.client.reopen()
        want, _ = attention(self.tokens[0][-1:], *self.tokens[1:], len(self.tokens[0]) - 1)
        np.testing.assert_allclose(out[-1:], want, atol=1e-5)


def leases_expired(url):
    while True:
        with contextlib.suppress(attnd.SessionGoneError), attnd.connect(url) as client:
            return client.stats()["leases_expired_total"]


def wait_for_a_lease(url):
    """Until the daemon has ended the session of a worker that dies now."""
    before = leases_expired(url)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _alive = attnd.connect(url)  # which would say goodbye if it were closed
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    until = time.monotonic() + PATIENCE
    while leases_expired(url) == before:
        assert time.monotonic() < until
        time.sleep(0.02)  # asking without a pause takes the core that the workers need


def sessions_lost_in_a_day(lease):
    """That ended though their workers lived; the day ends early where they are too many."""
    n_restarts = n_expired = 0
    settings = {"engine.lease": f"{lease * 1000:.0f}ms", "device.kv_memory": "16M"}
    with Daemon(**settings) as daemon:
        workers = [Worker(daemon.url, seed) for seed in range(N_WORKERS)]
        for w in workers:
            w.work()
        for hour in range(N_HOURS):
            for _ in range(LEASES_PER_HOUR):
                wait_for_a_lease(daemon.url)
            if hour in RESTART_HOURS:
                n_expired += leases_expired(daemon.url)
                daemon.restart()
                n_restarts += 1
            for w in workers:
                w.work()
            if sum(w.n_gone for w in workers) - N_WORKERS * n_restarts > MOST_LOST:
                break
        n_expired += leases_expired(daemon.url)
        for w in workers:
            assert w.n_gone >= n_restarts
            w.client.close()
    n_lost = sum(w.n_gone for w in workers) - N_WORKERS * n_restarts
    assert n_lost <= n_expired
    return n_lost


def test_workers_live_through_a_day():
    assert any(sessions_lost_in_a_day(lease) <= MOST_LOST for lease in LEASES)
