"""live.py against a daemon, under a small engine that schedules as SGLang does: hits that are opened
at admission, chunks, pages that run out and retraction, aborts, ids told as pages fill. It needs no
SGLang. Texts must be those that a float64 model writes alone.
"""

import pathlib
import sys

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/tests"), str(HERE.parent / "src")]

from conftest import Daemon  # noqa: E402
from toy_model import (  # noqa: E402
    BLOCK, LAYERS, Q_HEADS, prompts, qkv, spec_of, text_of, token_of,
)

import attnd  # noqa: E402
from attnd.serving.requests import Requests  # noqa: E402
from attnd_sglang.live import Live  # noqa: E402


class Req:
    def __init__(self, rid, prompt, n, adapter):
        self.rid, self.prompt, self.out, self.n = rid, list(prompt), [], n
        self.adapter, self.n_computed, self.is_aborted = adapter, 0, False

    @property
    def ids(self):
        return self.prompt + self.out


class Engine:
    """SGLang's scheduler in small: it prefills what it can admit, and decodes otherwise."""

    def __init__(self, url, spec, n_pages=1 << 20, seed=0):
        client = attnd.connect(url, timeout=60)
        self.live = Live(Requests(client, lambda c: c.create_pool(spec), gives_up=False))
        self.waiting, self.running, self.done = [], [], []
        self.n_pages, self.rng = n_pages, np.random.default_rng(seed)
        self.n_shared = self.n_retracted = self.n_declined = 0

    def add(self, rid, prompt, n, adapter=0):
        self.waiting.append(Req(rid, prompt, n, adapter))

    def _pages(self, r, n=0):
        return -(-(r.n_computed + n) // BLOCK)

    def _used(self):
        return sum(map(self._pages, self.running))

    def _match(self, r):
        self.live.matched(r.rid, r.adapter)
        if r.adapter is None:
            return 0
        return self.live.n_cached([*r.ids[:-1], 0], r.adapter) // BLOCK * BLOCK

    def _admit(self):
        admitted = []
        while self.waiting and len(self.running) < 6:
            r = self.waiting[0]
            n = self._match(r)
            if self._used() + -(-(len(r.ids) + 1) // BLOCK) > self.n_pages:
                break
            if n and not self.live.open_with(r.rid, r.ids, n):
                self.n_declined, n = self.n_declined + 1, 0
            r.n_computed, self.n_shared = n, self.n_shared + n
            self.running.append(self.waiting.pop(0))
            admitted.append(r)
        return admitted

    def _release(self, r, ids):
        self.live.tell(r.rid, ids)
        self.live.end(r.rid)
        self.running.remove(r)

    def abort(self, rid):
        for r in list(self.running):
            if r.rid == rid:
                r.is_aborted = True
                self._release(r, r.ids[: r.n_computed])
                self.done.append(r)

    def _retract(self, n_new):
        while self._used() + n_new > self.n_pages and len(self.running) > 1:
            r = self.running[-1]
            self._release(r, r.ids)
            r.n_computed = 0
            self.waiting.append(r)
            self.n_retracted += 1

    def step(self):
        self._admit()
        behind = [r for r in self.running if len(r.ids) - r.n_computed > 1]
        if behind:
            rows = []
            for r in behind:
                most = min(len(r.ids) - r.n_computed, int(self.rng.integers(1, 21)))
                rows.append((r, r.n_computed, most))
        else:
            self._retract(len(self.running))
            rows = [(r, r.n_computed, 1) for r in self.running]
            for r, pos, _ in rows:
                if self.live.wants_tokens(r.rid, pos):
                    self.live.tell(r.rid, r.ids[:pos])
        if rows:
            self._compute(rows)

    def _compute(self, rows):
        step, outs = self.live.step([(r.rid, pos, n) for r, pos, n in rows]), []
        for at in range(LAYERS):

            def compute(step, at=at):
                parts = [[x[pos : pos + n] for x in qkv(r.ids, at, r.adapter or 0)] for r, pos, n in rows]
                q, k, v = (np.concatenate(x) for x in zip(*parts))
                out = np.full((len(q), Q_HEADS, 8), np.nan, np.float32)
                self.live.requests.pool.step(at, step.items, q, k, v, out=out)
                outs.append(out)

            step.layer(at, compute)
            self.live.check(step, rows)
        end = 0
        for r, pos, n in rows:
            end += n
            r.n_computed += n
            if r.n_computed < len(r.ids):
                self.live.tell(r.rid, r.ids[: r.n_computed])
                continue
            r.out.append(token_of([o[end - 1] for o in outs]))
            if len(r.out) == r.n:
                self._release(r, r.ids[: r.n_computed])
                self.done.append(r)

    def run(self):
        while self.waiting or self.running:
            self.step()

    def check(self, n):
        assert len(self.done) == n
        for r in self.done:
            if not r.is_aborted:
                assert r.out == text_of(r.prompt, r.n, r.adapter or 0), r.rid


@pytest.fixture
def daemon():
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "2s"}) as d:
        yield d


