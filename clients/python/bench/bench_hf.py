"""Tokens per second of HuggingFace models: attention by attnd.hf against the model's own sdpa.

    python3 clients/python/bench/bench_hf.py --prefix PREFIX        (bin/attnd, lib/libattn.so.0)

Models: bytelm (4 layers, 8 query and 2 KV heads of 64) and a random one of Llama-3-8B's shape with 4
layers (32 and 8 heads of 128); bf16, on the GPU if there is one. Each starts with a prompt of
random tokens, put in by chunks of columns; then --tokens greedy steps are timed after 4 that are
not: the whole forward pass and argmax, with the device waited for at the start and the end only.

sdpa runs without cuDNN's attention, which plans anew for every length.

`agree` is the share of the greedy tokens that attention by attnd and by sdpa have in common when
each step is fed sdpa's tokens. Of a step of one layer over attnd, in microseconds: `copy` to the
host (it waits for the model), `step` from call to answer, of which `queue` and `device` in the daemon.
"""

from __future__ import annotations

import argparse
import time

import own_daemon

import torch
import transformers

import attnd
import attnd.hf


def bytelm():
    folder = own_daemon.HERE.parent / "examples" / "bytelm"
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def llama8b():
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    config._name_or_path = "random-llama-8b-4-layers"
    return transformers.LlamaForCausalLM(config)


MODELS = {"bytelm": bytelm, "llama8b": llama8b}
N_WARM = 4


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@torch.no_grad()
def prefill(model, cache, ids: torch.Tensor, chunk: int) -> float:
    """Seconds to put the prompt in."""
    wait(ids.device)
    start = time.perf_counter()
    for part in ids.split(chunk, dim=1):
        model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    wait(ids.device)
    return time.perf_counter() - start


@torch.no_grad()
def decode(model, cache, token: torch.Tensor, n_steps: int, feed=None, begin=None):
    """Seconds of n_steps after N_WARM, and all tokens; feed: what to put in, else its own."""
    tokens = []
    start = 0.0
    for n in range(N_WARM + n_steps):
        if n == N_WARM:
            wait(token.device)
            if begin:
                begin()
            start = time.perf_counter()
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1:].argmax(dim=-1)
        tokens.append(token)
        if feed is not None:
            token = feed[n]
    wait(token.device)
    return time.perf_counter() - start, tokens


def bench_sdpa(model, ids, args):
    model.set_attn_implementation("sdpa")
    cache = transformers.DynamicCache(config=model.config)
    prefill_s = prefill(model, cache, ids, args.chunk)
    seconds, tokens = decode(model, cache, ids[:, -1:], args.tokens)
    return prefill_s, seconds, tokens


def bench_attnd(model, ids, args, transport, expected):
    batch, context = ids.shape
    n_blocks = batch * ((context + N_WARM + args.tokens) // 16 + 2)
    text = model.config
    kv_bytes = 2 * text.num_key_value_heads * text.head_dim * text.num_hidden_layers * 2
    memory = n_blocks * 16 * kv_bytes + (64 << 20)
    flags = ["--device.kv_memory", f"{memory >> 20}M", "--cache.io_memory", "512M"]
    with own_daemon.running(args, transport, *flags) as url:
        with attnd.connect(url, timeout=120) as client:
            with attnd.hf.attach(model, client, n_blocks=n_blocks) as worker:
                with worker.cache() as cache:
                    prefill_s = prefill(worker.model, cache, ids, args.chunk)

                    def begin():
                        worker.spent = attnd.hf.Spent()

                    seconds, tokens = decode(
                        model, cache, ids[:, -1:], args.tokens, expected, begin
                    )
                    return prefill_s, seconds, tokens, worker.spent, client.info.backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--models", default="bytelm,llama8b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--tokens", type=int, default=64, help="steps that are timed")
    parser.add_argument("--chunk", type=int, default=512, help="columns of the prompt at a time")
    args = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {name}; bf16,"
        f" batch {args.batch}, {args.tokens} steps"
    )
    print(
        "| model | context | attention | prompt, tokens/s | ms per step | tokens/s | against sdpa |"
        " agree | a layer, us: copy + step (queue, device) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for model_name in args.models.split(","):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            model = MODELS[model_name]().to(device, torch.bfloat16).eval()
        torch.set_default_dtype(torch.float32)
        for context in map(int, args.contexts.split(",")):
            ids = torch.randint(3, 256, (args.batch, context), device=device)
            n_tokens = args.batch * args.tokens

            def row(kind, prefill_s, seconds, ratio="", agree="", layer=""):
                print(
                    f"| {model_name} | {context} | {kind} | {ids.numel() / prefill_s:.0f} |"
                    f" {seconds / args.tokens * 1e3:.2f} | {n_tokens / seconds:.0f} | {ratio} |"
                    f" {agree} | {layer} |",
                    flush=True,
                )

            prefill_s, sdpa_s, expected = bench_sdpa(model, ids, args)
            row("sdpa", prefill_s, sdpa_s)
            for transport in args.transport.split(","):
                prefill_s, seconds, tokens, spent, backend = bench_attnd(
                    model, ids, args, transport, expected
                )
                same = torch.stack([a == b for a, b in zip(tokens, expected)]).float().mean()
                n = spent.n_steps * 1e3
                layer = (
                    f"{spent.copy_ns / n:.0f} + {spent.total_ns / n:.0f}"
                    f" ({spent.queue_ns / n:.0f}, {spent.device_ns / n:.0f})"
                )
                row(
                    f"attnd {backend}, {transport}",
                    prefill_s,
                    seconds,
                    f"{sdpa_s / seconds:.2f}x",
                    f"{same:.1%}",
                    layer,
                )


if __name__ == "__main__":
    main()
