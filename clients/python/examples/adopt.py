"""A worker is killed in the middle of its work; another one adopts its sequences and finishes them.

What the new worker knows is what the dead one had said: the sequences' ids and the tokens so far.
The cached keys and values are in the daemon and are not computed again. A sequence may be longer in
the cache than what was said, and longer in one layer than in the next: truncate() makes it even.
The text is compared with that of an undisturbed run: exit 1 if a token differs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import llama
import numpy as np
from over_attnd import PROMPTS, AttndAttention, arguments, pool_spec, show

import attnd


def work(url: str, dtype: str, n_new: int) -> None:
    """The first worker: prints its sequences' ids, then each step's tokens, a JSON line each."""
    model = llama.Llama()
    with attnd.connect(url, name="first worker") as client:
        attention = AttndAttention(client.create_pool(pool_spec(model, dtype)))
        attention.begin([llama.Item(i, 0, 1) for i in range(len(PROMPTS))])  # opens them
        print(json.dumps([s.id for s in attention.sequences.values()]), flush=True)

        def say(logits: np.ndarray, tokens: np.ndarray) -> None:
            print(json.dumps(tokens.tolist()), flush=True)

        llama.generate(model, attention, PROMPTS, n_new, say)


def kill_in_the_middle(command: list[str], n_steps: int) -> tuple[list[int], list[list[int]]]:
    """Runs a worker, kills it after n_steps; the ids and the tokens that it said."""
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    ids = json.loads(worker.stdout.readline())
    steps = [json.loads(worker.stdout.readline()) for _ in range(n_steps)]
    worker.send_signal(signal.SIGKILL)
    # lines that were in the pipe count; a last line without its end does not
    rest = worker.stdout.read().split("\n")[:-1]
    worker.wait()
    return ids, steps + [json.loads(line) for line in rest]


def finish(model, pool, ids, said: list[list[int]], n_new: int) -> list[bytes]:
    """Adopts the sequences and generates what is missing."""
    texts = [list(line) for line in zip(*said)]
    sequences = {i: pool.adopt(seq_id) for i, seq_id in enumerate(ids)}
    attention = AttndAttention(pool, sequences)
    tokens, items = [], []
    for i, sequence in sequences.items():
        known = list(PROMPTS[i]) + texts[i]
        # every layer has this many; the last known token was perhaps not yet put in
        n_cached = min(min(sequence.layer_len), len(known) - 1)
        if max(sequence.layer_len) > n_cached:
            sequence.truncate(n_cached)
        tokens += known[n_cached:]
        items.append(llama.Item(i, n_cached, len(known) - n_cached))
    print(f"adopted {len(ids)} sequences; {len(tokens)} of their tokens are put in again")
    while len(texts[0]) < n_new:
        logits = model.forward(np.array(tokens), items, attention)
        tokens = logits[np.cumsum([i.n_tokens for i in items]) - 1].argmax(axis=-1).tolist()
        for text, token in zip(texts, tokens):
            text.append(token)
        items = [llama.Item(i.seq, i.pos + i.n_tokens, 1) for i in items]
    attention.close()
    return [bytes(t) for t in texts]


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 128)
    parser.add_argument("--worker", action="store_true", help="run as the first worker")
    args = parser.parse_args()
    if args.worker:
        work(args.url, args.dtype, args.tokens)
        return 0

    command = [sys.executable, __file__, "--url", args.url, "--tokens", str(args.tokens)]
    ids, said = kill_in_the_middle([*command, "--dtype", args.dtype, "--worker"], args.tokens // 2)
    print(f"killed the first worker; it had said {len(said)} of {args.tokens} tokens")
    model = llama.Llama()
    with attnd.connect(args.url, name="second worker") as client:
        pool = client.create_pool(pool_spec(model, args.dtype))
        texts = finish(model, pool, ids, said, args.tokens)
    show(PROMPTS, texts)
    expected = llama.generate(model, llama.NumpyAttention(model.num_layers), PROMPTS, args.tokens)
    n_same = sum(a == b for a, b in zip(texts, expected))
    print(f"{n_same} of {len(texts)} texts are those of an undisturbed run with numpy attention")
    return 0 if n_same == len(texts) or args.dtype != "f32" else 1


if __name__ == "__main__":
    sys.exit(main())
