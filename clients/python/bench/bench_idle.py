"""Idle sequences that make way for each other in host memory, and a pool that is resized in use.

    python3 clients/python/bench/bench_idle.py --prefix PREFIX [--backend cpu] [--transport shm]

A pool of Llama-3-8B's geometry (32 layers, 8 kv heads of 128, bf16: 2 MiB a block of 16 tokens) has room for
two sequences of --tokens. Four are stepped by turns, one token of the first layer: `resident` is a step of
the one that was used last, `comes back` one of the one that was used longest ago, whose blocks come in
while another's go out. Then one sequence is left in the pool's upper half and the pool is halved, which copies
all of it, and doubled again, which copies nothing. Medians of --runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import own_daemon

import numpy as np

import attnd

LAYERS, KV_HEADS, DIM, BLOCK_TOKENS = 32, 8, 128, 16
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * DIM * 2
PIECE = 1024


def rows(rng, n: int, heads: int) -> np.ndarray:
    """bf16, of the field's usual size: 0.5 to 2, either sign."""
    bits = rng.integers(0, 1 << 8, (n, heads, DIM), dtype=np.uint16)
    return bits | np.uint16(0x3F00) | (bits << np.uint16(15))


def fill(pool, rng, n_tokens: int):
    seq = pool.open()
    for at in range(0, n_tokens, PIECE):
        n = min(PIECE, n_tokens - at)
        for layer in range(LAYERS):
            pool.step(layer, [(seq, at, n)], None, rows(rng, n, KV_HEADS), rows(rng, n, KV_HEADS))
    return seq


def step_ms(pool, rng, seq, pos: int) -> float:
    qkv = rows(rng, 1, 32), rows(rng, 1, KV_HEADS), rows(rng, 1, KV_HEADS)
    start = time.perf_counter()
    out = pool.step(0, [(seq, pos, 1)], *qkv).out
    ms = (time.perf_counter() - start) * 1e3
    assert np.isfinite((np.asarray(out).astype(np.uint32) << 16).view(np.float32)).all()
    return ms


def idle(args, client, pool, rng) -> None:
    seqs = [fill(pool, rng, args.tokens) for _ in range(4)]
    counters = ("idle_in_bytes_total", "idle_out_bytes_total")
    resident, back, rates = [], [], []
    for run in range(args.runs + 1):
        for seq in seqs:
            before = client.stats()
            took = step_ms(pool, rng, seq, args.tokens)
            after = client.stats()
            moved = [after[k] - before[k] for k in counters]
            assert moved[0] > 0, "its blocks were on the device"
            again = step_ms(pool, rng, seq, args.tokens)  # the same position: as if repeated
            if run > 0:
                back.append(took)
                resident.append(again)
                rates.append(moved[0] / took / 1e6)
    print(
        f"a step of {args.tokens} tokens: resident {statistics.median(resident):.2f} ms, comes back"
        f" {statistics.median(back):.1f} ms ({min(back):.1f} to {max(back):.1f}), in at"
        f" {statistics.median(rates):.1f} GB/s",
        flush=True,
    )
    for seq in seqs:
        seq.close()


def resize(args, pool, rng) -> None:
    n_blocks = pool.spec.n_blocks
    shrink, grow = [], []
    for run in range(args.runs + 1):
        low = fill(pool, rng, args.tokens)
        high = fill(pool, rng, args.tokens)
        low.close()
        start = time.perf_counter()
        pool.resize(n_blocks // 2)
        middle = time.perf_counter()
        pool.resize(n_blocks)
        end = time.perf_counter()
        high.close()
        if run > 0:
            shrink.append((middle - start) * 1e3)
            grow.append((end - middle) * 1e3)
    gib = args.tokens * TOKEN_BYTES / 2**30
    ms = statistics.median(shrink)
    print(
        f"a pool of {n_blocks} blocks, halved: {ms:.1f} ms ({min(shrink):.1f} to {max(shrink):.1f}), up to"
        f" {gib:.2f} GiB copied; doubled: {statistics.median(grow):.2f} ms",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    n_blocks = 2 * (args.tokens // BLOCK_TOKENS + 2)
    pool_bytes = n_blocks * BLOCK_TOKENS * TOKEN_BYTES
    settings = {
        "device.kv_memory": f"{(pool_bytes >> 20) + 64}M",
        "cache.idle_memory": f"{2 * (pool_bytes >> 20)}M",
    }
    spec = attnd.PoolSpec(
        "idle",
        num_layers=LAYERS,
        num_q_heads=32,
        num_kv_heads=KV_HEADS,
        head_dim_k=DIM,
        block_tokens=BLOCK_TOKENS,
        n_blocks=n_blocks,
        q_dtype="bf16",
    )
    with own_daemon.running(args, args.transport, settings) as url:
        with attnd.connect(url, timeout=120) as client:
            pool = client.create_pool(spec)
            rng = np.random.default_rng(1)
            idle(args, client, pool, rng)
            resize(args, pool, rng)


if __name__ == "__main__":
    main()
