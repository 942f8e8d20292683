"""attnd-vllm's modules against a daemon, over a fake of vLLM (fake/): platform, connector, worker and
backend, with a scheduler that chunks, preempts, aborts, speculates and recomputes. Texts must be those
that a float64 model writes alone. test_requests.py has the bookkeeping below by itself, and
engines/test_engines.py the real vLLM.
"""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/tests"), str(HERE.parent / "src"), str(HERE)]

import fake  # noqa: E402

fake.install()

from conftest import Daemon  # noqa: E402, I001

import attnd  # noqa: E402
import attnd_vllm  # noqa: E402
import torch  # noqa: E402
from attnd_vllm.worker import check_limits  # noqa: E402
from fake.engine import Engine, Request, config  # noqa: E402
from test_requests import n_sequences  # noqa: E402
from toy_model import (  # noqa: E402
    DIM,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    VOCABULARY,
    prompts,
    qkv,
    text_of,
    token_of,
)

BLOCK = 8
entry_point = attnd_vllm.platform  # as vLLM finds it: later, the module has the name


class Model:
    layers, q_heads, kv_heads, dim, vocabulary = LAYERS, Q_HEADS, KV_HEADS, DIM, VOCABULARY

    def __init__(self, weight=1.0):
        self._weight = torch.from_numpy(np.full(1000, weight, np.float32))

    def named_parameters(self):
        yield "w", self._weight

    def named_buffers(self):
        return ()

    qkv = staticmethod(lambda ids, at, salt: tuple(qkv(ids, at, salt)))
    token_of = staticmethod(token_of)


class Kept(Daemon):
    def start(self, timeout=60.0):
        if "--supervise" not in self._command:
            self._command[1:1] = ["--supervise"]
        super().start(timeout)


@pytest.fixture
def daemon(monkeypatch):
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "4s"}) as d:
        monkeypatch.setenv("ATTND_VLLM", d.url)
        yield d


@pytest.fixture
def engine(daemon):
    made = []

    def make(n_blocks=128, weight=1.0, **more):
        made.append(Engine(Model(weight), n_blocks, BLOCK, **more))
        return made[-1]

    yield make
    for e in made:
        if e.shared.requests is not None:
            e.close()


def check(e, n):
    assert len(e.done) == n
    for r in e.done:
        assert r.text == text_of(r.prompt, r.n, r.model_salt), r.request_id


def test_the_platform_turns_on_what_is_needed(engine):
    e = engine()
    c = e.config
    assert c.are_defaults_applied and not c.cache_config.enable_prefix_caching
    assert not c.scheduler_config.async_scheduling
    assert c.kv_transfer_config.kv_connector == "AttndConnector"
    assert c.kv_transfer_config.kv_load_failure_policy == "recompute"
    attnd_vllm.register()
    assert fake.registered == {fake.AttentionBackendEnum.CUSTOM: "attnd_vllm.backend.AttndBackend"}
    assert fake.KVConnectorFactory._registry["AttndConnector"] == ("attnd_vllm.connector", "AttndConnector")


def test_chunks_drafts_and_prefixes(engine, daemon):
    e = engine()
    e.speculates = True
    for round in range(2):
        for i, p in enumerate(prompts(8, 3, shared=24)):
            e.add(f"r{round}.{i}", p, 10)
        e.run()
    check(e, 16)
    assert e.n_rejected > 5 and e.n_recomputed == 0
    assert sum(r.n_cached for r in e.done[8:]) > 8 * 24
    assert n_sequences(daemon) == 0 and not e.shared.requests.held


