"""Two processes whose prompts begin alike: what the first has computed, the second need not.

Both are given the same system prompt and a question of their own, one process after the other. Each
answers twice, from an empty sequence and from one that is opened with the prompt's token ids: that one
begins with what the cache has of them. Printed is the time to the first token, from opening the
sequence to its logits. The answers are compared with those of plain numpy attention: exit 1 if a token
differs, or if the second process found nothing.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import time

import llama
import numpy as np
from over_attnd import AttndAttention, arguments, pool_spec

import attnd

SYSTEM_PROMPT = pathlib.Path(llama.__file__).read_bytes()
QUESTIONS = [b"\n\ndef load(", b"\n\nclass Cache:"]


def answer(model, attention, prompt: bytes, n_cached: int, n_new: int) -> tuple[bytes, float]:
    """Greedy text after a prompt whose first n_cached tokens are in sequence 0; when its first token
    was there."""
    tokens, pos = np.frombuffer(prompt, np.uint8)[n_cached:], n_cached
    text: list[int] = []
    first = 0.0
    while len(text) < n_new:
        logits = model.forward(tokens, [llama.Item(0, pos, len(tokens))], attention)
        pos += len(tokens)
        tokens = logits[-1:].argmax(axis=-1)
        text.append(int(tokens[0]))
        first = first or time.perf_counter()
    return bytes(text), first


def work(url: str, dtype: str, n_same: int, n_new: int, number: int) -> None:
    """A worker: answers its question without and with sharing, and prints what came of it as JSON."""
    model = llama.Llama()
    prompt = SYSTEM_PROMPT[:n_same] + QUESTIONS[number]
    model.forward(np.zeros(8, np.uint8), [llama.Item(0, 0, 8)], llama.NumpyAttention(model.num_layers))
    result: dict[str, object] = {"texts": [], "seconds": []}
    with attnd.connect(url, name=f"worker {number}") as client:
        pool = client.create_pool(pool_spec(model, dtype))
        for ids in (b"", prompt):  # bytelm's token ids are bytes
            start = time.perf_counter()
            sequence = pool.open(tokens=ids)
            with AttndAttention(pool, {0: sequence}) as attention:
                text, first = answer(model, attention, prompt, sequence.n_cached, n_new)
            result["texts"].append(text.decode("latin-1"))
            result["seconds"].append(first - start)
            result["n_cached"] = sequence.n_cached
    json.dump(result, sys.stdout)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 32)
    parser.add_argument("--same", type=int, default=2000, help="tokens that both prompts begin with")
    parser.add_argument("--worker", type=int, help="run as this worker (0 or 1)")
    args = parser.parse_args()
    if args.worker is not None:
        work(args.url, args.dtype, args.same, args.tokens, args.worker)
        return 0

    command = [sys.executable, __file__, "--url", args.url, "--tokens", str(args.tokens)]
    command += ["--dtype", args.dtype, "--same", str(args.same), "--worker"]
    model = llama.Llama()
    n_same = 0
    for number, question in enumerate(QUESTIONS):
        worker = subprocess.run([*command, str(number)], stdout=subprocess.PIPE, text=True)
        if worker.returncode != 0:
            return 1
        result = json.loads(worker.stdout)
        prompt, without, shared = SYSTEM_PROMPT[: args.same] + question, *result["seconds"]
        print(
            f"process {number}: {result['n_cached']} of {len(prompt)} tokens were in the cache;"
            f" first token after {without * 1e3:.1f} ms without them, {shared * 1e3:.1f} ms with"
        )
        expected, _ = answer(model, llama.NumpyAttention(model.num_layers), prompt, 0, args.tokens)
        n_same += sum(text.encode("latin-1") == expected for text in result["texts"])
    n_shared = result["n_cached"]
    print(f"{n_same} of {2 * len(QUESTIONS)} texts are those of plain numpy attention")
    is_good = n_same == 2 * len(QUESTIONS) or args.dtype != "f32"
    return 0 if is_good and n_shared >= args.same // 16 * 16 else 1


if __name__ == "__main__":
    sys.exit(main())
