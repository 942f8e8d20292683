"""Clients, pools and sequences against the real daemon."""

import multiprocessing
import os
import pickle
import re
import threading

import numpy as np
import pytest
from reference import attention, random

import attnd

PLAIN = attnd.PoolSpec("client", 2, 4, 2, 32, n_blocks=64)


@pytest.fixture
def pool(client):
    return client.create_pool(PLAIN)


def tokens(seed, n):
    rng = np.random.default_rng(seed)
    return random(rng, n, 4, 32), random(rng, n, 2, 32), random(rng, n, 2, 32)


def test_a_random_walk_of_ragged_steps_agrees_with_the_reference(client):
    sinks, slopes = (0.5, -0.25, 1.0, 0.0), (0.1, 0.2, 0.05, 0.3)
    layers = [
        attnd.LayerSpec(),
        attnd.LayerSpec(scale=0.3, window_tokens=7, sink_tokens=2, soft_cap=5.0),
        attnd.LayerSpec(window_tokens=5, sink_logits=sinks),
        attnd.LayerSpec(alibi_slopes=slopes),
        attnd.LayerSpec(branches=((4, 1), (12, 2))),
    ]
    spec = attnd.PoolSpec("walk", len(layers), 4, 2, 32, 64, n_blocks=64, layers=layers)
    pool = client.create_pool(spec)
    assert pool.spec.layers[2].sink_logits == pytest.approx(sinks)
    assert pool.spec.layers[4].branches == ((4, 1), (12, 2))
    rng = np.random.default_rng(10)
    seqs = [pool.open() for _ in range(3)]
    cache = {(i, layer): ([], []) for i in range(3) for layer in range(len(layers))}
    lens = [0, 0, 0]
    for _ in range(8):
        counts = [int(rng.integers(1, 6)) for _ in seqs]
        items = pool.items([(s, n, c) for s, n, c in zip(seqs, lens, counts)])
        for layer in range(len(layers)):
            n = sum(counts)
            q, k, v = random(rng, n, 4, 32), random(rng, n, 2, 32), random(rng, n, 2, 64)
            r = pool.step(layer, items, q, k, v, lse=True)
            row = 0
            for i, count in enumerate(counts):
                rows = slice(row, row + count)
                row += count
                keys, values = cache[i, layer]
                keys.extend(k[rows])
                values.extend(v[rows])
                want = attention(q[rows], np.array(keys), np.array(values), lens[i], layers[layer])
                np.testing.assert_allclose(r.out[rows], want[0], atol=2e-5)
                np.testing.assert_allclose(r.lse[rows], want[1], atol=2e-5)
        lens = [n + c for n, c in zip(lens, counts)]
    for s in seqs:
        s.close()


def test_a_dilated_layer_that_cannot_be_is_refused_by_field(client):
    def refusal(**layer):
        spec = attnd.PoolSpec("bad", 1, 4, 2, 32, n_blocks=4, layers=[attnd.LayerSpec(**layer)])
        with pytest.raises(attnd.InvalidArgumentError) as e:
            client.create_pool(spec)
        return str(e.value)

    assert "layers[0].branches[1]" in refusal(branches=[(8, 1), (8, 3)])
    assert "layers[0].branches: none has rate 1" in refusal(branches=[(8, 2)])
    assert "layers[0].window_tokens is 3" in refusal(branches=[(8, 1)], window_tokens=3)
    assert "layers[0].branches: 9 of them" in refusal(branches=[(8, 1)] * 9)
    with pytest.raises(ValueError, match="rate"):
        refusal(branches=[(8, -1)])


def test_append_and_attend_can_be_apart(pool):
    q, k, v = tokens(11, 4)
    with pool.open() as seq:
        assert pool.step(1, [(seq, 0, 4)], k=k, v=v).out is None
        out = pool.step(1, [attnd.Item(seq, 3, 1)], q[3:]).out
    np.testing.assert_allclose(out, attention(q[3:], k, v, 3)[0], atol=1e-5)


