"""How many of the blocks that queries choose are on the device, where the pool has few of a sequence's?

bytelm reads text of its own kind (Python source), token by token behind --context ones. In a pool that
holds all it attends to all, which is what goes on to the next layer; in a small one, whose other blocks
are in idle memory, to --blocks chosen ones. Of the small one: the share of chosen blocks that were there
(chosen_here, chosen_away), and a step's time, beside that of the same steps in a pool that holds all.

    bench_hot.py [--context 4096] [--blocks 16,32] [--pool 64,128,192]
"""

from __future__ import annotations

import argparse
import time

import bench_choose
import numpy as np
import own_daemon


class Beside:
    """llama.Attention over one pool, the same steps in another."""

    def __init__(self, pools, n_chosen: int):
        self.pools, self.n_chosen = pools, n_chosen
        self.sequences = [p.open() for p in pools]
        self.seconds: list[float] = []

    def begin(self, items) -> None:
        (self.item,) = items

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        (large, small), tokens = self.pools, (self.item.pos, self.item.n_tokens)
        all_of_it = large.step(layer, [(self.sequences[0], *tokens)], q, k, v).out
        begun = time.perf_counter()
        small.step(layer, [(self.sequences[1], *tokens)], q, k, v, choose_blocks=self.n_chosen)
        self.seconds.append(time.perf_counter() - begun)
        return all_of_it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--context", type=int, default=4096, help="tokens in front of those measured")
    parser.add_argument("--measured", type=int, default=128, help="tokens that are counted")
    parser.add_argument("--blocks", default="16,32", help="numbers of chosen blocks of 16 tokens")
    parser.add_argument("--pool", default="64,128,192", help="blocks of the small pool")
    args = parser.parse_args()
    n_all = (args.context + args.measured) // 16 + 8
    settings = {
        "device.kv_memory": "1G",
        "cache.idle_memory": "256M",
        "cache.max_seq_tokens": args.context + args.measured,
    }
    print(f"bytelm, {args.context} tokens of {n_all - 8} blocks, {args.measured} measured")
    print("chosen  pool  there   step us, median and mean")
    for n_chosen in (int(n) for n in args.blocks.split(",")):
        for n_blocks in [*(int(n) for n in args.pool.split(",")), n_all]:
            with own_daemon.running(args, args.transport, settings) as url:
                measure(url, args, n_chosen, n_blocks, n_all)


def measure(url: str, args: argparse.Namespace, n_chosen: int, n_blocks: int, n_all: int) -> None:
    import llama
    import over_attnd

    import attnd

    model = llama.Llama()
    ids = bench_choose.text(args.context + args.measured)
    with attnd.connect(url) as client:
        large = over_attnd.pool_spec(model, n_blocks=n_all)
        small = over_attnd.pool_spec(model, n_blocks=n_blocks)._replace(name="bytelm-small")
        attention = Beside([client.create_pool(s) for s in (large, small)], n_chosen)
        counted = ("chosen_here_total", "chosen_away_total")
        for pos in range(0, args.context, 64):
            n = min(64, args.context - pos)
            model.forward(ids[pos : pos + n], [llama.Item(0, pos, n)], attention)
        before = client.stats()
        attention.seconds.clear()
        for pos in range(args.context, len(ids)):
            model.forward(ids[pos : pos + 1], [llama.Item(0, pos, 1)], attention)
        after = client.stats()
        here, away = (after[x] - before[x] for x in counted)
        us = 1e6 * np.array(attention.seconds)
        there = here / (here + away)
        print(f"{n_chosen:6}  {n_blocks:4}  {there:.4f}  {np.median(us):.0f} {us.mean():.0f}", flush=True)


if __name__ == "__main__":
    main()
