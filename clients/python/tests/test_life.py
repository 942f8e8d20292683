"""Sessions, pools and sequences that are gone, daemons that are restarted, and Ctrl-C."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from reference import random

import attnd

PLAIN = attnd.PoolSpec("life", 2, 4, 2, 32, n_blocks=64)


def tokens(seed, n):
    rng = np.random.default_rng(seed)
    return random(rng, n, 4, 32), random(rng, n, 2, 32), random(rng, n, 2, 32)


def test_what_is_gone_has_an_exception_of_its_own(own_daemon):
    q, k, v = tokens(1, 1)
    with attnd.connect(own_daemon.url) as client:
        pool = client.create_pool(PLAIN)
        seq = pool.open()
        with attnd.connect(own_daemon.url) as other:
            other.pool(PLAIN.name).adopt(seq.id).close()
        for call in (
            lambda: pool.step(0, [(seq, 0, 1)], q, k, v),
            lambda: pool.step_start(0, [(seq, 0, 1)], q, k, v).wait(),
            lambda: seq.fork(),
            lambda: pool.adopt(99),
        ):
            with pytest.raises(attnd.SequenceGoneError) as e:
                call()
            assert isinstance(e.value, attnd.NotFoundError) and not e.value.is_retryable

        seq = pool.open()
        own_daemon.restart()
        for call in (
            lambda: pool.step(0, [(seq, 0, 1)], q, k, v),
            lambda: pool.step_start(0, [(seq, 0, 1)], q, k, v).wait(),
            lambda: pool.open(),
            lambda: client.create_pool(PLAIN),
        ):
            with pytest.raises(attnd.SessionGoneError) as e:
                call()
            assert not e.value.is_retryable

        session = client.info.session
        client.reopen()
        assert client.info.session != session
        with pytest.raises(attnd.PoolGoneError):
            pool.open()
        seq.close()  # gone with its session: nothing is left to close
        pool = client.create_pool(PLAIN)
        with pool.open() as seq:
            pool.step(0, [(seq, 0, 1)], q, k, v)


def test_memory_for_a_pool_is_not_worth_waiting_for(client):
    """Pools stay until the daemon ends."""
    with pytest.raises(attnd.OutOfMemoryError, match="until the daemon ends") as e:
        client.create_pool(PLAIN._replace(name="huge", n_blocks=2**20))
    assert not e.value.is_retryable
    assert attnd.OutOfMemoryError("host memory").is_retryable


WAITING = """
import os, signal, sys, threading, time
import numpy as np
import attnd

url, pid, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
client = attnd.connect(url)
pool = client.create_pool(attnd.PoolSpec("life", 2, 4, 2, 32, n_blocks=64))
seq = pool.open()
q = np.zeros((1, 4, 32), np.float32)
k = v = np.zeros((1, 2, 32), np.float32)
step = pool.step_start(0, [(seq, 0, 1)], q, k, v, timeout=600)
step.wait()
os.kill(pid, signal.SIGSTOP)

def interrupt():
    while client.counters().n_in_flight == 0:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    if what == "step":
        pool.step(0, [(seq, 1, 1)], q, k, v, timeout=600)
    elif what == "wait":
        pool.step_start(0, [(seq, 1, 1)], q, k, v, timeout=600).wait()
    else:
        pool.step_start(0, [(seq, 1, 1)], q, k, v, timeout=600)
        client.poll(600)
except KeyboardInterrupt:
    client.close()
    print("interrupted")
"""


@pytest.mark.parametrize("what", ["step", "wait", "poll"])
def test_ctrl_c_ends_a_call_that_waits(own_daemon, python_env, what):
    pid = own_daemon.process.pid
    try:
        r = subprocess.run(
            [sys.executable, "-c", WAITING, own_daemon.url, str(pid), what],
            env=python_env,
            capture_output=True,
            text=True,
            timeout=200,  # of 600 seconds that the calls would wait
        )
    finally:
        own_daemon.go_on()
    assert r.stdout.strip() == "interrupted", r.stderr


CONNECTING = """
import os, signal, socket, sys, threading
import attnd

path = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(path)
listener.listen()

def interrupt():
    peers.append(listener.accept())  # the client waits for an answer
    os.kill(os.getpid(), signal.SIGINT)

peers = []
threading.Thread(target=interrupt, daemon=True).start()
try:
    attnd.connect("ipc://" + path, connect_timeout=600)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_connect(python_env, tmp_path):
    r = subprocess.run(
        [sys.executable, "-c", CONNECTING, str(tmp_path / "s")],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert r.stdout.strip() == "interrupted", r.stderr


def test_steps_of_the_main_thread_end_while_another_thread_waits(client):
    """Whichever of them reads the answers."""
    q, k, v = tokens(2, 1)
    pool = client.create_pool(PLAIN)
    stop = threading.Event()

    def others():
        with pool.open() as seq:
            n = 0
            while not stop.is_set():
                pool.step(0, [(seq, n, 1)], q, k, v)
                n = n + 1 if n < 100 else 0
                if n == 0:
                    seq.truncate(0)

    thread = threading.Thread(target=others)
    thread.start()
    try:
        with pool.open() as seq:
            want = None
            for n in range(50):
                r = pool.step(0, [(seq, n, 1)], q, k, v)
                want = r.out if want is None else want
                np.testing.assert_allclose(r.out, want, atol=1e-5)  # the same v at every position
    finally:
        stop.set()
        thread.join()
