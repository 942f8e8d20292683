"""Speculative decoding: the model's first two layers guess, the whole model checks several at once.

The draft needs no cache of its own. Its layers are the model's first two, so it writes the same keys
and values to the same sequences, in layers 0 and 1 only; each layer has its own length. The check
feeds the guesses through all layers in one step of several tokens; what was wrong is truncated.

With --tree the guesses are what came behind the same bytes before, in any of the texts: a tree of
so many nodes per sequence, checked in one step, of which the path that was right is committed.

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


def guess_tree(text: bytes, seen: list[bytes], n_nodes: int) -> tuple[list[int], list[int]]:
    """Tokens and parents: the newest byte, and what came behind the longest ends of the text."""
    tokens, parents = [text[-1]], [-1]
    children: dict[tuple[int, int], int] = {}
    for n in range(8, 0, -1):
        end = text[-n:]
        for other in seen:
            at = other.find(end)
            while at >= 0 and len(tokens) < n_nodes:
                node = 0
                for byte in other[at + n : at + n + 8]:
                    if (node, byte) not in children and len(tokens) < n_nodes:
                        children[node, byte] = len(tokens)
                        tokens.append(byte)
                        parents.append(node)
                    if (node, byte) not in children:
                        break
                    node = children[node, byte]
                at = other.find(end, at + 1)
    return tokens, parents


def right_path(tokens: list[int], parents: list[int], right: np.ndarray) -> list[int]:
    """The nodes from the first downwards that the model itself would have written."""
    path = [0]
    for node in range(1, len(tokens)):  # parents come before their children
        if parents[node] == path[-1] and tokens[node] == right[path[-1]]:
            path.append(node)
    return path


def speculate_by_trees(model, attention, prompts, n_new: int, n_nodes: int):
    """Texts, and (tokens written, checks), over all sequences."""
    items = [llama.Item(i, 0, len(p)) for i, p in enumerate(prompts)]
    packed = np.concatenate([np.frombuffer(p, np.uint8) for p in prompts])
    logits = model.forward(packed, items, attention)
    newest = logits[np.cumsum([len(p) for p in prompts]) - 1].argmax(axis=-1)
    texts = [p + bytes([t]) for p, t in zip(prompts, newest)]
    n_written = n_checks = 0
    while min(len(t) - len(p) for t, p in zip(texts, prompts)) < n_new:
        trees = [guess_tree(t, texts, n_nodes) for t in texts]
        items = [
            llama.Item(i, len(t) - 1, len(tokens), tuple(parents))
            for i, (t, (tokens, parents)) in enumerate(zip(texts, trees))
        ]
        fed = np.concatenate([tokens for tokens, _ in trees])
        right = model.forward(fed, items, attention).argmax(axis=-1)
        calls, row = attention.pool.calls(), 0
        for i, (tokens, parents) in enumerate(trees):
            of_tree = right[row : row + len(tokens)]
            row += len(tokens)
            path = right_path(tokens, parents, of_tree)
            calls.commit(attention.sequences[i], path)
            texts[i] += bytes(int(of_tree[node]) for node in path)
            n_written += len(path)
            n_checks += 1
        for outcome in calls.run():
            if isinstance(outcome, attnd.AttndError):
                raise outcome
    return [t[len(p) :][:n_new] for t, p in zip(texts, prompts)], (n_written, n_checks)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 128)
    parser.add_argument("--guesses", type=int, default=3, help="tokens the draft makes at a time")
    parser.add_argument("--tree", type=int, default=0, help="guess by trees of up to so many nodes")
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
            if args.tree > 0:
                texts, (n_written, n_checks) = speculate_by_trees(
                    model, attention, PROMPTS, args.tokens, args.tree
                )
                how = f"{n_written / n_checks:.2f} tokens per step"
            else:
                texts, (n_made, n_accepted, n_checks) = speculate(
                    model, model.first_layers(2), attention, PROMPTS, args.tokens, args.guesses
                )
                how = (
                    f"{n_accepted} of {n_made} guesses accepted"
                    f" ({100 * n_accepted / n_made:.0f} %),"
                    f" {n_checks} checks for {args.tokens} tokens"
                )
            speculative_s = time.perf_counter() - start
    show(PROMPTS, texts)
    n_same = sum(a == b for a, b in zip(texts, expected))
    print(f"{n_same} of {len(texts)} texts are those of plain greedy decoding")
    print(f"{how}; {speculative_s:.2f} s, plain {plain_s:.2f} s")
    return 0 if n_same == len(texts) or args.dtype != "f32" else 1


if __name__ == "__main__":
    sys.exit(main())
