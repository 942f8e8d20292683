"""Sessions, pools and sequences that are gone, daemons that are restarted, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import threading
import time

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
    """Pools stay while a session has them."""
    with pytest.raises(attnd.OutOfMemoryError, match="while a session has them") as e:
        client.create_pool(PLAIN._replace(name="huge", n_blocks=2**20))
    assert not e.value.is_retryable
    assert attnd.OutOfMemoryError("host memory").is_retryable


WAITING = """
import os, signal, sys, threading, time
import numpy as np
import attnd

url, *calls = sys.argv[1:]
client = attnd.connect(url)
pool = client.create_pool(attnd.PoolSpec("life", 2, 4, 2, 32, n_blocks=64))
seq = pool.open()
q = np.zeros((1, 4, 32), np.float32)
k = v = np.zeros((1, 2, 32), np.float32)
step = pool.step_start(0, [(seq, 0, 1)], q, k, v, timeout=600)
step.wait()
print("ready", flush=True)
sys.stdin.readline()  # the daemon stands still

def interrupt(n_in_flight):  # once it waits; a call that takes another's place is not seen to
    until = time.monotonic() + 5
    while client.counters().n_in_flight == n_in_flight and time.monotonic() < until:
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGINT)

for call in calls:
    thread = threading.Thread(target=interrupt, args=[client.counters().n_in_flight])
    thread.start()
    try:
        eval(call)
    except KeyboardInterrupt:
        print(call)
    thread.join()
client.close()
"""
STEP = "(0, [(seq, 1, 1)], q, k, v, timeout=600)"


@pytest.mark.parametrize(
    "calls",
    [
        ["pool.step" + STEP],
        [f"pool.step_start{STEP}.wait()"],
        [f"pool.step_start{STEP} and client.poll(600)"],
        [
            "client.ping(timeout=600)",
            "client.reopen(timeout=600)",
            "client.create_pool(pool.spec, timeout=600)",
            "client.pool('life', timeout=600)",
            "client.stats(timeout=600)",
            "client.drain(timeout=600)",
            "pool.open(timeout=600)",
            "pool.adopt(3, timeout=600)",
            "seq.fork(timeout=600)",
            "seq.adopt(timeout=600)",
            "seq.truncate(0, timeout=600)",
            "seq.close(timeout=600)",
        ],
    ],
    ids=["step", "wait", "poll", "others"],
)
def test_ctrl_c_ends_a_call_that_waits(own_daemon, python_env, calls):
    """And closing the client afterwards waits for none of them."""
    command = [sys.executable, "-c", WAITING, own_daemon.url, *calls]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=python_env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as worker:
        try:
            assert worker.stdout.readline() == "ready\n", worker.stderr.read()
            own_daemon.freeze()
            # of 600 seconds that the calls would wait
            said, errors = worker.communicate("\n", timeout=200)
        finally:
            worker.kill()
            own_daemon.go_on()
    assert said.splitlines() == calls, errors


def test_what_an_interrupted_call_made_is_closed_when_its_answer_comes(own_daemon):
    with attnd.connect(own_daemon.url) as client:
        pool = client.create_pool(PLAIN)
        own_daemon.freeze()
        n_sent = client.counters().n_sent

        def interrupt():
            while client.counters().n_sent == n_sent:
                pass
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                pool.open(7)
        finally:
            thread.join()
            own_daemon.go_on()
        while client.counters().n_in_flight > 0 or client.counters().n_sent == n_sent + 1:
            pass  # the open, then its close
        with pytest.raises(attnd.SequenceGoneError):
            pool.adopt(7)


@pytest.mark.parametrize("moment", ("before", "after"))
def test_an_interrupt_while_a_call_is_handed_over_leaves_nothing(client, monkeypatch, moment):
    """Before the helper's thread has it, and before its caller waits for it."""
    pool = client.create_pool(PLAIN)
    n_sent = client.counters().n_sent
    run_beside = attnd._handle.run_beside

    def interrupted(run):
        monkeypatch.undo()
        if moment == "after":
            run_beside(run)
            while client.counters().n_sent == n_sent:
                os.sched_yield()
        raise KeyboardInterrupt

    monkeypatch.setattr(attnd._handle, "run_beside", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.open(8)
    until = time.monotonic() + 60
    while moment == "after" and time.monotonic() < until:  # the open, then its close
        counters = client.counters()
        if counters.n_in_flight == 0 and counters.n_sent > n_sent + 1:
            break
    with pytest.raises(attnd.SequenceGoneError):
        pool.adopt(8)
    closing = threading.Thread(target=pool.close, daemon=True)  # waits for calls that are inside
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


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