def test_what_requests_write_is_told_together(engine, daemon, monkeypatch):
    """A prompt's blocks as they are computed, those of texts in every BLOCK-th step, the rest at the end."""
    e, steps = engine(), []
    begin = e.shared.requests.begin

    def spy(ended, opened, told):
        steps.append((ended, {t.request: len(t.tokens) for t in told}))
        return begin(ended, opened, told)

    monkeypatch.setattr(e.shared.requests, "begin", spy)
    asked = {f"r{i}": p for i, p in enumerate(prompts(5, 3))}
    for name, p in asked.items():
        e.add(name, p, 3 * BLOCK)
    e.run()
    check(e, 5)
    full = {name: len(p) // BLOCK * BLOCK for name, p in asked.items()}
    for name, n in full.items():
        assert n == 0 or any(told.get(name) == n for _, told in steps)
    beside = [
        i
        for i, (ended, told) in enumerate(steps)
        if any(n > full[name] and name not in ended for name, n in told.items())
    ]
    assert len(beside) > 1 and all((i - beside[0]) % BLOCK == 0 for i in beside)
    for r in e.done[:5]:
        e.add(f"{r.request_id}-on", r.all_token_ids, 1)
    e.run()
    for r in e.done[5:]:  # all but the last token, which was not computed, and the last one of a prompt
        assert r.n_cached == (len(r.prompt) - 1) // BLOCK * BLOCK


def test_ranks_have_a_pool_each_and_hits_are_the_least(engine, daemon):
    e = engine(n_ranks=2)
    specs = [r.shared.requests.pool.spec for r in e.ranks]
    assert [s.num_q_heads for s in specs] == [Q_HEADS // 2] * 2
    assert [s.name.rpartition("-")[2] for s in specs] == ["0of2", "1of2"]
    asked = prompts(6, 3, shared=24)
    for i, p in enumerate(asked):
        e.add(f"r{i}", p, 10)
    e.run()
    for i, p in enumerate(asked):
        e.add(f"s{i}", p, 10)
    e.run()
    check(e, 12)
    assert e.n_recomputed == 0 and sum(r.n_cached for r in e.done[6:]) > 6 * 24
    assert n_sequences(daemon) == 0


def test_ranks_may_have_a_daemon_each(engine, daemon, monkeypatch):
    with Daemon(**{"device.kv_memory": "16M"}) as second:
        monkeypatch.setenv("ATTND_VLLM", f"{daemon.url},{second.url}")
        e = engine(n_ranks=2)
        names = [r.shared.requests.pool.spec.name for r in e.ranks]
        for d, has, has_not in (daemon, *names), (second, *names[::-1]):
            with attnd.connect(d.url) as c:
                assert c.pool(has).spec.num_q_heads == Q_HEADS // 2
                with pytest.raises(attnd.NotFoundError):
                    c.pool(has_not)
        asked = prompts(6, 3, shared=24)
        for at in "rs":
            for i, p in enumerate(asked):
                e.add(f"{at}{i}", p, 10)
            e.run()
        check(e, 12)
        assert e.n_recomputed == 0 and sum(r.n_cached for r in e.done[6:]) > 6 * 24
        # hits are the least of both: what one of them has lost is computed again
        second.stop()
        second.start()
        for i, p in enumerate(asked):
            e.add(f"t{i}", p, 10)
        e.run()
        check(e, 18)
        assert n_sequences(daemon) == n_sequences(second) == 0


def test_ranks_fail_together(engine, daemon):
    """One rank's sequences are lost in the middle of steps, and the other has computed on with what it
    gave: nothing of that is found by later requests."""
    e, n, taken = engine(n_ranks=2), [0], []
    other = attnd.connect(daemon.url)
    pools = [other.pool(r.shared.requests.pool.spec.name) for r in e.ranks]
    asked = prompts(6, 5)
    for i, p in enumerate(asked):
        e.add(f"r{i}", p, 20)

    def between(at):
        n[0] += 1
        first = [r.request_id for r in e.running if r.num_computed_tokens == 0]
        late = [r.request_id for r in e.running if r.num_computed_tokens > 0]
        if at == 1:  # each once, of the rank that is between its layers here
            for name in [name for name in first if name not in taken][:1]:
                taken.append(name)
                pools[0].adopt(e.shared.requests.held[name].seq.id).close()
        if n[0] % 7 == 0 and n[0] < 100:  # before either layer
            at = n[0] // 7 % 2
            for h in [e.ranks[at].shared.requests.held.get(name) for name in late[:2]]:
                if h is not None:
                    pools[at].adopt(h.seq.id).close()

    e.between = between
    e.run()
    e.between = lambda at: None
    other.close()
    for i, p in enumerate(asked):
        e.add(f"s{i}", p + text_of(p, 20), 5)
    e.run()
    check(e, 12)
    assert len(taken) == 6 and e.n_recomputed > 2 and sum(r.n_cached for r in e.done[6:]) > 0
    assert n_sequences(daemon) == 0


def test_what_a_rank_computed_over_anothers_failure_is_not_shared(engine, daemon):
    """A request that is aborted before it could be computed again."""
    e = engine(n_ranks=2)
    (prompt,) = prompts(1, 5, shared=90)
    e.add("a", prompt, 20)
    while not e.running or e.running[0].num_computed_tokens < BLOCK:
        e.step()
    n = e.running[0].num_computed_tokens
    with attnd.connect(daemon.url) as other:
        requests = e.ranks[0].shared.requests
        pool = other.pool(requests.pool.spec.name)
        e.between = lambda at: at == 0 and pool.adopt(requests.held["a"].seq.id).close()
        while "a" not in e.failed:
            e.step(60)
        e.between = lambda at: None
    assert e.ranks[1].shared.requests.held["a"].n_tokens // BLOCK > n // BLOCK  # blocks of no use
    e.abort("a")
    for name in "bcd":
        e.add(name, prompt, 20)
        e.run()
    check(e, 3)
    assert e.done[-1].n_cached >= 88
    assert n_sequences(daemon) == 0


def test_only_requests_of_a_step_on_its_way_are_waited_for(engine):
    """With asynchronous scheduling: others begin and end beside it."""
    e, waits = engine(), []
    e.config.scheduler_config.async_scheduling = True
    e.shared.way.settle = lambda: waits.append(e.shared.latest)
    asked = prompts(4, 3)
    for i, p in enumerate(asked[:2]):
        e.add(f"r{i}", p, 10)
        e.step()
    assert waits == [] and e.shared.latest == {"r0", "r1"}
    e.abort("r0")
    e.add("r2", asked[2], 10)
    e.step()
    assert waits == [{"r0", "r1"}]
    e.abort("r2")
    e.shared.latest -= {"r2"}  # as of a step without it
    e.run()
    assert waits[1:] == [{"r1"}]  # as it ended


@pytest.mark.parametrize("is_async", [False, True])
def test_a_sequence_ends_after_the_layers_of_its_step(engine, is_async):
    """As vLLM warms up it asks for no tokens, and ends requests whose layers may be on their way."""
    e, said = engine(), []
    e.config.scheduler_config.async_scheduling = is_async
    e.add("r", prompts(1, 3)[0], 10)
    e.step()
    e.shared.way.settle = lambda: said.append("settled")
    begin = e.shared.requests.begin
    e.shared.requests.begin = lambda ended, *a: (said.extend(ended), begin(ended, *a))
    e.abort("r")
    e.step()
    assert said == ["settled", "r"]


def test_preemption_and_aborts(engine, daemon):
    e = engine(24)
    for i, p in enumerate(prompts(12, 5)):
        e.add(f"r{i}", p, 20)
    n = [0]

    def each():
        n[0] += 1
        if n[0] in (4, 9):
            e.abort(f"r{n[0] - 3}")

    e.run(each)
    check(e, 10)
    assert e.n_preempted > 2
    assert n_sequences(daemon) == 0


def test_a_daemon_that_begins_empty_is_computation(engine, daemon):
    e = engine()
    for i, p in enumerate(prompts(8, 8)):
        e.add(f"r{i}", p, 16)
    n = [0]

    def each():
        n[0] += 1
        if n[0] in (6, 15):
            daemon.restart()

    e.run(each)
    check(e, 8)
    assert e.n_recomputed > 2 and e.shared.requests.n_restarts == 2
    assert n_sequences(daemon) == 0


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_daemon_that_begins_empty_while_a_prompt_begins_is_computation(engine, daemon, n_ranks):
    """Between two layers: vLLM can't be told of tokens that are a request's first, nor take none of a
    whole prompt's. All ranks compute the step again, and others' prefixes are right afterwards."""
    e, asked = engine(n_ranks=n_ranks), [*prompts(6, 8, shared=12), [1], [2]]
    for i, p in enumerate(asked):
        e.add(f"r{i}", p, 16)
    begun = {"whole": set(), "first part": set()}
    n_beside = 0

    def between(at):  # once for each request
        nonlocal n_beside
        first = [r for r in e.running if r.num_computed_tokens == 0]
        new = [r for r in first if not any(r.request_id in names for names in begun.values())]
        if at == 1 and new:
            for r in new:
                is_whole = dict(e.order)[r.request_id] == len(r.prompt)
                begun["whole" if is_whole else "first part"].add(r.request_id)
            n_beside += len(first) < len(e.running)
            daemon.restart()

    e.between = between
    e.run(chunk=30)
    e.between = lambda at: None
    for i, p in enumerate(asked):
        e.add(f"s{i}", p + text_of(p, 16), 5)
    e.run()
    check(e, 16)
    assert all(begun.values()) and n_beside > 0
    assert e.n_recomputed > 0 and sum(r.n_cached for r in e.done[8:]) > 6 * 12
    assert n_sequences(daemon) == 0


def is_a_pause(monkeypatch, model, check, n_prompts, n_tokens, kills):
    """A daemon with a keeper is killed before these layers: nothing is computed again."""
    with Kept(**{"device.kv_memory": "16M"}) as d:
        monkeypatch.setenv("ATTND_VLLM", d.url)
        e, n = Engine(model, 128, BLOCK), [0]
        for i, p in enumerate(prompts(n_prompts, 8)):
            e.add(f"r{i}", p, n_tokens)

        def between(at):
            n[0] += 1
            if n[0] in kills:
                children = f"/proc/{d.process.pid}/task/{d.process.pid}/children"
                os.kill(int(pathlib.Path(children).read_text().split()[0]), 9)

        e.between = between
        e.run()
        check(e, n_prompts)
        assert e.n_recomputed == 0 and e.shared.requests.n_restarts == 0
        e.close()


def test_a_daemon_with_a_keeper_is_a_pause(monkeypatch):
    is_a_pause(monkeypatch, Model(), check, 8, 16, (10, 31))


def test_blocks_that_others_take_are_waited_for(engine, daemon):
    """Out of blocks never ends the engine: another session has most of the pool for a while."""
    e = engine(24)
    for i, p in enumerate(prompts(8, 6)):
        e.add(f"r{i}", p, 16)
    with attnd.connect(daemon.url) as other:
        pool = other.pool(e.shared.requests.pool.spec.name)
        seq, k = pool.open(), np.ones((BLOCK, KV_HEADS, DIM), np.float32)
        timer = threading.Timer(1.0, seq.close)

        def each():  # takes what is free, until steps have waited for it for a second
            if timer.ident is None:
                timer.start()
            try:
                for pos in range(0, 14 * BLOCK, BLOCK):
                    pool.step(0, [(seq, pos, BLOCK)], k=k, v=k)
            except (attnd.OutOfBlocksError, attnd.NotFoundError, attnd.InvalidArgumentError):
                pass

        e.run(each)
        timer.join()
    check(e, 8)
    assert n_sequences(daemon) == 0


def run_other(url, seed):
    """A second engine, in a process of its own."""
    os.environ["ATTND_VLLM"] = url
    e, met = Engine(Model(), 20, BLOCK, seed=seed), []
    was = e.shared.requests._without_blocks
    e.shared.requests._without_blocks = lambda rows, error: met.append(error) or was(rows, error)
    for i, p in enumerate(prompts(8, 6 + seed, shared=24)):
        e.add(f"e{seed}.{i}", p, 16)
    e.run()
    check(e, 8)
    assert e.shared.requests.pool.probe().n_reserved_blocks == 20
    print(json.dumps({"out_of_blocks": len(met), "preempted": e.n_preempted}))
    e.close()


def test_two_engines_have_their_shares_of_a_pool_too_small_for_both(daemon):
    env = {**os.environ, "ATTND_VLLM_POOL_BLOCKS": "40"}
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", "import sys; from test_modules import run_other; "
             "run_other(sys.argv[1], int(sys.argv[2]))", daemon.url, str(k)],
            env={**env, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
            stdout=subprocess.PIPE,
        )
        for k in range(2)
    ]
    for e in engines:
        said, _ = e.communicate(timeout=600)
        assert e.returncode == 0
        got = json.loads(said)
        assert got["out_of_blocks"] == 0 and got["preempted"] > 0
    assert n_sequences(daemon) == 0