@pytest.fixture
def engine(daemon):
    made = []

    def make(name, n_blocks=64, **options):
        made.append(Engine(daemon.url, spec_of(name, n_blocks), **options))
        return made[-1]

    yield make
    for e in made:
        e.live.close()


def n_sequences(d):
    with attnd.connect(d.url) as c:
        return c.stats()["sequences"]


def test_chunks_and_nothing_is_open_after_the_last_request(daemon, engine):
    e = engine("a")
    for i, p in enumerate(prompts(10, 3)):
        e.add(f"r{i}", p, 12)
    e.run()
    e.check(10)
    assert n_sequences(daemon) == 0


def test_a_second_round_begins_with_what_the_first_computed_even_of_its_text(engine):
    e = engine("b", 256)
    asked = prompts(8, 4, shared=40)
    for i, p in enumerate(asked):
        e.add(f"r0.{i}", p, 6, i % 2)
    e.run()
    n = e.n_shared
    for r in list(e.done):
        e.add(f"r1.{r.rid}", r.prompt + r.out, 6, r.adapter)
    e.run()
    e.check(16)
    assert e.n_shared - n >= sum((len(r.prompt) + 5) // BLOCK * BLOCK for r in e.done[:8]) > 8 * 40


def test_requests_that_may_not_share_do_not(engine):
    e = engine("c")
    for round in range(2):
        e.add(f"r{round}", range(40), 6, None)
        e.run()
    e.check(2)
    assert e.n_shared == 0


def test_a_retracted_request_goes_on_with_what_it_had(daemon, engine):
    e = engine("d", 64, n_pages=24)
    for i, p in enumerate(prompts(12, 5)):
        e.add(f"r{i}", p, 24)
    e.run()
    e.check(12)
    assert e.n_retracted > 1 and e.n_shared > 0
    assert n_sequences(daemon) == 0


def test_an_aborted_request_leaves_nothing_open(daemon, engine):
    e = engine("e")
    for i, p in enumerate(prompts(6, 7)):
        e.add(f"r{i}", p, 12)
    for _ in range(4):
        e.step()
    for i in range(6):
        e.abort(f"r{i}")
    assert n_sequences(daemon) == 0
    e.run()


def test_an_engine_finds_what_its_killed_predecessor_had_computed(daemon, engine):
    first, asked = engine("f", 256), prompts(6, 9, shared=24)
    for i, p in enumerate(asked):
        first.add(f"r{i}", p, 40)
    while min((len(r.out) for r in first.running), default=0) < 20 or len(first.running) < 6:
        first.step()
    had = {r.rid: r.n_computed // BLOCK * BLOCK for r in first.running}
    second = engine("f", 256)  # nothing was said to the daemon of the first one's end
    for r in first.running:
        second.add(r.rid, r.prompt + r.out, 10)
    second.run()
    second.check(6)
    # but for what the last steps computed, of which the ids had not followed yet
    assert second.n_shared >= sum(n - BLOCK for n in had.values())


def test_what_was_evicted_between_a_hit_and_its_admission_is_computed(engine):
    e = engine("g", 24)
    e.add("r0", range(60), 4)
    e.run()
    real = e.live.n_cached

    def evicted_meanwhile(tokens, adapter):
        n = real(tokens, adapter)
        if n:
            with e.live.requests.pool.open() as s:
                zeros = np.ones((24 * BLOCK, 1, 8), np.float32)
                for at in range(LAYERS):
                    e.live.requests.pool.step(at, [(s, 0, len(zeros))], None, zeros, zeros)
        return n

    e.live.n_cached = evicted_meanwhile
    e.add("r1", range(60), 4)
    e.run()
    e.check(2)
    assert e.n_declined == 1


def test_a_daemon_that_began_anew_is_an_error_and_no_answer(daemon, engine):
    e = engine("h")
    for i, p in enumerate(prompts(4, 8)):
        e.add(f"r{i}", p, 16)
    while len(e.running) < 4 or min(r.n_computed for r in e.running) == 0:
        e.step()
    daemon.restart()
    with pytest.raises(RuntimeError, match=r"attnd has lost \d running requests"):
        e.run()
    rows = [(r.rid, r.n_computed, 1) for r in e.running]
    assert e.live.lost(rows) == rows  # all can be computed again
    e.live.matched(rows[0][0], None)  # but for one that has more than ids
    with pytest.raises(RuntimeError, match="images"):
        e.live.lost(rows)