def test_fork_truncate_and_adopt(daemon, pool):
    q, k, v = tokens(12, 6)
    with pool.open() as seq:
        for layer in range(2):
            pool.step(layer, [(seq, 0, 5)], q[:5], k[:5], v[:5])
        with seq.fork(n_tokens=3) as fork:
            assert fork.layer_len == (3, 3) and fork.id != seq.id
            out = pool.step(0, [(fork, 3, 1)], q[5:], k[5:], v[5:]).out
            mixed = [np.concatenate([x[:3], x[5:]]) for x in (k, v)]
            np.testing.assert_allclose(out, attention(q[5:], *mixed, 3)[0], atol=1e-5)
        seq.truncate(2)
        out = pool.step(0, [(seq, 2, 1)], q[2:3], k[2:3], v[2:3]).out
        np.testing.assert_allclose(out, attention(q[2:3], k[:3], v[:3], 2)[0], atol=1e-5)

        with attnd.connect(daemon.url) as other:
            theirs = other.pool(PLAIN.name).adopt(seq.id)
            assert theirs.epoch > seq.epoch and theirs.layer_len == (3, 2)
            with pytest.raises(attnd.StaleEpochError):
                pool.step(0, [(seq, 3, 1)], q[3:4], k[3:4], v[3:4])
            seq.adopt()
            assert seq.layer_len == (3, 2)
            with pytest.raises(attnd.StaleEpochError):
                theirs.truncate(1)
        pool.step(0, [(seq, 3, 1)], q[3:4], k[3:4], v[3:4])


def test_each_mistake_has_its_exception(client, pool):
    q, k, v = tokens(13, 1)
    with pytest.raises(attnd.NotFoundError, match="nothing"):
        client.pool("nothing")
    with pytest.raises(attnd.AlreadyExistsError, match="num_layers"):
        client.create_pool(PLAIN._replace(num_layers=3))
    with pytest.raises(attnd.NotFoundError):
        pool.adopt(987654321)
    with pool.open(4711) as seq:
        with pytest.raises(attnd.AlreadyExistsError):
            pool.open(4711)
        with pytest.raises(attnd.InvalidArgumentError, match="pos is 9") as e:
            pool.step(0, [(seq, 9, 1)], q, k, v)
        assert e.value.status == -1 and e.value.result is None
        with pytest.raises(attnd.InvalidArgumentError):
            pool.step(2, [(seq, 0, 1)], q, k, v)
        with pytest.raises(attnd.InvalidArgumentError):
            seq.truncate(5)
    with pytest.raises(attnd.NotFoundError):
        pool.step(0, [(seq, 0, 1)], q, k, v)
    with pytest.raises(attnd.InvalidArgumentError, match="ipc://PATH"):
        attnd.connect("http://example")
    with pytest.raises(ValueError, match="q_dtype"):
        client.create_pool(PLAIN._replace(q_dtype="f64"))
    with pytest.raises(ValueError, match="sink_logits has 1 elements"):
        client.create_pool(PLAIN._replace(layers=[attnd.LayerSpec(sink_logits=[1.0])]))
    with pytest.raises(ValueError, match="timeout"):
        client.ping(timeout=0)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**40, 0.5, "7", None])
def test_numbers_are_refused_before_ctypes_would_cut_them(client, pool, bad):
    q, k, v = tokens(15, 1)
    seq = pool.open()
    pool.step(0, [(seq, 0, 1)], q, k, v)
    wrong = (TypeError, ValueError)

    def named(name):
        return pytest.raises(wrong, match=f"{name}.*{re.escape(repr(bad).strip(chr(39)))}")

    with pytest.raises(wrong):
        pool.step(0, [(seq, bad, 1)], q, k, v)
    with pytest.raises(wrong):
        pool.step(0, [(seq, 1, bad)], q, k, v)
    with named("layer"):
        pool.step(bad, [(seq, 1, 1)], q, k, v)
    with named("n_tokens"):
        seq.truncate(bad)
    for field in ("num_layers", "num_q_heads", "head_dim_k", "block_tokens", "n_blocks"):
        with named(field):
            client.create_pool(PLAIN._replace(**{"name": "bad", field: bad}))
    with named("window_tokens"):
        layers = [attnd.LayerSpec(window_tokens=bad)]
        client.create_pool(PLAIN._replace(name="bad", layers=layers))
    if bad is not None:
        with named("n_tokens"):
            seq.fork(n_tokens=bad)
        for call, name in ((pool.open, "seq_id"), (pool.adopt, "seq_id"), (seq.fork, "new_id")):
            number = 2**64 if bad in (2**32, 2**40) else bad  # ids have 64 bits
            with pytest.raises(wrong, match=name):
                call(number)
    assert pool.adopt(seq.id).layer_len == (1, 0)


def test_texts_are_named(client):
    with pytest.raises(TypeError, match="url is 5"):
        attnd.connect(5)
    with pytest.raises(TypeError, match="name is None"):
        client.pool(None)
    with pytest.raises(TypeError, match="model is 3"):
        client.create_pool(PLAIN._replace(name="bad", model=3))


