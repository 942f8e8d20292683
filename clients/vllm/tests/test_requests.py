"""attnd.serving.requests against a daemon, under a small engine that schedules as vLLM does: chunks, preemption,
rejected drafts, prefixes; a pool that two engines share and that is too small; a daemon that begins
anew. Texts must be those that a float64 model writes alone.
"""

import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/tests")]

from conftest import Daemon  # noqa: E402
from toy_model import (  # noqa: E402
    BLOCK, DIM, LAYERS, Q_HEADS, VOCABULARY, prompts, qkv, spec_of, text_of, token_of,
)

import attnd  # noqa: E402
from attnd.serving import requests as of_requests  # noqa: E402
from attnd.serving.requests import Opened, Requests, Row, Told  # noqa: E402

class Request:
    def __init__(self, name, prompt, n, salt):
        self.name, self.ids, self.n_prompt, self.n, self.salt = name, list(prompt), len(prompt), n, salt
        self.n_computed, self.n_told, self.is_running = 0, 0, False

    @property
    def text(self):
        return self.ids[self.n_prompt:]


class Engine:
    """vLLM's scheduler in small: what it has computed is what it believes, not what attnd has."""

    def __init__(self, url, spec, n_blocks=1 << 20, seed=0, shares=True, n_reserved=0):
        self.requests = Requests(
            attnd.connect(url, timeout=60), lambda c: c.create_pool(spec), n_reserved
        )
        self.queue, self.running, self.done = [], [], []
        self.n_blocks, self.shares = n_blocks, shares
        self.rng = np.random.default_rng(seed)
        self.ended, self.told = set(), []
        self.found = {}  # of each request, tokens in the cache
        self.between = lambda: None
        self.n_preempted = self.n_shared = self.n_failed = self.n_rejected = 0

    def add(self, name, prompt, n, salt=0):
        self.queue.append(Request(name, prompt, n, salt))

    def _blocks(self, r, n=0):
        return -(-(r.n_computed + n) // BLOCK)

    def _tell(self, r, n_computed=None):
        n = (len(r.ids) if n_computed is None else n_computed) // BLOCK * BLOCK
        if self.shares and n > r.n_told:
            self.told.append(Told(r.name, list(r.ids)))
            r.n_told = n

    def _used(self, sizes):
        return sum(self._blocks(x, sizes.get(x.name, 0)) for x in self.running)

    def _preempt(self, sizes):
        r = self.running.pop()
        sizes.pop(r.name, None)
        self._tell(r)
        self.ended.add(r.name)
        r.n_computed = r.n_told = 0
        self.queue.insert(0, r)
        self.n_preempted += 1

    def _draw(self, r, chunk):
        left = len(r.ids) - r.n_computed
        return min(left, int(self.rng.integers(1, chunk + 1))) if left > 1 else 1

    def _admit(self, opened, sizes, chunk):
        while self.queue and len(self.running) < 6:
            r, n = self.queue[0], 0
            if self.shares:
                n = self.requests.pool.probe(r.ids, adapter=r.salt).cached_tokens
            free = (self.n_blocks - self._used(sizes)) * BLOCK - n
            if free < 1:
                return
            r.n_computed = r.n_told = n
            sizes[r.name] = min(self._draw(r, chunk), free)
            self.n_shared += n
            self.found[r.name] = n
            opened.append(Opened(r.name, r.ids[: n + 1] if self.shares else (), n, r.salt))
            self.running.append(self.queue.pop(0))

    def step(self, chunk=20):
        opened, rows, drafts, start, sizes = [], [], {}, 0, {}
        for r in list(self.running):
            if r not in self.running:
                continue
            sizes[r.name] = self._draw(r, chunk)
            while r in self.running and self._used(sizes) > self.n_blocks:
                self._preempt(sizes)
        if not self.ended:  # as vLLM, which admits none in a step that preempts
            self._admit(opened, sizes, chunk)
        for r in self.running:
            self._tell(r, r.n_computed)
        self.requests.begin(self.ended, opened, self.told)
        self.ended, self.told = set(), []
        for r in self.running:
            left, n = len(r.ids) - r.n_computed, sizes[r.name]
            drafts[r.name] = []
            if left == 1 and self.n_blocks > 1 << 19 and self.rng.random() < 0.3:  # speculate
                drafts[r.name] = [int(t) for t in self.rng.integers(0, VOCABULARY, 2)]
            rows.append(Row(r.name, r.n_computed, n + len(drafts[r.name]), start, left == n))
            start += rows[-1].n
        if rows:
            self._compute(rows, drafts)

    def _compute(self, rows, drafts):
        by_name = {r.name: r for r in self.running}
        step, outs = self.requests.step(rows), {}

        def compute(at, step):
            parts = []
            for row in step.rows:
                r = by_name[row.request]
                ids = r.ids + drafts[r.name]
                parts.append([x[row.pos : row.pos + row.n] for x in qkv(ids, at, r.salt)])
            q, k, v = (np.concatenate(x) for x in zip(*parts))
            out = np.full((len(q), Q_HEADS, DIM), np.nan, np.float32)
            self.requests.pool.step(at, step.items, q, k, v, out=out)
            start = 0
            for row in step.rows:
                outs.setdefault(row.request, {})[at] = out[start : start + row.n]
                start += row.n

        for at in range(LAYERS):
            if at > 0 and all(r.may_fail for r in rows):
                self.between()
            if not step.layer(at, lambda s: compute(at, s)):
                break
        failed = self.requests.take_failed()
        self.n_failed += len(failed)
        computed = {row.request for row in step.rows}
        for row in rows:
            r = by_name[row.request]
            if row.request in failed:
                r.n_computed = failed[row.request] // BLOCK * BLOCK
                r.n_told = min(r.n_told, r.n_computed)
                continue
            n = row.n - len(drafts[r.name])
            r.n_computed += n
            if not row.is_sampled:
                continue
            assert row.request in computed, "a token would be taken from a row that was not computed"
            got = [outs[r.name][at] for at in range(LAYERS)]
            for i, draft in enumerate([*drafts[r.name], None]):
                r.ids.append(token_of([o[n - 1 + i] for o in got]))
                if len(r.text) == r.n or r.ids[-1] != draft:
                    self.n_rejected += draft is not None
                    break
                r.n_computed += 1
            if len(r.text) == r.n:
                self._tell(r)
                self.ended.add(r.name)
                self.running.remove(r)
                self.done.append(r)

    def run(self, each=lambda: None, chunk=20):
        while self.queue or self.running:
            self.step(chunk)
            each()
        self.requests.begin(self.ended, [], self.told)
        self.ended, self.told = set(), []

    def check(self, n):
        assert len(self.done) == n
        for r in self.done:
            assert r.text == text_of(r.ids[: r.n_prompt], r.n, r.salt), r.name

    def close(self):
        self.requests.close()


@pytest.fixture
def daemon():
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "2s"}) as d:
        yield d


