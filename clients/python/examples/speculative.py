"""Speculative decoding: the model's first two layers guess, the whole model checks several at once.

The draft needs no cache of its own. Its layers are the model's first two, so it writes the same keys
and values to the same sequences, in layers 0 and 1 only; each layer has its own length. The check
feeds the guesses through all layers in one step of several tokens; what was wrong is truncated.
The text is compared with plain greedy decoding's: exit 1 if a token differs.
"""

from __future__ import annotations

import sys
import time

import llama
import numpy as np
from over_attnd import PROMPTS, AttndAttention, arguments, pool_spec, show

import attnd


def guess(draft, attention, tokens: np.ndarray, lengths: list[int], n_guesses: int) -> np.ndarray:
    """[sequences, n_guesses] tokens that the draft thinks come after `tokens`."""
    guesses = []
    for i in range(n_guesses):
        items = [llama.Item(s, n + i, 1) for s, n in enumerate(lengths)]
        tokens = draft.forward(tokens, items, attention).argmax(axis=-1)
        guesses.append(tokens)
    return np.stack(guesses, axis=1)


def check(model, attention, tokens, guesses, lengths) -> np.ndarray:
    """[sequences, n_guesses + 1] tokens the model puts after each of `tokens` and the guesses."""
    fed = np.concatenate([tokens[:, None], guesses], axis=1)
    items = [llama.Item(s, n, fed.shape[1]) for s, n in enumerate(lengths)]
    logits = model.forward(fed.reshape(-1), items, attention)
    return logits.argmax(axis=-1).reshape(fed.shape)


def speculate(model, draft, attention, prompts, n_new: int, n_guesses: int):
    """Texts, and (guesses made, guesses accepted, checks)."""
    items = [llama.Item(i, 0, len(p)) for i, p in enumerate(prompts)]
    packed = np.concatenate([np.frombuffer(p, np.uint8) for p in prompts])
    logits = model.forward(packed, items, attention)
    tokens = logits[np.cumsum([len(p) for p in prompts]) - 1].argmax(axis=-1)
    texts = [[int(t)] for t in tokens]
    lengths = [len(p) for p in prompts]  # cached; the newest token is not
    n_made = n_accepted = n_checks = 0
    while min(map(len, texts)) < n_new:
        guesses = guess(draft, attention, tokens, lengths, n_guesses)
        right = check(model, attention, tokens, guesses, lengths)
        n_checks += 1
        n_good = np.cumprod(guesses == right[:, :-1], axis=1).sum(axis=1)
        for s, good in enumerate(n_good):
            n_made += n_guesses
            n_accepted += int(good)
            texts[s] += right[s, : good + 1].tolist()
            lengths[s] += int(good) + 1
            if good < n_guesses:
                attention.sequences[s].truncate(lengths[s])
        tokens = np.array([text[-1] for text in texts])
    return [bytes(t[:n_new]) for t in texts], (n_made, n_accepted, n_checks)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 128)
    parser.add_argument("--guesses", type=int, default=3, help="tokens the draft makes at a time")
    args = parser.parse_args()
    model = llama.Llama()
    with attnd.connect(args.url) as client:
        pool = client.create_pool(pool_spec(model, args.dtype))
        with AttndAttention(pool) as attention:
            start = time.perf_counter()
            expected = llama.generate(model, attention, PROMPTS, args.tokens)
            plain_s = time.perf_counter() - start
        with AttndAttention(pool) as attention:
            start = time.perf_counter()
            texts, (n_made, n_accepted, n_checks) = speculate(
                model, model.first_layers(2), attention, PROMPTS, args.tokens, args.guesses
            )
            speculative_s = time.perf_counter() - start
    show(PROMPTS, texts)
    n_same = sum(a == b for a, b in zip(texts, expected))
    print(f"{n_same} of {len(texts)} texts are those of plain greedy decoding")
    print(
        f"{n_accepted} of {n_made} guesses accepted ({100 * n_accepted / n_made:.0f} %),"
        f" {n_checks} checks for {args.tokens} tokens; {speculative_s:.2f} s, plain {plain_s:.2f} s"
    )
    return 0 if n_same == len(texts) or args.dtype != "f32" else 1


if __name__ == "__main__":
    sys.exit(main())