def test_a_timeout_may_be_infinite(client):
    assert client.ping(timeout=float("inf")) > 0


def test_the_environment_says_where_the_daemon_is(daemon, monkeypatch):
    monkeypatch.setenv("ATTND_ENDPOINT", daemon.url)
    assert attnd.default_url() == daemon.url
    with attnd.connect() as client:
        assert client.url == daemon.url


def test_out_of_blocks_is_told_and_retryable(client):
    pool = client.create_pool(PLAIN._replace(name="tiny", n_blocks=1))
    q, k, v = tokens(14, 17)
    with pool.open() as seq, pytest.raises(attnd.OutOfBlocksError) as e:
        pool.step(0, [(seq, 0, 17)], q, k, v)
    assert e.value.is_retryable


def test_a_step_that_partly_failed_still_gives_the_other_rows(pool):
    q, k, v = tokens(15, 2)
    with pool.open() as good, pool.open() as bad:
        with pytest.raises(attnd.InvalidArgumentError) as e:
            pool.step(0, [(bad, 5, 1), (good, 0, 1)], q, k, v)
    r = e.value.result
    assert r.item_status == (-1, 0)
    assert np.isnan(r.out[0]).all()
    np.testing.assert_allclose(r.out[1:], attention(q[1:], k[1:], v[1:], 0)[0], atol=1e-5)


def test_steps_in_flight_are_waited_for_in_any_order(pool):
    q, k, v = tokens(16, 20)
    with pool.open() as seq:
        steps = []
        for i in range(20):
            row = slice(i, i + 1)
            steps.append(pool.step_start(0, [(seq, i, 1)], q[row], k[row], v[row]))
        for i in reversed(range(20)):
            want = attention(q[i : i + 1], k[: i + 1], v[: i + 1], i)[0]
            np.testing.assert_allclose(steps[i].wait().out, want, atol=1e-5)
        assert steps[3].wait() is steps[3].wait()
        failing = pool.step_start(0, [(seq, 99, 1)], q[:1], k[:1], v[:1])
        for _ in range(2):
            with pytest.raises(attnd.InvalidArgumentError, match="pos is 99"):
                failing.wait()
        # nobody waits for this one; closing the pool does
        pool.step_start(0, [(seq, 20, 1)], q[:1], k[:1], v[:1])