def n_sequences(d):
    with attnd.connect(d.url) as c:
        return c.stats()["sequences"]


def test_chunks_and_drafts(daemon):
    e = Engine(daemon.url, spec_of("a"))
    for i, p in enumerate(prompts(10, 3)):
        e.add(f"r{i}", p, 12)
    e.run()
    e.check(10)
    assert e.n_rejected > 5 and e.n_failed == 0
    assert n_sequences(daemon) == 0
    e.close()


def test_prefixes_are_shared_but_not_across_adapters(daemon):
    e = Engine(daemon.url, spec_of("b", 256))
    for round in range(2):
        for i, p in enumerate(prompts(8, 4, shared=40)):
            e.add(f"r{round}.{i}", p, 6, salt=i % 2)
        e.run()
    e.check(16)
    assert e.n_shared > 8 * 40
    e.close()


def test_preemption(daemon):
    e = Engine(daemon.url, spec_of("c"), n_blocks=24)
    for i, p in enumerate(prompts(12, 5)):
        e.add(f"r{i}", p, 20)
    e.run()
    e.check(12)
    assert e.n_preempted > 2
    assert n_sequences(daemon) == 0
    e.close()


def test_two_engines_in_a_pool_too_small_for_both_go_on(daemon):
    spec = spec_of("d", n_blocks=24)
    engines = [Engine(daemon.url, spec, n_blocks=24, seed=i) for i in range(2)]
    for k, e in enumerate(engines):
        for i, p in enumerate(prompts(8, 6 + k)):
            e.add(f"e{k}.{i}", p, 16)
    threads = [threading.Thread(target=e.run) for e in engines]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in engines:
        e.check(8)
    assert sum(e.n_failed for e in engines) > 2
    assert n_sequences(daemon) == 0
    for e in engines:
        e.close()


def test_what_is_computed_again_is_shared_under_its_adapter_alone(daemon):
    """Also where its sequence is one that begins anew, as the first was lost."""
    e = Engine(daemon.url, spec_of("m", 256))
    (prompt,) = prompts(1, 4, shared=40)
    e.add("r1", prompt, 24, salt=1)
    while not e.running or len(e.running[0].text) < 3:
        e.step()
    with attnd.connect(daemon.url) as thief:
        thief.pool("m").adopt(e.requests.held["r1"].seq.id).close()
    e.run()
    assert e.n_failed == 1
    for name, salt in ("r0", 0), ("again", 1):
        e.add(name, prompt, 6, salt=salt)
        e.run()
    e.check(3)
    assert e.found["r0"] == 0 and e.found["again"] >= 40
    e.close()


