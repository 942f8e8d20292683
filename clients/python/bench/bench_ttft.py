"""Time to the first token of a prompt, computed whole or with what the cache has of it.

    python3 clients/python/bench/bench_ttft.py --prefix PREFIX        (bin/attnd, lib/libattn.so.0)

A prompt is `--shared` tokens that are always the same, as a system prompt's, and `--own` others behind
them. By turns: the model's own sdpa with a new DynamicCache; attnd without sharing; attnd with
share_prefixes where nothing of the prompt is there (cold: what telling ids costs); and with it where a
second worker, on a connection of its own, has computed the shared tokens before (shared). Each is one
forward pass to logits and argmax, its cache opened and closed. Medians of `--runs`, in milliseconds.

With --tiers: by where the prompt's blocks are, all `--shared` + `--own` tokens of it computed before:
nowhere, on the device, in host memory, in the file. The pool holds one prompt, host memory two, the file
all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time

import bench_hf
import own_daemon

import torch
import transformers

import attnd
import attnd.hf


@torch.no_grad()
def first_token(model, make_cache, ids: torch.Tensor) -> tuple[float, int]:
    """Seconds, and the token."""
    bench_hf.wait(ids.device)
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        cache = make_cache()
        if hasattr(cache, "close"):
            stack.enter_context(cache)
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        token = int(logits[0, -1].argmax())
    return time.perf_counter() - start, token


def bench(name: str, model, args: argparse.Namespace) -> None:
    config, device = model.config, model.device
    n = args.shared + args.own
    n_blocks = (args.runs + 3) * 2 * (n // 16 + 2)
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4
    settings = {
        "device.kv_memory": f"{(n_blocks * 16 * kv_bytes >> 20) + 64}M",
        "cache.io_memory": "512M",
    }
    shared = torch.randint(3, 256, (1, args.shared), device=device)

    def prompt(of: torch.Tensor) -> torch.Tensor:
        return torch.cat([of, torch.randint(3, 256, (1, args.own), device=device)], dim=1)

    with contextlib.ExitStack() as stack:
        url = stack.enter_context(own_daemon.running(args, args.transport, settings))
        options = {"n_blocks": n_blocks, "lane": True if args.transport == "gpu" else None}

        def attach(share: bool):
            client = stack.enter_context(attnd.connect(url, timeout=120))
            return stack.enter_context(
                attnd.hf.attach(model, client, share_prefixes=share, **options)
            )

        attach(True).close()  # the weights are hashed once for each
        plain, sharing = attach(False), attach(True)
        seconds: dict[str, list[float]] = {}
        n_same = 0
        for run in range(args.runs + 1):
            cold, warm = prompt(torch.randint_like(shared, 3, 256)), prompt(shared)
            turns = [
                ("sdpa", "sdpa", lambda: transformers.DynamicCache(config=config), warm),
                ("attnd", "attnd", plain.cache, warm),
                ("cold", "attnd", sharing.cache, cold),
                ("shared", "attnd", sharing.cache, warm),
            ]
            tokens = {}
            for what, kind, make_cache, ids in turns:
                model.set_attn_implementation(kind)
                took, tokens[what] = first_token(model, make_cache, ids)
                if run > 0:  # the first fills the cache
                    seconds.setdefault(what, []).append(took)
            n_same += run > 0 and tokens["sdpa"] == tokens["attnd"] == tokens["shared"]
        ms = {what: statistics.median(s) * 1e3 for what, s in seconds.items()}
        cells = [name, f"{args.shared} + {args.own}", *(f"{ms[what]:.1f}" for what in ms)]
        cells += [f"{ms['sdpa'] / ms['shared']:.1f}", f"{n_same} of {args.runs}"]
        print("|", " | ".join(cells), "|", flush=True)
        model.set_attn_implementation("attnd")


def bench_tiers(name: str, model, args: argparse.Namespace) -> None:
    config, device = model.config, model.device
    n = args.shared + args.own
    n_blocks = n // 16 + 16
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    prompt_bytes = n_blocks * 16 * kv_bytes * model.dtype.itemsize
    with contextlib.ExitStack() as stack:
        settings = {
            "device.kv_memory": f"{(prompt_bytes >> 20) + 64}M",
            "cache.io_memory": "512M",
            "cache.host_memory": f"{(2 * prompt_bytes >> 20) + 16}M",
            "cache.disk_path": stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)),
            "cache.disk_size": f"{8 * prompt_bytes >> 20}M",
        }
        url = stack.enter_context(own_daemon.running(args, args.transport, settings))
        client = stack.enter_context(attnd.connect(url, timeout=120))
        lane = True if args.transport == "gpu" else None
        worker = stack.enter_context(
            attnd.hf.attach(model, client, share_prefixes=True, n_blocks=n_blocks, lane=lane)
        )
        counters = ("prefix_hit_tokens_total", "host_hits_total", "disk_hits_total")
        seconds: dict[str, list[float]] = {}
        had: dict[str, list[int]] = {}
        n_same = n_turns = 0

        def take(what: str, ids: torch.Tensor, run: int) -> int:
            before = client.stats()
            took, token = first_token(model, worker.cache, ids)
            after = client.stats()
            if run > 0:  # the first fills the cache
                seconds.setdefault(what, []).append(took)
                had[what] = [after[k] - before[k] for k in counters]
            return token

        for run in range(args.runs + 1):
            prompts = [torch.randint(3, 256, (1, n), device=device) for _ in range(6)]
            model.set_attn_implementation("sdpa")
            took, own = first_token(
                model, lambda: transformers.DynamicCache(config=config), prompts[0]
            )
            if run > 0:
                seconds.setdefault("sdpa", []).append(took)
            model.set_attn_implementation("attnd")
            tokens = [take("nowhere", prompts[0], run), take("device", prompts[0], run)]
            take("another", prompts[1], run)  # takes its place
            tokens.append(take("host", prompts[0], run))
            for other in prompts[1:]:
                take("another", other, run)
            tokens.append(take("disk", prompts[0], run))
            n_turns += len(tokens)
            n_same += sum(token == own for token in tokens)
    for what, took in seconds.items():
        ms = " ".join(f"{t * 1e3:.1f}" for t in took)
        print(
            f"| {name} | {n} | {what} | {statistics.median(took) * 1e3:.1f} | {ms} |"
            f" {had.get(what, '')} |",
            flush=True,
        )
    print(f"sdpa's token: {n_same} of {n_turns}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--models", default="bytelm")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--shared", type=int, default=8128)
    parser.add_argument("--own", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tiers", action="store_true")
    parser.add_argument("--folder", default="/var/tmp", help="of --tiers' file")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.tiers:
        print("| model | tokens | blocks | ms, median | all | hit tokens, blocks of host, of disk |")
        print("|---" * 6 + "|")
    else:
        print("| model | tokens | sdpa | attnd | cold | shared | sdpa / shared | same token |")
        print("|---" * 8 + "|")
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    for name in args.models.split(","):
        torch.manual_seed(0)
        torch.set_default_dtype(kind)
        with torch.device(device):
            model = bench_hf.MODELS[name]().to(device, kind).eval()
        torch.set_default_dtype(torch.float32)
        (bench_tiers if args.tiers else bench)(name, model, args)


if __name__ == "__main__":
    main()
