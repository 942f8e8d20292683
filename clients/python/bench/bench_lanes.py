"""Layers of several workers over lanes, without a model: their share of what the bare kernel would make.

    bench_lanes.py --prefix PREFIX                    one GPU, under MPS
    bench_lanes.py --prefix PREFIX --device-index 1   two GPUs

Every worker, on the first GPU, decodes its sequences: a pass of the model's first layers is one CUDA graph,
in which a layer follows the one before. `share` is the tokens of all by the time from the first one's start
to the last one's end, against attnbench's time of all their sequences in one batch, at the mean context.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import subprocess
import tempfile
import time

import own_daemon

LAYERS, HEADS, KV_HEADS, DIM = 4, 32, 8, 128
CHUNK = 512  # tokens of a step that fills the cache
AHEAD = 3  # plans of a lane that are not finished; it takes four


def bare_us(args: argparse.Namespace) -> float:
    """One layer of all sequences in one batch."""
    context = args.context + args.tokens + args.rounds * args.tokens // 2
    cell = f"{HEADS},{KV_HEADS},{DIM},{args.workers * args.sequences},{context}"
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        command = [args.prefix / "bin" / "attnbench", "--backend", args.backend, "--runs", "30"]
        command += ["--cell", cell, "--csv", file.name]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        with open(file.name, newline="") as rows:
            return float(next(csv.DictReader(rows))["Custom_Time_us"])


def worker(barrier, results, url: str, args: argparse.Namespace) -> None:
    try:
        run(barrier, results, url, args)
    except BaseException:
        barrier.abort()  # the others don't wait for what failed
        raise


def run(barrier, results, url: str, args: argparse.Namespace) -> None:
    import torch

    import attnd
    import attnd.torch

    spec = attnd.PoolSpec(
        "lanes",
        num_layers=LAYERS,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_k=DIM,
        n_blocks=args.workers
        * args.sequences
        * ((args.context + (1 + args.rounds) * args.tokens) // 16 + 2),
        q_dtype="bf16",
    )
    n = args.sequences
    with attnd.connect(url, timeout=120) as client:
        pool = client.create_pool(spec)
        sequences = [pool.open() for _ in range(n)]
        kv = [torch.randn(CHUNK, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
        for seq in sequences:
            for pos in range(0, args.context, CHUNK):
                for layer in range(LAYERS):
                    pool.step(layer, [(seq, pos, CHUNK)], None, *kv)
        with client.open_lane() as lane:
            attention = attnd.torch.Attention(lane, pool)
            q = torch.randn(n, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            k, v = (
                torch.randn(n, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2)
            )
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(LAYERS):
                    attention(q, k, v)
            pos, ends = args.context, [torch.cuda.Event() for _ in range(AHEAD)]

            def decode() -> None:
                nonlocal pos
                for _ in range(args.tokens):
                    end = ends[pos % AHEAD]
                    end.synchronize()
                    attention.plan([(seq, pos, 1) for seq in sequences])
                    with torch.cuda.stream(stream):
                        graph.replay()
                    end.record(stream)
                    pos += 1
                stream.synchronize()

            decode()  # once to warm up
            for _ in range(args.rounds):
                barrier.wait()
                start = time.monotonic()
                decode()
                results.put((start, time.monotonic()))
                barrier.wait()
            attention.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=16, help="of a worker")
    parser.add_argument("--context", type=int, default=4096, help=f"a multiple of {CHUNK}")
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device-index", default="0", help="the daemon's")
    args = parser.parse_args()
    bare = bare_us(args)
    settings = {
        "device.kv_memory": "24G",
        "device.index": args.device_index,
        "cache.io_memory": "512M",
    }
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(args.workers + 1, timeout=300), spawn.Queue()
    with own_daemon.running(args, "gpu", settings) as url:
        processes = [
            spawn.Process(target=worker, args=(barrier, results, url, args))
            for _ in range(args.workers)
        ]
        for p in processes:
            p.start()
        layer_us = []
        for _ in range(args.rounds):
            barrier.wait()
            barrier.wait()
            times = [results.get() for _ in processes]
            seconds = max(end for _, end in times) - min(start for start, _ in times)
            layer_us.append(seconds / (args.tokens * LAYERS) * 1e6)
        for p in processes:
            p.join()
            if p.exitcode != 0:
                raise SystemExit(f"a worker left with {p.exitcode}")
    us = statistics.median(layer_us)
    print("| workers | sequences | context | bare kernel, us | a layer of all, us | share |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {args.workers} | {args.sequences} | {args.context} | {bare:.1f} | {us:.1f} |"
        f" {bare / us:.2f} |"
    )


if __name__ == "__main__":
    main()