@pytest.fixture
def few():
    """A daemon of seven sequences."""
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "2s", "cache.max_sequences": 7}) as d:
        yield d


@pytest.mark.parametrize("n_engines", [1, 2])
def test_engines_that_want_more_sequences_than_there_are_go_on(few, monkeypatch, n_engines):
    """Each wants up to six at a time, of four that are left; what is given up is computed again."""
    monkeypatch.setattr(of_requests, "_OPEN_WAIT_S", 0.01)
    spec = spec_of("n", n_blocks=400)
    other = attnd.connect(few.url, timeout=60)
    taken = [other.create_pool(spec).open() for _ in range(3)]
    engines = [Engine(few.url, spec, seed=i) for i in range(n_engines)]
    for k, e in enumerate(engines):
        for i, p in enumerate(prompts(8, 6 + k, shared=24)):
            e.add(f"e{k}.{i}", p, 12, salt=i % 2)
    threads = [threading.Thread(target=e.run) for e in engines]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in engines:
        e.check(8)
    assert sum(e.n_failed for e in engines) > 2
    assert n_sequences(few) == len(taken)
    for e in engines:
        e.close()
    other.close()


def test_engines_do_not_wait_for_the_sequences_of_each_other(few, monkeypatch):
    """Each begins with four requests at once, which can't fail, and there are four sequences for both."""
    monkeypatch.setattr(of_requests, "_OPEN_WAIT_S", 0.02)
    spec = spec_of("p", n_blocks=400)
    with attnd.connect(few.url, timeout=60) as other:
        taken = [other.create_pool(spec).open() for _ in range(4)]
        engines = [Engine(few.url, spec, seed=i, shares=False) for i in range(2)]
        for e in engines:
            for i in range(4):
                e.add(f"r{i}", [i], 8)
        threads = [threading.Thread(target=e.run, daemon=True) for e in engines]
        for t in threads:
            t.start()
        threads[0].join(0.5)  # they have the three that are left
        taken.pop().close()
        for t in threads:
            t.join(120)
        for e in engines:
            e.check(4)
            e.close()


def zeros(requests, rows):
    """A step of rows, all layers."""
    step, n = requests.step(rows), sum(r.n for r in rows)
    k = np.zeros((n, requests.pool.spec.num_kv_heads, DIM), np.float32)
    for at in range(LAYERS):
        step.layer(at, lambda s: requests.pool.step(at, s.items, None, k[: s.items.n_tokens], k[: s.items.n_tokens]))
    return [r.request for r in step.rows]


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_request_without_a_row_is_given_up_for_one_that_begins(few, monkeypatch, gives_up):
    monkeypatch.setattr(of_requests, "_OPEN_WAIT_S", 0.01)
    monkeypatch.setattr(of_requests, "FULL_WAIT_S", 0.1)
    spec = spec_of("q", n_blocks=400)
    r = Requests(attnd.connect(few.url, timeout=60), lambda c: c.create_pool(spec), gives_up=gives_up)
    with attnd.connect(few.url, timeout=60) as other:
        taken = [other.create_pool(spec).open() for _ in range(5)]
        assert zeros(r, [Row("a", 0, 3, 0, True), Row("b", 0, 2, 3, True)]) == ["a", "b"]
        if not gives_up:
            with pytest.raises(attnd.OverloadedError, match="cache.max_sequences"):
                zeros(r, [Row("c", 0, 1, 0, True)])
            assert sorted(r.held) == ["a", "b"]
        else:
            assert zeros(r, [Row("c", 0, 1, 0, True)]) == ["c"]
            assert zeros(r, [Row("b", 2, 1, 0, True), Row("a", 3, 1, 1, True)]) == ["b"]
            assert r.take_failed() == {"a": 0}
        assert n_sequences(few) == len(taken) + 2
    r.close()


def test_what_begins_again_without_its_sequence_has_its_number(daemon):
    """So that another engine finds it by name."""
    spec = spec_of("s", 256)
    r = Requests(attnd.connect(daemon.url, timeout=60), lambda c: c.create_pool(spec))
    r.begin((), [Opened("a", (), 0, 0, number=4711)], ())
    zeros(r, [Row("a", 0, 3, 0, True)])
    with attnd.connect(daemon.url) as thief:
        thief.pool("s").adopt(4711).close()
    assert zeros(r, [Row("a", 3, 1, 0, True)]) == [] and r.take_failed() == {"a": 0}
    assert zeros(r, [Row("a", 0, 4, 0, True)]) == ["a"]
    assert r.held["a"].seq.id == 4711
    r.close()


