"""SGLang itself over attnd, beside its own attention: the same greedy text in f32, with prompts in
chunks, hits in a second round, retraction and aborts, of a model with heads and of one with latents
(MLA). $SGLANG_PYTHON is the interpreter of an environment that has SGLang, and attnd-sglang without its
dependencies (`pip install --no-deps`); skipped without. $SGLANG_MODEL is a small model with heads, by
default that of clients/python/examples.
"""

import json
import os
import pathlib
import subprocess
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/tests")]

if "SGLANG_PYTHON" not in os.environ:
    pytest.skip("SGLANG_PYTHON names no interpreter", allow_module_level=True)

from conftest import BUILD, PACKAGE, Daemon  # noqa: E402

import attnd  # noqa: E402

MODEL = os.environ.get("SGLANG_MODEL", str(PACKAGE / "examples" / "bytelm"))
TEXT = (HERE.parents[2] / "README.md").read_bytes()
PROMPTS = [list(TEXT[i * 57 : i * 57 + n]) for i, n in enumerate((5, 20, 70, 130, 200, 400, 64, 96))]
PROMPTS += [list(TEXT[100:300]) + list(TEXT[i * 80 : i * 80 + 25]) for i in range(4)]


class Driver:
    """drive_sglang.py, which does what it is asked, one after another."""

    def __init__(self, folder):
        env = {
            **os.environ, "PYTHONPATH": ":".join(map(str, (HERE / "stand_in", PACKAGE / "src", HERE.parent / "src"))),
            "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
            "ATTN_LIBRARY": str(BUILD / "lib" / "libattn.so.0"), "HF_HUB_OFFLINE": "1",
        }
        self._folder, self._n = folder, 0
        command = [os.environ["SGLANG_PYTHON"], HERE / "drive_sglang.py"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, **job):
        self._n += 1
        log = self._folder / f"{self._n}.log"
        self._process.stdin.write(json.dumps({**job, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("SAID "):
                said = json.loads(line[5:])
                assert said, log.read_text()[-3000:]
                return {**said, "log": log.read_text()}
        raise AssertionError("the driver has ended")

    def close(self):
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    d = Driver(tmp_path_factory.mktemp("driver"))
    yield d
    d.close()


@pytest.fixture(scope="module", params=["heads", "latents"])
def model(request, driver, tmp_path_factory):
    if request.param == "heads":
        return MODEL
    path = str(tmp_path_factory.mktemp("model"))
    driver.ask(makes=path)
    return path


@pytest.fixture(scope="module")
def run(driver, model):
    def run(url=None, retracts=False, meanwhile=None, **options):
        """meanwhile(is_over): called beside it; gives what SGLang said under "log"."""
        env = {}
        if url:
            env["ATTND_SGLANG"] = url
            options = {"attention_backend": "attnd", "radix_cache_backend": "attnd", **options}
        else:
            options = {"attention_backend": "torch_native", **options}
        is_over = threading.Event()
        beside = threading.Thread(target=meanwhile or (lambda _: None), args=(is_over,))
        beside.start()
        try:
            said = driver.ask(model=model, env=env, options=options, prompts=PROMPTS, retracts=retracts)
        finally:
            is_over.set()
            beside.join()
        assert "Failed to apply hooks" not in said["log"], said["log"]
        return said

    return run


@pytest.fixture(scope="module")
def own(run):
    return run()


@pytest.fixture
def daemon():
    with Daemon(**{"device.kv_memory": "128M", "engine.lease": "60s"}) as d:
        yield d


def n_sequences(d):
    with attnd.connect(d.url) as c:
        return c.stats()["sequences"]


def test_text_and_hits_are_those_of_sglang_alone_and_the_next_engine_finds_them(run, own, daemon):
    for first in True, False:
        said = run(daemon.url)
        assert said["texts"] == own["texts"]
        assert said["cached"][1] == own["cached"][1] and sum(said["cached"][1]) > 800
        assert first or sum(said["cached"][0]) >= sum(own["cached"][1])  # in its first round
        assert said["aborted"] == ["abort", "abort"]
        assert n_sequences(daemon) == 0


def test_the_pool_of_a_model_with_latents_has_them_once(run, own, model, daemon):
    if model == MODEL:
        pytest.skip("a model with heads")
    said = run(daemon.url)
    assert said["texts"] == own["texts"]
    with attnd.connect(daemon.url) as c:
        (pool,) = c.stats()["pools"]
        spec = c.pool(pool["name"]).spec
    assert (spec.num_q_heads, spec.num_kv_heads, spec.block_tokens) == (4, 1, 32)
    assert (spec.head_dim_k, spec.head_dim_v, spec.is_v_in_k) == (160, 128, True)


def test_retracted_requests_go_on(run, own, daemon):
    said = run(daemon.url, retracts=True, max_total_tokens=1024)
    assert said["texts"] == own["texts"]
    assert said["retracted"] > 0
    assert n_sequences(daemon) == 0


def test_what_an_empty_daemon_has_lost_is_computed_again(run, own, daemon):
    n = [0]

    def begin_empty(is_over):
        """Three times, each as requests run."""
        while n[0] < 3 and not is_over.wait(0.05):
            try:
                if n_sequences(daemon) >= 4:
                    daemon.restart()
                    n[0] += 1
            except attnd.AttndError:
                pass  # it is about to listen

    said = run(daemon.url, meanwhile=begin_empty, log_level="warning")
    assert n[0] == 3
    # one for each, but for one that came as what another had lost was computed
    assert said["log"].count("their tokens are computed again") > 0
    assert said["texts"] == own["texts"]
    assert n_sequences(daemon) == 0
