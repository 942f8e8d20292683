"""SGLang itself over attnd, beside its own attention: the same greedy text in f32, with prompts in
chunks, hits in a second round, retraction and aborts. $SGLANG_PYTHON is the interpreter of an
environment that has SGLang; skipped without. $SGLANG_MODEL is a small model, by default that of
clients/python/examples.
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


def run(url=None, retracts=False, meanwhile=None, **options):
    """meanwhile(is_over): called beside it; gives what SGLang said under "log"."""
    env = {
        **os.environ, "PYTHONPATH": ":".join(map(str, (HERE / "stand_in", PACKAGE / "src", HERE.parent / "src"))),
        "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
        "ATTN_LIBRARY": str(BUILD / "lib" / "libattn.so.0"),
    }
    if retracts:
        env |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
    if url:
        env["ATTND_SGLANG"] = url
        options = {"attention_backend": "attnd", "radix_cache_backend": "attnd", **options}
    else:
        options = {"attention_backend": "torch_native", **options}
    command = [os.environ["SGLANG_PYTHON"], HERE / "drive_sglang.py", MODEL, json.dumps(options)]
    pipe = subprocess.PIPE
    sglang = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    is_over = threading.Event()
    beside = threading.Thread(target=meanwhile or (lambda _: None), args=(is_over,))
    beside.start()
    try:
        out, log = sglang.communicate(json.dumps(PROMPTS))
    finally:
        is_over.set()
        beside.join()
    said = [line[5:] for line in out.splitlines() if line.startswith("SAID ")]
    assert said, log[-3000:]
    assert "Failed to apply hooks" not in log, log
    return {**json.loads(said[0]), "log": log}


@pytest.fixture(scope="module")
def own():
    return run()


@pytest.fixture
def daemon():
    with Daemon(**{"device.kv_memory": "128M", "engine.lease": "60s"}) as d:
        yield d


def n_sequences(d):
    with attnd.connect(d.url) as c:
        return c.stats()["sequences"]


def test_text_and_hits_are_those_of_sglang_alone_and_the_next_engine_finds_them(own, daemon):
    for first in True, False:
        said = run(daemon.url)
        assert said["texts"] == own["texts"]
        assert said["cached"][1] == own["cached"][1] and sum(said["cached"][1]) > 800
        assert first or sum(said["cached"][0]) >= sum(own["cached"][1])  # in its first round
        assert said["aborted"] == ["abort", "abort"]
        assert n_sequences(daemon) == 0


def test_retracted_requests_go_on(own, daemon):
    said = run(daemon.url, retracts=True, max_total_tokens=1024)
    assert said["texts"] == own["texts"]
    assert said["retracted"] > 0
    assert n_sequences(daemon) == 0


def test_what_an_empty_daemon_has_lost_is_computed_again(own, daemon):
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
    assert said["log"].count("their tokens are computed again") >= 3
    assert said["texts"] == own["texts"]
    assert n_sequences(daemon) == 0
