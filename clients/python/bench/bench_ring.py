"""Attention of whole sequences over one card and over several: the ring_v2 rows of attnbench's dilated grid
as a service computes them.

    python3 clients/python/bench/bench_ring.py --prefix PREFIX --devices 0,1,2,3 [--dtype f32]
                                               [--branches 2048:1,4096:2,8192:4]

One layer without a mask, heads of 64; with branches (segment:rate) it is dilated, as multihead_dilated is. Each card has a stripe of every block's keys and values, all queries
travel to each, and what the cards have found of a query meets on the first one by its sums of weights: a
pool split by tokens. A daemon with the first device computes it whole, then daemons with the first two,
four, eight split. `device` is the batch's time on the device, with the way of the queries and of the
results; `x` that over one card's. Queries at random places are compared with float64.
"""

from __future__ import annotations

import argparse
import statistics

import own_daemon

import numpy as np

import attnd

DIM = 64
BOUND = {"f32": 2e-5, "bf16": 5e-3}  # relative L2 error


def to_wire(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f32":
        return x
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_wire(x: np.ndarray) -> np.ndarray:
    x = x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def times_seen(rows: np.ndarray, n_keys: int, n_heads: int, branches) -> np.ndarray:
    """How often each query at `rows` sees each key: [heads][queries][keys]."""
    if not branches:
        return np.ones((1, 1, 1))
    p, j = rows[None, :, None], np.arange(n_keys)[None, None, :]
    h = np.arange(n_heads)[:, None, None]
    return sum(
        ((p // w == j // w) & (p % r == h % r) & (j % r == h % r)).astype(np.float64)
        for w, r in branches
    )


def error_of(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, branches, rng) -> float:
    """Relative L2 error of 16 queries."""
    rows = rng.integers(0, len(q), 16)
    k, v = from_wire(k), from_wire(v)
    s = np.einsum("qhd,khd->hqk", from_wire(q[rows]), k) * DIM**-0.5
    e = np.exp(s - s.max(-1, keepdims=True)) * times_seen(rows, len(k), k.shape[1], branches)
    want = np.einsum("hqk,khd->qhd", e / e.sum(-1, keepdims=True), v)
    return float(np.linalg.norm(from_wire(out[rows]) - want) / np.linalg.norm(want))


def measure(args, url: str, n_cards: int, batch: int, tokens: int, heads: int):
    """Microseconds of a step on the device and in all, medians, and the error."""
    rng = np.random.default_rng(tokens + heads + batch)
    n = batch * tokens
    q, k, v = (
        to_wire(rng.standard_normal((n, heads, DIM), np.float32), args.dtype) for _ in range(3)
    )
    spec = attnd.PoolSpec(
        f"{batch}x{tokens}x{heads}",
        num_layers=1,
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim_k=DIM,
        block_tokens=16 * n_cards,
        n_blocks=batch * (tokens // (16 * n_cards) + 1),
        q_dtype=args.dtype,
        split="whole" if n_cards == 1 else "tokens",
        layers=[attnd.LayerSpec(is_full=True, branches=args.branches)],
    )
    with attnd.connect(url, timeout=120) as client:
        pool = client.create_pool(spec)
        sequences = [pool.open() for _ in range(batch)]
        items = [(s, 0, tokens) for s in sequences]
        pool.step(0, items, k=k, v=v)
        out = np.full_like(q, 0xFFFF if args.dtype == "bf16" else np.nan)
        results = [pool.step(0, items, q=q, out=out) for _ in range(args.runs)]
        error = max(
            error_of(*(x[i * tokens : (i + 1) * tokens] for x in (out, q, k, v)), args.branches, rng)
            for i in range(batch)
        )
        for s in sequences:
            s.close()
        pool.close()
    if not error < BOUND[args.dtype]:
        raise SystemExit(f"{spec.name} on {n_cards} cards: relative L2 error {error:.2e}")
    return (
        statistics.median(r.device_ns for r in results) / 1e3,
        statistics.median(r.total_ns for r in results) / 1e3,
        error,
    )


def branches_of(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(w), int(r)) for w, r in (b.split(":") for b in text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own_daemon.add_arguments(parser)
    parser.set_defaults(transport="shm", backend="cuda")
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--dtype", default="bf16", choices=["f32", "bf16"])
    parser.add_argument("--batches", default="1")
    parser.add_argument("--tokens", default="1024,2048,4096,8192,16384")
    parser.add_argument("--heads", default="8,16")
    parser.add_argument("--branches", type=branches_of, default=(), metavar="W:R,...")
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    sizes = [
        (int(b), int(t), int(h))
        for b in args.batches.split(",")
        for t in args.tokens.split(",")
        for h in args.heads.split(",")
    ]
    devices = args.devices.split(",")
    most = max(b * t for b, t, _ in sizes)
    settings = {
        "listen.max_message": "256M",
        "listen.shm_client": "512M",
        "listen.shm_memory": "8G",
        "cache.io_memory": "2G",
        "engine.max_queue": "1G",
        "engine.max_batch_tokens": max(most, 16384),
        "engine.max_step_tokens": max(most, 8192),
        "device.kv_memory": "2G",
    }
    one = {}
    print("| type | batch | tokens | heads | cards | device, us | x | step, us | rel. L2 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n_cards in (n for n in (1, 2, 4, 8) if n <= len(devices)):
        index = {"device.index": ",".join(devices[:n_cards])}
        with own_daemon.running(args, args.transport, {**settings, **index}) as url:
            for size in sizes:
                device, total, error = measure(args, url, n_cards, *size)
                one.setdefault(size, device)
                print(
                    f"| {args.dtype} | {' | '.join(map(str, size))} | {n_cards} | {device:.1f} |"
                    f" {device / one[size]:.2f} | {total:.1f} | {error:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