def named(i):
    return {"attnd_request": f"name {i}"}


def write_and_say(url):
    """An engine that says after each step what its requests have: until it is killed."""
    os.environ["ATTND_VLLM"] = url
    e = Engine(Model(), 128, BLOCK)
    for i, p in enumerate(prompts(6, 3, shared=24)):
        e.add(f"a{i}", p, 200, params=named(i))
    e.run(lambda: print(json.dumps({r.request_id[1:]: [r.text, r.num_computed_tokens] for r in e.running}), flush=True))


@pytest.fixture
def patient(monkeypatch):
    """A daemon with a lease that no busy machine outlasts."""
    with Daemon(**{"device.kv_memory": "16M", "engine.lease": "600s"}) as d:
        monkeypatch.setenv("ATTND_VLLM", d.url)
        yield d


def test_named_requests_of_a_killed_engine_go_on_without_computing_a_token_again(engine, patient):
    """Also one whose text differs: its tokens are not taken."""
    a = subprocess.Popen(
        [sys.executable, "-c", "import sys; from test_modules import write_and_say; write_and_say(sys.argv[1])", patient.url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        stdout=subprocess.PIPE,
    )
    had = {}
    for line in a.stdout:
        had.update(json.loads(line))
        if len(had) == 6 and min(len(text) for text, _ in had.values()) > 3 * BLOCK:
            break
    a.kill()
    for line in a.stdout.read().splitlines(keepends=True):  # a pipe has only what was said whole
        if line.endswith(b"\n"):
            had.update(json.loads(line))
    a.wait()
    e, at_work = engine(), prompts(6, 3, shared=24)
    had["5"][0][-3] ^= 1
    for i, p in enumerate(at_work):
        e.add(f"b{i}", p + had[str(i)][0], 10, params=named(i))
    e.run()
    check(e, 6)
    for r in e.done:
        text, n_computed = had[r.request_id[1:]]
        if r.request_id == "b5":
            assert r.n_cached % BLOCK == 0
            continue
        assert r.prompt == at_work[int(r.request_id[1:])] + text
        assert r.n_cached >= min(n_computed, len(r.prompt) - 1) > 24
    assert any(r.n_cached % BLOCK for r in e.done)
    assert not e.of_scheduler._over and n_sequences(patient) == 0


def test_a_named_request_that_another_engine_takes_is_computed_again(engine, daemon):
    e, n = engine(), [0]
    for i, p in enumerate(prompts(6, 3)):
        e.add(f"r{i}", p, 30, params=named(i % 5))  # two have the same name at once
    with attnd.connect(daemon.url) as c:
        other = c.pool(e.shared.requests.pool.spec.name)

        def each():
            n[0] += 1
            if n[0] == 9:
                numbers = [s.number for s in e.of_scheduler.seen.values()]
                assert len(set(numbers)) == 6 and None in numbers
                other.adopt(numbers[1]).close()

        e.run(each)
    check(e, 6)
    assert e.n_recomputed == 1  # it has no name afterwards
    assert n_sequences(daemon) == 0


def test_a_named_request_that_is_aborted_before_it_is_scheduled_leaves_nothing(engine, daemon):
    e = engine()
    (prompt,) = prompts(1, 3, shared=20)
    e.add("a", prompt, 9, params=named(1))
    for _ in range(6):
        e.step()
    e.of_scheduler.seen.clear()  # as if another engine had it
    again = Request("b", e.running[0].all_token_ids, 3, params=named(1))
    n, _ = e.of_scheduler.get_num_new_matched_tokens(again, 0)
    assert n == len(again.prompt) - 1
    assert e.of_scheduler.get_num_new_matched_tokens(again, 0) == (n, False)  # asked again, as it waits
    e.of_scheduler.request_finished(again, [])
    assert n_sequences(daemon) == 0


def test_names_need_ids_that_are_known_in_time(engine, daemon):
    e = engine(speculative_config=types.SimpleNamespace(method="ngram"))
    e.add("a", prompts(1, 3)[0], 5, params=named(1))
    e.add("b", prompts(1, 4)[0], 5, params={"attnd_request": 7})
    e.step()
    assert [s.number for s in e.of_scheduler.seen.values()] == [None, None]
    e.run()
    check(e, 2)


def test_what_k_and_v_depend_on_is_in_the_key_or_nothing_is_shared(engine, tmp_path):
    e = engine(256)
    (prompt,) = prompts(1, 9, shared=64)
    lora = []
    for i in range(2):
        folder = tmp_path / f"lora{i}"
        folder.mkdir()
        (folder / "weights").write_bytes(bytes([i]) * 100)
        lora.append(types.SimpleNamespace(lora_path=str(folder), lora_name=f"l{i}"))
    image = [
        [types.SimpleNamespace(identifier=f"hash{i}", mm_position=types.SimpleNamespace(offset=o, length=4))]
        for i, o in ((0, 3), (1, 3), (0, 5))
    ]
    kinds = [
        {},
        {"lora": lora[0]},
        {"lora": lora[1]},
        *({"mm": m} for m in image),
        {"salt": "a"},
        {"salt": "b"},
    ]
    for again in range(2):
        for i, kind in enumerate(kinds):
            e.add(f"{again}.{i}", prompt, 3, model_salt=i, **kind)
            e.run()
    check(e, 2 * len(kinds))
    assert [r.n_cached for r in e.done[: len(kinds)]] == [0] * len(kinds)
    assert [r.n_cached >= 64 for r in e.done[len(kinds) :]] == [True] * len(kinds), [r.n_cached for r in e.done]
    gone = types.SimpleNamespace(lora_path=str(tmp_path / "no such"), lora_name="gone")
    for i, kind in enumerate(({"embeds": object()}, {"lora": gone}) * 2):
        e.add(f"u{i}", prompt, 3, model_salt=20 + i, **kind)
        e.run()
    check(e, 2 * len(kinds) + 4)
    assert [r.n_cached for r in e.done[-4:]] == [0] * 4


def test_a_request_that_wants_all_its_tokens_computed_finds_none(engine, daemon):
    """As one for prompt_logprobs does, also under the name of one that another engine has left."""
    e = engine()
    (prompt,) = prompts(1, 9, shared=64)
    e.add("a", prompt, 9, params=named(1))
    while not e.running or e.running[0].num_computed_tokens < len(prompt):
        e.step()
    e.of_scheduler.seen.clear()  # as if another engine had it
    n = n_sequences(daemon)
    again = Request("b", prompt, 3, params=named(1), skip=True)
    assert e.of_scheduler.get_num_new_matched_tokens(again, 0) == (0, False)
    assert n_sequences(daemon) == n
    e.run()
    e.add("c", prompt, 3, skip=True)
    e.add("d", prompt, 3)
    e.run()
    check(e, 3)
    n_cached = {r.request_id: r.n_cached for r in e.done}
    assert n_cached["c"] == 0 and n_cached["d"] >= 64
    assert n_sequences(daemon) == 0


@pytest.mark.parametrize(
    "where, value, says",
    [
        ("scheduler_config__max_num_seqs", 1025, "max_num_seqs is 1025, .* engine.max_step_items, which is 1024"),
        ("model_config__max_model_len", 1 << 20, "max_model_len is 1048576, .* cache.max_seq_tokens, which is"),
    ],
)
def test_more_than_the_daemon_allows_is_refused(engine, where, value, says):
    with pytest.raises(ValueError, match=says):
        engine(**{where: value})


@pytest.fixture
def few(monkeypatch):
    """A daemon of seven sequences."""
    with Daemon(**{"device.kv_memory": "16M", "cache.max_sequences": 7}) as d:
        monkeypatch.setenv("ATTND_VLLM", d.url)
        yield d


@pytest.mark.parametrize(
    "n_ranks, n_seqs, says",
    [
        (1, 8, "max_num_seqs is 8, more than the daemon's cache.max_sequences, which is 7"),
        (2, 4, "max_num_seqs on 2 ranks together is 8, more than .* cache.max_sequences, which is 7"),
    ],
)
def test_more_requests_than_there_are_sequences_are_refused_at_the_start(few, n_ranks, n_seqs, says):
    with pytest.raises(ValueError, match=says):
        Engine(Model(), 128, BLOCK, n_ranks=n_ranks, scheduler_config__max_num_seqs=n_seqs)


def test_what_fills_a_graph_has_sequences_too(few):
    c = config(Model(), 128, BLOCK, scheduler_config__max_num_seqs=4)
    with attnd.connect(few.url) as client:
        check_limits(client.info, c, 3)
        with pytest.raises(ValueError, match="max_num_seqs with the 4 that fill .* is 8, more than .* 7"):
            check_limits(client.info, c, 4)


def test_out_of_sequences_does_not_end_an_engine(few, monkeypatch):
    """Others have five of them for a while: prompts are not begun, or what runs is computed again."""
    monkeypatch.setattr("attnd.serving.requests._OPEN_WAIT_S", 0.02)
    e = Engine(Model(), 128, BLOCK, scheduler_config__max_num_seqs=6)
    for i, p in enumerate(prompts(30, 3, shared=24)):
        e.add(f"r{i}", p, 8)
    with attnd.connect(few.url) as other:
        pool = other.pool(e.shared.requests.pool.spec.name)
        taken = [pool.open() for _ in range(5)]
        while len(e.done) < 6:
            e.step()
        assert n_sequences(few) == len(taken) + 2
        for seq in taken:
            seq.close()
    assert e.n_recomputed > 6
    e.run()
    check(e, 30)
    assert n_sequences(few) == 0
    e.close()


def test_weights_dtype_quantisation_and_rope_are_in_the_pools_identity(engine):
    def model(weight=1.0, **more):
        e = engine(weight=weight, **more)
        spec = e.shared.requests.pool.spec
        e.close()
        return spec.name, spec.model

    base = model()
    assert model() == base
    assert model(weight=1.0 + 2**-20)[0] != base[0]
    rope = types.SimpleNamespace(to_dict=lambda: {"layers": LAYERS, "rope_theta": 5e5})
    others = [base, model(model_config__quantization="awq"), model(model_config__hf_text_config=rope)]
    assert len({name for name, _ in others}) == len({identity for _, identity in others}) == 3


@pytest.mark.parametrize(
    "where, value, says",
    [
        ("parallel_config__pipeline_parallel_size", 2, "pipeline_parallel_size 2"),
        ("speculative_config", types.SimpleNamespace(method="eagle"), "speculative method 'eagle'"),
        ("cache_config__cache_dtype", "fp8", "kv_cache_dtype 'fp8'"),
        ("kv_transfer_config", types.SimpleNamespace(kv_connector="Lm"), "KV connector 'Lm'"),
        ("model_config__enable_sleep_mode", True, "sleep mode"),
        ("cache_config__num_gpu_blocks_override", None, "--num-gpu-blocks-override"),
        ("use_v2_model_runner", True, "model runner V2 on CPUs: VLLM_USE_V2_MODEL_RUNNER=0"),
        ("model_config__is_hybrid", True, "states beside their K and V"),
        ("model_config__is_encoder_decoder", True, "encoder-decoder"),
        ("model_config__runner_type", "pooling", "runner 'pooling'"),
    ],
)
def test_refused_by_name(where, value, says):
    of_platform = importlib.import_module("attnd_vllm.platform")
    with pytest.raises(ValueError, match=r"attnd-vllm does not support .*") as e:
        of_platform.check_config(config(Model(), 8, BLOCK, **{where: value}))
    assert says in str(e.value)


def test_model_runner_v2_is_not_refused_on_gpus():
    of_platform = importlib.import_module("attnd_vllm.platform")
    of_platform.check_config(config(Model(), 8, BLOCK, use_v2_model_runner=True), "cuda")


def test_endpoints_are_one_or_one_for_each_rank(monkeypatch):
    of_platform = importlib.import_module("attnd_vllm.platform")
    c = config(Model(), 8, BLOCK, parallel_config__tensor_parallel_size=2)
    for urls in "shm:///a", "shm:///a,shm:///b":
        monkeypatch.setenv("ATTND_VLLM", urls)
        of_platform.check_config(c, "cpu")
        of_platform.check_config(c, "cuda")
    monkeypatch.setenv("ATTND_VLLM", "shm:///a,shm:///b,shm:///c")
    with pytest.raises(ValueError, match="ATTND_VLLM has 3 endpoints, expected .* --tensor-parallel-size 2"):
        of_platform.check_config(c)


def test_refused_by_the_backend(engine):
    from attnd_vllm.backend import AttndBackend, AttndImpl

    with pytest.raises(ValueError, match="attention of type encoder"):
        AttndImpl(2, 8, 1.0, attn_type="encoder")
    assert AttndBackend.supported_kv_cache_dtypes == ["auto"]
    assert AttndBackend.supports_head_size(512)
    assert not AttndBackend.supports_head_size(12) and not AttndBackend.supports_head_size(520)


def test_a_layer_that_reads_anothers_k_and_v_has_its_place_in_the_pool(engine):
    from attnd_vllm.backend import AttndImpl, _places

    def layers(**of_the_last):
        impls = [AttndImpl(2, 8, 1.0, sliding_window=window) for window in (16, None)]
        impls.append(AttndImpl(2, 8, 1.0, kv_sharing_target_layer_name="0", **of_the_last))
        return {str(i): types.SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}

    assert _places(layers(sliding_window=16), ["0", "1", "2"]) == {"0": 0, "1": 1, "2": 0}
    with pytest.raises(ValueError, match="2, which reads the K and V of 0 and attends otherwise"):
        _places(layers(), ["0", "1", "2"])


def test_chunks_are_a_layers_own_option(engine):
    from attnd_vllm.backend import AttndImpl, _layer_spec

    impl = AttndImpl(2, 8, 1.0)
    assert _layer_spec(impl).branches == ()
    impl.chunk_tokens = 64
    assert _layer_spec(impl).branches == ((64, 1),)


def test_vllms_own_prefix_cache_is_refused(engine):
    e = engine()
    request = types.SimpleNamespace(request_id="r")
    with pytest.raises(RuntimeError, match="vLLM's own prefix cache is on"):
        e.of_scheduler.get_num_new_matched_tokens(request, 16)


def test_weights_do_not_change(engine):
    with pytest.raises(NotImplementedError, match="weights can't change"):
        engine().worker.reload_weights()


def test_a_version_that_is_not_known_is_refused(monkeypatch):
    import importlib.metadata

    monkeypatch.setenv("ATTND_VLLM", "ipc:///nowhere")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0")
    with pytest.raises(RuntimeError, match=r"this is 0\.99\.0"):
        entry_point()
    monkeypatch.delenv("ATTND_VLLM")
    assert entry_point() is None


def test_a_pool_smaller_than_the_engine_is_refused(engine, monkeypatch):
    monkeypatch.setenv("ATTND_VLLM_POOL_BLOCKS", "20")
    with pytest.raises(ValueError, match="ATTND_VLLM_POOL_BLOCKS is 20, less than the engine's 24"):
        engine(24)
    monkeypatch.setenv("ATTND_VLLM_POOL_BLOCKS", "many")
    with pytest.raises(ValueError, match="ATTND_VLLM_POOL_BLOCKS is 'many'"):
        engine(24)
