"""Time to the first token of a long prompt whose blocks are nowhere, on the device, in host memory, on disk;
and decoding beside blocks on their way.

    python3 clients/python/bench/bench_tiers.py [--prefix build] [--backend cpu] [--transport shm]

The numpy example (bytelm, f32). First token: from the open, with the prompt's ids, to the argmax of the
logits behind its last token; what the cache does not have is computed in pieces of 512 tokens. The pool
holds one prompt, host memory two, the file all of them. Then, by turns, steps of --batch sequences in a
pool of their own while another process opens and closes a prompt that is on the device, and while it does
so with two, of which every block has to come from host memory and makes way for the other's: the ratio is
what the moves cost. Medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time

import own_daemon

import llama
import numpy as np
from over_attnd import AttndAttention, pool_spec

import attnd

PIECE = 512


def first_token(model, pool, prompt: np.ndarray) -> tuple[float, int, int]:
    """Seconds, the token, and the tokens that the cache had."""
    start = time.perf_counter()
    sequence = pool.open(tokens=prompt.tolist())
    at = had = sequence.n_cached
    with AttndAttention(pool, {0: sequence}) as attention:
        while at < len(prompt):
            n = min(PIECE, len(prompt) - at)
            logits = model.forward(prompt[at : at + n], [llama.Item(0, at, n)], attention)
            at += n
        token = int(logits[-1].argmax())
        seconds = time.perf_counter() - start
    return seconds, token, had


def first_tokens(args, model, pool) -> None:
    rng = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {}
    n_same = n_runs = 0
    for _ in range(args.runs):
        prompts = [rng.integers(32, 127, args.tokens) for _ in range(6)]
        took, token, _ = first_token(model, pool, prompts[0])
        turns = [("cold", took, token)]
        took, again, had = first_token(model, pool, prompts[0])
        assert had > 0, "nothing of the prompt was on the device"
        turns.append(("device", took, again))
        first_token(model, pool, prompts[1])  # takes its place
        took, again, had = first_token(model, pool, prompts[0])
        assert had > 0, "nothing of the prompt was in host memory"
        turns.append((f"host ({had} of {args.tokens} tokens)", took, again))
        for other in prompts[1:]:
            first_token(model, pool, other)
        took, again, had = first_token(model, pool, prompts[0])
        turns.append((f"disk ({had} of {args.tokens} tokens)", took, again))
        for what, took, again in turns:
            seconds.setdefault(what, []).append(took)
            n_same += again == token
            n_runs += 1
    for what, all_of in seconds.items():
        print(f"first token of {args.tokens}, {what}: {statistics.median(all_of) * 1e3:.1f} ms")
    print(f"the same token: {n_same} of {n_runs}", flush=True)


def churn(url: str, pool_name: str, prompts: list[list[int]], go, stop) -> None:
    with attnd.connect(url, timeout=60) as client:
        pool = client.pool(pool_name)
        while not stop.is_set():
            for prompt in prompts:
                pool.open(tokens=prompt).close()
            go.set()


def step_ms(model, attention, at: int, batch: int, n_steps: int) -> float:
    steps = []
    for n in range(n_steps):
        start = time.perf_counter()
        items = [llama.Item(i, at + n, 1) for i in range(batch)]
        model.forward(np.full(batch, 65), items, attention)
        steps.append(time.perf_counter() - start)
    return statistics.median(steps) * 1e3


def beside(args, url: str, client, model, pool) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(32, 127, args.tokens) for _ in range(2)]
    for prompt in prompts:
        first_token(model, pool, prompt)
    spec = pool_spec(model, n_blocks=args.batch * ((args.context + 2 * args.steps * args.rounds) // 16 + args.batch))._replace(name="decoding")
    own = client.create_pool(spec)
    with AttndAttention(own) as attention:
        for i in range(args.batch):
            model.forward(rng.integers(32, 127, args.context), [llama.Item(i, 0, args.context)], attention)
        at, ratios, rates = args.context, [], []

        def measure(of: list[np.ndarray]) -> tuple[float, float]:
            """Milliseconds of a step, and GB/s that moved."""
            nonlocal at
            spawn = multiprocessing.get_context("spawn")
            go, stop = spawn.Event(), spawn.Event()
            lists = [prompt.tolist() for prompt in of]
            other = spawn.Process(target=churn, args=(url, pool.spec.name, lists, go, stop))
            other.start()
            go.wait()
            before, start = client.stats(), time.perf_counter()
            ms = step_ms(model, attention, at, args.batch, args.steps)
            after, took = client.stats(), time.perf_counter() - start
            stop.set()
            other.join()
            at += args.steps
            moved = ("host_in_bytes_total", "host_out_bytes_total")
            return ms, sum(after[k] - before[k] for k in moved) / took / 1e9

        for _ in range(args.rounds):
            alone, _ = measure(prompts[:1])
            ms, rate = measure(prompts)
            ratios.append(ms / alone)
            rates.append(rate)
    print(
        f"a step of {args.batch} sequences of {args.context} tokens beside {statistics.median(rates):.2f} GB/s:"
        f" {(statistics.median(ratios) - 1) * 100:+.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7, help="of steps beside moves")
    args = parser.parse_args()
    model = llama.Llama()
    prompt_bytes = args.tokens * 4096  # 64 KiB a block of 16 tokens
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        settings = {
            "device.kv_memory": "1G",
            "cache.host_memory": str(2 * prompt_bytes + (16 << 20)),
            "cache.disk_path": folder,
            "cache.disk_size": "2G",
        }
        with own_daemon.running(args, args.transport, settings) as url:
            with attnd.connect(url, timeout=60) as client:
                pool = client.create_pool(pool_spec(model, n_blocks=args.tokens // 16 + 16))
                first_tokens(args, model, pool)
                beside(args, url, client, model, pool)


if __name__ == "__main__":
    main()