def test_an_engine_waits_where_others_have_all_sequences(few, monkeypatch, caplog):
    """Longer than it would for anything else, as it has none that they could wait for, and says so."""
    monkeypatch.setattr(of_requests, "FULL_WAIT_S", 0.3)
    e = Engine(few.url, spec_of("o", 256))
    with attnd.connect(few.url, timeout=60) as other:
        pool = other.create_pool(spec_of("o", 256))
        taken = [pool.open() for _ in range(other.info.max_sequences)]
        e.add("r", [1], 5)  # all of its prompt at once
        t = threading.Thread(target=e.run, daemon=True)
        t.start()
        t.join(1.5)
        assert t.is_alive()
        taken.pop().close()
        t.join(60)
    e.check(1)
    assert "all 7 sequences are open (cache.max_sequences)" in caplog.text
    e.close()


def test_an_engine_goes_on_with_what_its_killed_predecessor_had_computed(daemon):
    first = Engine(daemon.url, spec_of("g", 256))
    for i, p in enumerate(prompts(6, 10)):
        first.add(f"r{i}", p, 1000)
    while len(first.running) < 6 or min(len(r.text) for r in first.running) < 3 * BLOCK:
        first.step()
    had = {r.name: r for r in first.running}  # nothing tells the daemon that it has ended
    second = Engine(daemon.url, spec_of("g", 256))
    for r in had.values():
        second.add(r.name, r.ids, 4)
    second.run()
    second.check(6)
    for r in had.values():  # but what its last step had computed: no message said what it was
        assert second.found[r.name] >= (len(r.ids) - 4) // BLOCK * BLOCK
    first.close()
    second.close()


def test_two_engines_that_have_reserved_their_blocks_never_meet_out_of_blocks(daemon):
    spec = spec_of("g", n_blocks=40)
    engines = [Engine(daemon.url, spec, n_blocks=20, seed=i, n_reserved=20) for i in range(2)]
    met = []
    for k, e in enumerate(engines):
        def without(rows, error, was=e.requests._without_blocks):
            met.append(error)
            return was(rows, error)

        e.requests._without_blocks = without
        for i, p in enumerate(prompts(8, 6 + k, shared=24)):
            e.add(f"e{k}.{i}", p, 16)
    threads = [threading.Thread(target=e.run) for e in engines]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in engines:
        e.check(8)
        assert e.n_preempted > 2
    assert met == []  # a block that one has found the other may evict before it is opened: that row fails
    assert n_sequences(daemon) == 0
    for e in engines:
        e.close()


def test_what_an_engine_that_died_had_reserved_comes_back_with_its_lease(daemon):
    spec = spec_of("h", n_blocks=40)
    program = "import attnd, os, sys; from test_requests import spec_of; " \
        "attnd.connect(sys.argv[1]).create_pool(spec_of('h', 40)).reserve(40); os._exit(0)"
    path = os.pathsep.join([str(HERE), *sys.path])
    command = [sys.executable, "-c", program, daemon.url]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    with attnd.connect(daemon.url) as other, pytest.raises(attnd.OutOfBlocksError):
        other.create_pool(spec).reserve(1)
    e = Engine(daemon.url, spec, n_blocks=40, n_reserved=40)
    e.add("r", range(20), 5)
    e.run()
    e.check(1)
    e.close()


def test_a_sequence_that_is_lost_fails_alone(daemon):
    """An operator ends sequences between two layers and between two steps: others don't notice."""
    e = Engine(daemon.url, spec_of("i"))
    for i, p in enumerate(prompts(6, 9)):
        e.add(f"r{i}", p, 24)
    n, n_lost = [0], [0]
    with attnd.connect(daemon.url) as thief:
        pool = thief.pool("i")

        def take_one():
            n[0] += 1
            held = [h for h in e.requests.held.values() if h.n_tokens > 0]
            if n[0] % 4 == 0 and held and n_lost[0] < 12:
                pool.adopt(held[n[0] % len(held)].seq.id).close()
                n_lost[0] += 1

        e.between = take_one
        e.run(each=take_one)
    e.check(6)
    assert n_lost[0] > 5 and e.n_failed >= n_lost[0] / 2 and e.requests.n_restarts == 0
    assert n_sequences(daemon) == 0
    e.close()


def test_a_daemon_that_began_anew_costs_computation_only(daemon):
    e = Engine(daemon.url, spec_of("e"))
    for i, p in enumerate(prompts(8, 8)):
        e.add(f"r{i}", p, 16)
    n = [0]

    def kill():
        n[0] += 1
        if n[0] in (6, 15):
            daemon.restart()

    e.run(each=kill)
    e.check(8)
    assert e.n_failed > 2 and e.requests.n_restarts == 2
    e.close()


def test_a_gap_is_an_error(daemon):
    e = Engine(daemon.url, spec_of("f"))
    e.add("r", range(20), 5)
    e.step(chunk=7)
    with pytest.raises(RuntimeError, match=r"request r: position 30, attnd has \d+ tokens"):
        e.requests.step([Row("r", 30, 1, 0, True)])
    e.close()
