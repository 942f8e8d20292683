"""A real model generates text with attnd doing all of its attention.

generate_bytelm.py              8 prompts at once, 512 tokens each
generate_bytelm.py --live       the first prompt's text is shown as it comes
generate_bytelm.py --check      the same with plain numpy attention beside it: the tokens must be
                                identical (f32) and the logits within LOGITS_BOUND; exit 1 if not
"""

from __future__ import annotations

import sys
import time

import llama
import numpy as np
from over_attnd import PROMPTS, AttndAttention, arguments, pool_spec, show

import attnd

# Largest difference of a logit (they lie in about -20..20) that is put down to the order of float32
# additions; with a bf16 pool q, k, v and out are rounded to 8 bits besides.
LOGITS_BOUND = {"f32": 1e-4, "bf16": 0.5}


class Recorder:
    """Logits of every step, and the time of each."""

    def __init__(self, is_live: bool):
        self.is_live = is_live
        self.logits: list[np.ndarray] = []
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def __call__(self, logits: np.ndarray, tokens: np.ndarray) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self.logits.append(logits)
        if self.is_live:
            sys.stdout.write(chr(tokens[0]))
            sys.stdout.flush()
        self._last = time.perf_counter()

    def token_ms(self) -> float:
        """Median milliseconds of a decode step; the first one is the prompts'."""
        return float(np.median(self.seconds[1:]) * 1e3)


def run(model, attention, n_new, is_live=False):
    recorder = Recorder(is_live)
    texts = llama.generate(model, attention, PROMPTS, n_new, recorder)
    return texts, recorder


def compare(texts, recorder, expected, expected_recorder, dtype) -> bool:
    n_same = sum(a == b for a, b in zip(texts, expected))
    # logits are comparable while the tokens before them agree
    n_steps = next(
        (i for i, pair in enumerate(zip(zip(*texts), zip(*expected))) if pair[0] != pair[1]),
        len(texts[0]) - 1,
    )
    pairs = zip(recorder.logits[: n_steps + 1], expected_recorder.logits)
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    bound = LOGITS_BOUND[dtype]
    is_good = difference <= bound and (dtype != "f32" or n_same == len(texts))
    print(
        f"check: {n_same} of {len(texts)} texts identical over {len(texts[0])} tokens; logits of"
        f" {n_steps + 1} steps differ by at most {difference:.2g} (bound {bound:g}): "
        + ("ok" if is_good else "FAILED")
    )
    return is_good


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], 512)
    parser.add_argument("--live", action="store_true", help="show the first text as it comes")
    parser.add_argument("--check", action="store_true", help="compare with plain numpy attention")
    args = parser.parse_args()
    model = llama.Llama()
    with attnd.connect(args.url) as client:
        pool = client.create_pool(pool_spec(model, args.dtype))
        with AttndAttention(pool) as attention:
            if args.live:
                sys.stdout.write(PROMPTS[0].decode())
            texts, recorder = run(model, attention, args.tokens, args.live)
            if args.live:
                print(flush=True)  # before the daemon logs that the session ends
    show(PROMPTS, texts)
    print(
        f"{len(PROMPTS)} prompts, {args.tokens} tokens each over attnd ({client.info.backend},"
        f" {args.dtype}): {recorder.token_ms():.2f} ms a step of {len(PROMPTS)} tokens"
    )
    if not args.check:
        return 0
    expected, expected_recorder = run(model, llama.NumpyAttention(model.num_layers), args.tokens)
    print(f"plain numpy attention: {expected_recorder.token_ms():.2f} ms a step")
    return 0 if compare(texts, recorder, expected, expected_recorder, args.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
