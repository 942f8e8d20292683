"""vLLM's steps on a GPU, alone and over attnd: engines side by side on one card that take turns.

    nvidia-cuda-mps-control -d
    attnd --backend cuda --listen shm:///tmp/a.shm --listen gpu:///tmp/a.gpu --device.kv_memory 24G \
        --listen.shm_client 256M --listen.max_message 256M --engine.max_queue 1G
    bench_turns.py --url shm:///tmp/a.shm --model FOLDER

On a CPU:

    VLLM_CPU_KVCACHE_SPACE=1 OMP_WAIT_POLICY=passive bench_turns.py --is-cpu --engines own-eager shm \\
        --dtype float32 --block 32 --own-kv 1 --batch 8 --contexts 256 2000 --url shm:///tmp/a.shm --model FOLDER

--far-url is a daemon's on another GPU: far-graphs is the engine lane-graphs over that one.

FOLDER has a config.json; weights are dummies, the same for all. Each turn is a batch of random prompts
whose tokens must be those of vLLM's own backend. Of a step the host's time between two returns of
engine.step() counts, of the steps in which all sequences decode; `prompts` is the time until the last
one's first token. Engines that are not at turn wait. The first round is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time

# name: (over attnd, by a lane, CUDA graphs, asynchronous scheduling)
ENGINES = {
    "own-graphs": (False, False, True, True),
    "own-eager": (False, False, False, True),
    "lane-graphs": (True, True, True, True),
    "lane-eager": (True, True, False, True),
    "lane-graphs-sync": (True, True, True, False),
    "far-graphs": (True, True, True, True),
    "shm": (True, False, False, False),
}


def serve(args: argparse.Namespace) -> None:
    """One engine, which answers a line of JSON with another."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    has_attnd, _, has_graphs, is_async = ENGINES[args.engine]
    more: dict = {"enforce_eager": True}
    if has_graphs:
        sizes = [1, 2, 4, *range(8, args.batch + 1, 8)]
        mode = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        more = {"compilation_config": mode}
    longest = max(args.contexts) + args.tokens + 1
    if has_attnd:
        blocks = args.batch * (longest // args.block + 2)
        more |= {"num_gpu_blocks_override": blocks, "block_size": args.block}
    else:
        more |= {"async_scheduling": is_async, "kv_cache_memory_bytes": args.own_kv << 30}
    if not args.is_cpu:
        more["gpu_memory_utilization"] = 0.05  # others have their part
    engine = LLM(
        model=args.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=args.dtype,
        max_model_len=longest,
        max_num_seqs=args.batch,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **more,
    ).llm_engine
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    params = SamplingParams(
        temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False
    )

    def turn(n: int, seed: int) -> dict:
        rng = random.Random(f"{n}.{seed}")
        begun = last = time.perf_counter()
        for i in range(args.batch):
            ids = [rng.randrange(1, vocabulary) for _ in range(n - i % 7)]
            salt = {"cache_salt": f"{n}.{seed}"} if has_attnd else {}
            engine.add_request(f"{n}.{seed}-{i}", {"prompt_token_ids": ids, **salt}, params)
        tokens: dict[int, list[int]] = {}
        steps, prompts = [], 0.0
        while engine.has_unfinished_requests():
            outs = engine.step()
            now = time.perf_counter()
            for o in outs:
                tokens[int(o.request_id.split("-")[1])] = list(o.outputs[0].token_ids)
            if not prompts and len(tokens) == args.batch:
                prompts = now - begun
            if len(outs) == args.batch and min(len(x) for x in tokens.values()) > 2:
                steps.append((now - last) * 1e3)
            last = now
        return {"tokens": [tokens[i] for i in range(args.batch)], "steps": sorted(steps), "prompts": prompts}

    print(json.dumps({"is_ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(*json.loads(line))), file=answers, flush=True)


class Engine:
    def __init__(self, name: str, args: argparse.Namespace):
        has_attnd, has_lane, _, is_async = ENGINES[name]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ATTND_VLLM")}
        if has_attnd:
            url = args.far_url if name == "far-graphs" else args.url
            env |= {"ATTND_VLLM": url, "ATTND_VLLM_POOL": f"turns-{name}"}
            env |= {"ATTND_VLLM_ASYNC": "1"} if is_async else {}
        if not has_lane:  # no MPS: no lane
            env = {k: v for k, v in env.items() if not k.startswith("CUDA_MPS")}
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", name]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, question: object = None) -> dict:
        assert self.process.stdin is not None and self.process.stdout is not None
        if question is not None:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else {}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--url", required=True)
    p.add_argument("--far-url")
    p.add_argument("--model", required=True)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--contexts", type=int, nargs="+", default=[512, 8192])
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--own-kv", type=int, default=6, metavar="GIB")
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--block", type=int, default=16, help="tokens of a block of attnd's")
    p.add_argument("--is-cpu", action="store_true")
    p.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES)[:-1])
    p.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.engine:
        return serve(args)
    engines = {name: Engine(name, args) for name in args.engines}
    engines = {name: e for name, e in engines.items() if e.ask()}
    for n in args.contexts:
        results: dict[str, list[dict]] = {name: [] for name in engines}
        for r in range(args.rounds + 1):
            order = list(engines)[r % len(engines) :] + list(engines)[: r % len(engines)]
            given = {name: engines[name].ask([n, r]) for name in order}
            own = next((given[x] for x in given if x.startswith("own") and given[x]), None)
            for name, x in given.items():
                if not x:
                    engines.pop(name)
                    print(f"{name} has ended in round {r} of context {n}")
                    continue
                if own is not None and x["tokens"] != own["tokens"]:
                    same = sum(a == b for a, b in zip(x["tokens"], own["tokens"]))
                    print(f"{name}: {same} of {args.batch} texts are vLLM's own")
                if r > 0:
                    results[name].append(x)
        for name, xs in results.items():
            if xs and all(x["steps"] for x in xs):
                print(
                    f"context {n:6} {name:17} step ms: fastest"
                    f" {min(x['steps'][0] for x in xs):.2f}, median"
                    f" {median([median(x['steps']) for x in xs]):.2f}; prompts s:"
                    f" {min(x['prompts'] for x in xs):.3f}"
                )
    for e in engines.values():
        e.process.stdin.close()
        e.process.wait()


if __name__ == "__main__":
    main()
