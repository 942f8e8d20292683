"""Time of a decode step of the numpy example: attention by attnd against plain numpy attention.

    python3 clients/python/bench/bench_numpy.py [--prefix build] [--backend cpu]

Inside the timed window: the whole forward pass of llama.Llama (bytelm, 4 layers), all sequences of
the batch, one token each. The median of --steps steps after the prompt; f32. "attention alone" is the
part of a step spent in it, numpy's and attnd's.
"""

from __future__ import annotations

import argparse
import time

import own_daemon

import llama
import numpy as np
from over_attnd import AttndAttention, pool_spec

import attnd


class Timed:
    """An attention object that sums the seconds spent in attend()."""

    def __init__(self, attention):
        self.attention = attention
        self.begin = attention.begin
        self.seconds = 0.0

    def attend(self, layer, q, k, v):
        start = time.perf_counter()
        out = self.attention.attend(layer, q, k, v)
        self.seconds += time.perf_counter() - start
        return out


def decode(model, attention, batch: int, context: int, n_steps: int) -> tuple[float, float]:
    """Median milliseconds of a step, and of the attention in it."""
    rng = np.random.default_rng(0)
    timed = Timed(attention)
    for i in range(batch):  # prompts one by one: numpy's attention makes [heads, n, n] scores
        tokens = rng.integers(32, 127, context)
        model.forward(tokens, [llama.Item(i, 0, context)], timed)
    tokens, steps, attend = rng.integers(32, 127, batch), [], []
    for n in range(n_steps + 2):
        timed.seconds = 0.0
        start = time.perf_counter()
        items = [llama.Item(i, context + n, 1) for i in range(batch)]
        tokens = model.forward(tokens, items, timed).argmax(axis=-1)
        steps.append(time.perf_counter() - start)
        attend.append(timed.seconds)
    return float(np.median(steps[2:]) * 1e3), float(np.median(attend[2:]) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="64,512,2048")
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    model = llama.Llama()
    print(
        "| transport | batch | context | numpy, ms per step | attnd, ms a step | attention alone, ms |"
        " tokens/s over attnd | attnd against numpy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for transport in args.transport.split(","):
        with own_daemon.running(args, transport, {"device.kv_memory": "4G"}) as url:
            with attnd.connect(url, timeout=60) as client:
                pool = client.create_pool(pool_spec(model, n_blocks=0))
                for batch in map(int, args.batches.split(",")):
                    for context in map(int, args.contexts.split(",")):
                        plain = llama.NumpyAttention(model.num_layers)
                        numpy_ms, numpy_attend = decode(model, plain, batch, context, args.steps)
                        with AttndAttention(pool) as attention:
                            ms, attend = decode(model, attention, batch, context, args.steps)
                        print(
                            f"| {transport} | {batch} | {context} | {numpy_ms:.2f} | {ms:.2f} |"
                            f" {numpy_attend:.2f} and {attend:.2f} | {batch / ms * 1e3:.0f} |"
                            f" {numpy_ms / ms:.2f}x |",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
