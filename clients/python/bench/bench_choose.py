"""What share of a model's softmax do the blocks hold that attnd chooses (Pool.step(choose_blocks=))?

bytelm reads text of its own kind (Python source). Behind --context tokens each query attends over all
and over N chosen blocks; the share is exp(lse chosen - lse all), for each token, layer and query head.
What goes on to the next layer is dense attention's.

    bench_choose.py [--context 4096] [--blocks 8,16,32,64]
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
import own_daemon


def text(n: int) -> np.ndarray:
    """n bytes of the standard library's argparse and those behind it."""
    folder = pathlib.Path(argparse.__file__).parent
    raw = b"".join(p.read_bytes() for p in [folder / "argparse.py", *sorted(folder.glob("t*.py"))])
    if len(raw) < n:
        raise SystemExit(f"--context is {n}, there are {len(raw)} bytes of text")
    return np.frombuffer(raw[:n], np.uint8)


class Measured:
    """llama.Attention over attnd that keeps what each number of blocks holds."""

    def __init__(self, pool, numbers: list[int]):
        self.pool, self.shares = pool, {n: [] for n in numbers}
        self.sequence = pool.open()
        self.is_measuring = False

    def begin(self, items) -> None:
        (self.item,) = items

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        items = [(self.sequence, self.item.pos, self.item.n_tokens)]
        dense = self.pool.step(layer, items, q, k, v, lse=True)
        for n, shares in self.shares.items() if self.is_measuring else ():
            some = self.pool.step(layer, items, q, lse=True, choose_blocks=n)
            shares.append(np.exp(some.lse - dense.lse))
        return dense.out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--context", type=int, default=4096, help="tokens in front of those measured")
    parser.add_argument("--measured", type=int, default=64, help="tokens whose queries choose")
    parser.add_argument("--blocks", default="4,8,16,32,64", help="numbers of blocks of 16")
    args = parser.parse_args()
    numbers = [int(n) for n in args.blocks.split(",")]
    settings = {"device.kv_memory": "1G", "cache.max_seq_tokens": args.context + args.measured}
    with own_daemon.running(args, args.transport, settings) as url:
        import llama
        import over_attnd

        import attnd

        model = llama.Llama()
        ids = text(args.context + args.measured)
        with attnd.connect(url) as client:
            spec = over_attnd.pool_spec(model, n_blocks=len(ids) // 16 + 64)
            attention = Measured(client.create_pool(spec), numbers)
            for pos in range(0, len(ids), 64):
                attention.is_measuring = pos >= args.context
                n = min(64, len(ids) - pos)
                model.forward(ids[pos : pos + n], [llama.Item(0, pos, n)], attention)
            print(f"bytelm, {args.context} tokens, {args.measured} measured: mean, 1st percentile")
            for n, shares in attention.shares.items():
                of_all = np.concatenate([s.ravel() for s in shares])
                layers = [np.mean(shares[i :: model.num_layers]) for i in range(model.num_layers)]
                print(
                    f"{n:5} blocks  {of_all.mean():.4f}  {np.percentile(of_all, 1):.4f}  layers",
                    " ".join(f"{x:.3f}" for x in layers),
                )


if __name__ == "__main__":
    main()