def test_threads_share_a_client(pool):
    failures = []

    def work(seed):
        try:
            q, k, v = tokens(seed, 30)
            with pool.open() as seq:
                for i in range(30):
                    row = slice(i, i + 1)
                    out = pool.step(0, [(seq, i, 1)], q[row], k[row], v[row]).out
                    want = attention(q[row], k[: i + 1], v[: i + 1], i)[0]
                    np.testing.assert_allclose(out, want, atol=1e-5)
        except Exception as e:
            failures.append(e)

    threads = [threading.Thread(target=work, args=(20 + i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_nothing_is_pickled(client, pool):
    q, k, v = tokens(17, 1)
    with pool.open() as seq:
        step = pool.step_start(0, [(seq, 0, 1)], q, k, v)
        for thing in (client, pool, seq, step):
            with pytest.raises(TypeError, match="cannot pickle"):
                pickle.dumps(thing)
        step.wait()


def test_the_child_of_a_fork_cannot_use_the_parents_client(client, pool):
    q, k, v = tokens(18, 1)
    with pool.open() as seq:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for call in (client.ping, pool.open, lambda: pool.step(0, [(seq, 0, 1)], q, k, v)):
                    try:
                        call()
                    except attnd.InvalidArgumentError as e:
                        code = 0 if "before fork" in str(e) else 2
                    else:
                        code = 3
                    if code:
                        break
                pool.close()
                client.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        pool.step(0, [(seq, 0, 1)], q, k, v)  # the parent goes on


def _one_step(url):
    q, k, v = tokens(19, 1)
    with attnd.connect(url) as client, client.create_pool(PLAIN).open() as seq:
        return float(seq.pool.step(0, [(seq, 0, 1)], q, k, v).out.sum())


def test_children_of_multiprocessing_have_clients_of_their_own(daemon, client):
    want = _one_step(daemon.url)
    with multiprocessing.get_context("fork").Pool(2) as children:
        assert children.map(_one_step, [daemon.url] * 4) == [want] * 4
    client.ping()  # the parent's goes on


def test_closed_things_say_so(daemon):
    client = attnd.connect(daemon.url)
    pool = client.create_pool(PLAIN)
    pool.close()
    pool.close()
    with pytest.raises(attnd.InvalidArgumentError, match="pool 'client' is closed"):
        pool.open()
    again = client.pool(PLAIN.name)
    client.close()
    client.close()
    with pytest.raises(attnd.InvalidArgumentError, match="is closed"):
        again.open()
    with pytest.raises(attnd.InvalidArgumentError, match="is closed"):
        client.ping()


def test_a_client_that_is_not_closed_warns(daemon):
    with pytest.warns(ResourceWarning, match="was not closed"):
        client = attnd.connect(daemon.url)
        del client


def test_a_session_is_resumed(daemon):
    q, k, v = tokens(19, 1)
    with attnd.connect(daemon.url) as first:
        seq = first.create_pool(PLAIN).open()
        first.pool(PLAIN.name).step(0, [(seq, 0, 1)], q, k, v)
        session = first.info.session
    with attnd.connect(daemon.url, session=session) as second:
        assert second.info.session == session
        pool = second.pool(PLAIN.name)
        pool.step(0, [(seq, 1, 1)], q, k, v)  # the epoch is still good
    with pytest.raises(attnd.NotFoundError):
        attnd.connect(daemon.url, session=12345)


def test_what_the_daemon_tells(client, pool):
    assert client.info.backend == "cpu" and client.info.max_step_items >= 1
    assert 0 < client.ping() < 10
    stats = client.stats()
    assert isinstance(stats, dict) and any("steps" in key for key in stats)
    assert client.counters().n_sent >= 2 and client.counters().n_in_flight == 0


def test_nobody_listening_is_a_lost_connection():
    with pytest.raises(attnd.ConnectionLostError) as e:
        attnd.connect("ipc:///tmp/attnd-nobody-here", connect_timeout=0.1)
    assert isinstance(e.value, ConnectionError)


def test_a_silent_daemon_ends_calls_by_their_timeouts(own_daemon):
    q, k, v = tokens(21, 1)
    with attnd.connect(own_daemon.url) as client:
        pool = client.create_pool(PLAIN)
        seq = pool.open()
        own_daemon.freeze()
        with pytest.raises(attnd.TimedOutError) as e:
            pool.step(0, [(seq, 0, 1)], q, k, v, timeout=0.1)
        assert isinstance(e.value, TimeoutError) and e.value.is_retryable
        with pytest.raises(attnd.TimedOutError):
            client.ping(timeout=0.1)
        step = pool.step_start(0, [(seq, 0, 1)], q, k, v, timeout=0.1)
        with pytest.raises(attnd.TimedOutError):
            step.wait()
        own_daemon.go_on()
        pool.step(0, [(seq, 0, 1)], q, k, v)  # a repeat is harmless
        assert client.counters().n_timed_out == 3


def test_closing_ends_steps_in_flight_and_waits_for_calls(own_daemon):
    q, k, v = tokens(22, 1)
    client = attnd.connect(own_daemon.url)
    pool = client.create_pool(PLAIN)
    seq = pool.open()
    own_daemon.freeze()
    step = pool.step_start(0, [(seq, 0, 1)], q, k, v, timeout=60)
    waiting, outcome = threading.Event(), []

    def ping():
        waiting.set()
        try:
            client.ping(timeout=0.3)
        except attnd.AttndError as e:
            outcome.append(e)

    thread = threading.Thread(target=ping)
    thread.start()
    waiting.wait()
    while client.counters().n_in_flight < 2 and not outcome:
        os.sched_yield()
    client.close()
    thread.join()
    assert isinstance(outcome[0], attnd.TimedOutError)
    with pytest.raises(attnd.InvalidArgumentError, match="is closed"):
        step.wait()


def test_other_threads_run_while_a_call_waits(own_daemon):
    with attnd.connect(own_daemon.url) as client:
        own_daemon.freeze()
        thread = threading.Thread(target=lambda: pytest.raises(Exception, client.ping, timeout=0.5))
        thread.start()
        n = 0
        while thread.is_alive():
            n += 1
        thread.join()
        assert n > 100  # a held interpreter lock would leave no turn


def test_a_pool_says_how_it_lies_on_cards(client):
    assert client.create_pool(PLAIN._replace(name="lies")).spec.split == "whole"
    assert client.create_pool(PLAIN._replace(name="split", split="heads")).spec.split == "heads"
    with pytest.raises(ValueError, match="split is 'both', expected one of auto, whole"):
        client.create_pool(PLAIN._replace(name="both", split="both"))
