"""Every example is run; each compares its text with plain numpy attention's and fails by exit code."""

import os
import subprocess
import sys

import pytest
from conftest import BUILD, PACKAGE

EXAMPLES = PACKAGE / "examples"


def run(python_env, name, *flags):
    r = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *flags],
        env=python_env,
        capture_output=True,
        text=True,
        timeout=1000,  # ends what hangs; a busy machine takes minutes
    )
    assert r.returncode == 0, r.stdout + r.stderr
    return r.stdout


def test_greedy_tokens_of_8_prompts_are_those_of_numpy_attention(python_env):
    tokens = os.environ.get("ATTN_TOKENS", "40")  # 512 in the long mode
    out = run(python_env, "generate_bytelm.py", "--check", "--tokens", tokens)
    assert f"8 of 8 texts identical over {tokens} tokens" in out


def test_bf16_logits_stay_within_their_bound(python_env):
    out = run(
        python_env, "generate_bytelm.py", "--check", "--dtype", "bf16", "--tokens", "32", "--live"
    )
    assert out.startswith("def read(self, size):") and "(bound 0.5): ok" in out


@pytest.mark.parametrize("dtype", ["f32"])
def test_two_workers_share_a_daemon(python_env, dtype):
    assert "8 of 8 texts" in run(python_env, "two_workers.py", "--tokens", "24", "--dtype", dtype)


def test_the_second_process_computes_no_prompt_that_the_first_has(python_env):
    out = run(python_env, "shared_prompt.py", "--tokens", "8", "--same", "640")
    assert "process 1: 640 of 654 tokens were in the cache" in out and "4 of 4 texts" in out


def test_a_killed_workers_sequences_are_finished_by_another(python_env):
    out = run(python_env, "adopt.py", "--tokens", "48")
    assert "adopted 8 sequences" in out and "8 of 8 texts" in out


def test_speculative_text_is_that_of_greedy_decoding(python_env):
    out = run(python_env, "speculative.py", "--tokens", "48")
    assert "8 of 8 texts" in out and "guesses accepted" in out


def test_text_by_trees_is_that_of_greedy_decoding(python_env):
    out = run(python_env, "speculative.py", "--tokens", "96", "--tree", "16")
    assert "8 of 8 texts" in out
    assert float(out.split(" tokens per step")[0].split()[-1]) > 1


def test_the_model_in_c_says_the_same_token_for_token(python_env, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import llama
    import over_attnd

    model = llama.Llama()
    texts = llama.generate(model, llama.NumpyAttention(model.num_layers), over_attnd.PROMPTS, 64)
    expected = b"".join(p + t + b"\n--\n" for p, t in zip(over_attnd.PROMPTS, texts))
    weights = EXAMPLES / "bytelm" / "model.safetensors"
    command = [BUILD / "bin" / "bytelm", weights, "64", *over_attnd.PROMPTS]
    r = subprocess.run(command, env=python_env, capture_output=True)
    assert (r.returncode, r.stderr) == (0, b"")
    assert r.stdout == expected


def test_the_model_in_c_says_what_is_wrong(python_env, tmp_path):
    def said(*arguments):
        r = subprocess.run(
            [BUILD / "bin" / "bytelm", *arguments], env=python_env, capture_output=True
        )
        assert r.returncode == 1
        return r.stderr.decode()

    (tmp_path / "short").write_bytes(b"123")
    (tmp_path / "no model").write_bytes(b"\x02" + bytes(7) + b"{}")
    weights = EXAMPLES / "bytelm" / "model.safetensors"
    assert "1 to 4096 tokens" in said(weights, "0", "x")
    assert "cannot read" in said("/nowhere", "4", "x")
    assert "cannot read" in said(tmp_path / "short", "4", "x")
    assert "holds no Llama" in said(tmp_path / "no model", "4", "x")
    assert "n_tokens is 0" in said(weights, "4", "")
