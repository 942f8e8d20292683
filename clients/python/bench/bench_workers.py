"""Several processes, each with a model of its own, on one GPU: caches of their own against one attnd.

    python3 clients/python/bench/bench_workers.py --prefix PREFIX                  (under MPS)
    python3 clients/python/bench/bench_workers.py --prefix PREFIX --daemon-gpu 1   (two GPUs, under MPS)

Every process, on the first GPU, has a random model of bench_hf.py's shapes and decodes one batch: with sdpa
over a DynamicCache (`own`), with sdpa over a StaticCache whose steps are a CUDA graph (`own, graph`), or
over attnd, its steps captured (`attnd`). All have put their prompts in before the first begins to decode;
the figure is all tokens by the time from the first one's start to the last one's end, the median of
the rounds. The processes' models, prompts and steps are alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import bench_hf
import own_daemon

WAYS = {"own": "sdpa", "own, graph": "static", "attnd": "attnd"}


def worker(barrier, results, way: str, url: str | None, args: argparse.Namespace) -> None:
    try:
        decode(barrier, results, way, url, args)
    except BaseException:
        barrier.abort()  # the others don't wait for what failed
        raise


def decode(barrier, results, way: str, url: str | None, args: argparse.Namespace) -> None:
    import contextlib

    import torch

    import attnd
    import attnd.hf

    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = bench_hf.MODELS[args.model]().to("cuda", torch.bfloat16).eval()
    torch.set_default_dtype(torch.float32)
    n_steps = args.warm + args.rounds * args.tokens
    n_columns = args.context + n_steps
    ids = torch.randint(3, 256, (args.batch, args.context), device="cuda")
    with contextlib.ExitStack() as stack:
        if url is None:
            runner = bench_hf.own_runner(model, WAYS[way], n_columns)
        else:
            client = stack.enter_context(attnd.connect(url, timeout=120))
            n_blocks = args.workers * args.batch * (n_columns // 16 + 2)
            attached = attnd.hf.attach(model, client, n_blocks=n_blocks, graphs=True)
            stack.enter_context(attached)
            cache = stack.enter_context(attached.cache())
            runner = bench_hf.Runner(way, model, "attnd", cache)
            runner.run = attached.forward
        runner.prefill(ids, args.chunk)
        runner.decode(ids[:, -1:], args.warm, None)
        for _ in range(args.rounds):
            barrier.wait()
            start = time.monotonic()
            runner.decode(runner.tokens[-1], args.tokens, None)
            results.put((start, time.monotonic()))
            barrier.wait()


def measure(way: str, url: str | None, args: argparse.Namespace) -> float:
    """Tokens per second of all."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(args.workers + 1, timeout=300), spawn.Queue()
    processes = [
        spawn.Process(target=worker, args=(barrier, results, way, url, args))
        for _ in range(args.workers)
    ]
    for p in processes:
        p.start()
    rates = []
    for _ in range(args.rounds):
        barrier.wait()
        barrier.wait()
        times = [results.get() for _ in processes]
        seconds = max(end for _, end in times) - min(start for start, _ in times)
        rates.append(args.workers * args.batch * args.tokens / seconds)
    for p in processes:
        p.join()
        if p.exitcode != 0:
            raise SystemExit(f"a process left with {p.exitcode}")
    return statistics.median(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--model", default="llama8b", choices=bench_hf.MODELS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a process")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32, help="steps of a round")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-memory", default="32G")
    parser.add_argument("--daemon-gpu", type=int, default=0, help="not 0: two GPUs")
    parser.add_argument("--ways", default="own;own, graph;attnd")
    args = parser.parse_args()
    print(
        f"{args.workers} processes of {args.batch} sequences, context {args.context}, {args.model}"
    )
    print("| cache | tokens/s | against own |\n|---|---|---|")
    first = 0.0
    for way in args.ways.split(";"):
        if way == "attnd":
            settings = {
                "device.kv_memory": args.kv_memory,
                "device.index": args.daemon_gpu,
                "cache.io_memory": "512M",
            }
            with own_daemon.running(args, "gpu", settings) as url:
                rate = measure(way, url, args)
        else:
            rate = measure(way, None, args)
        first = first or rate
        print(f"| {way} | {rate:.0f} | {rate / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
