"""Every example is run; each compares its text with plain numpy attention's and fails by exit code."""

import subprocess
import sys

import pytest
from conftest import PACKAGE

EXAMPLES = PACKAGE / "examples"


def run(python_env, name, *flags):
    r = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


def test_512_greedy_tokens_of_8_prompts_are_those_of_numpy_attention(python_env):
    out = run(python_env, "generate_bytelm.py", "--check")
    assert "8 of 8 texts identical over 512 tokens" in out


def test_bf16_logits_stay_within_their_bound(python_env):
    out = run(
        python_env, "generate_bytelm.py", "--check", "--dtype", "bf16", "--tokens", "32", "--live"
    )
    assert out.startswith("def read(self, size):") and "(bound 0.5): ok" in out


@pytest.mark.parametrize("dtype", ["f32"])
def test_two_workers_share_a_daemon(python_env, dtype):
    assert "8 of 8 texts" in run(python_env, "two_workers.py", "--tokens", "48", "--dtype", dtype)


def test_a_killed_workers_sequences_are_finished_by_another(python_env):
    out = run(python_env, "adopt.py", "--tokens", "48")
    assert "adopted 8 sequences" in out and "8 of 8 texts" in out


def test_speculative_text_is_that_of_greedy_decoding(python_env):
    out = run(python_env, "speculative.py", "--tokens", "48")
    assert "8 of 8 texts" in out and "guesses accepted" in out
