"""Decoding speed of HuggingFace models: attention by attnd.hf against the model's own.

    python3 clients/python/bench/bench_hf.py --prefix PREFIX        (bin/attnd, lib/libattn.so.0)

Models: bytelm (4 layers, 8 query and 2 KV heads of 64), and random ones of the shapes of Llama-3.2-1B
(32 and 8 heads of 64) and Llama-3-8B (32 and 8 heads of 128), with 4 layers each, and all 16 of the
former's (llama1b16); on the GPU if there is one. All attentions get the same prompt of random tokens, put in by chunks of columns, and then take
turns at greedy steps, each fed the first one's tokens: the whole forward pass and argmax, with the
device waited for after each step. Figures are medians of steps, ratios those of the medians of one run.
The own attentions keep transformers' DynamicCache; sdpa runs without cuDNN's, which plans anew for every
length. The attention `static` is sdpa with a StaticCache of the final length, its steps captured in a CUDA
graph; the transport `graphs` is attnd over a lane (`gpu`) with steps that attnd.hf captures, and a URL
is a daemon that runs already (scripts/bench-network --hf).

`agree` is the share of the tokens that an attention has in common with the first. Of a step of one layer
over attnd, in microseconds: `copy` to the host (it waits for the model), `step` from call to answer, of
which `queue` and `device` in the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time

import own_daemon

import torch
import transformers

import attnd
import attnd.hf


def bytelm():
    folder = own_daemon.HERE.parent / "examples" / "bytelm"
    return transformers.LlamaForCausalLM.from_pretrained(folder)


def random_llama(name: str, n_layers: int = 4, **sizes: int):
    config = transformers.LlamaConfig(
        vocab_size=128256,
        num_hidden_layers=n_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        **sizes,
    )
    config._name_or_path = name
    return transformers.LlamaForCausalLM(config)


MODELS = {
    "bytelm": bytelm,
    "llama1b": lambda: random_llama(
        "random-llama-1b-4-layers", hidden_size=2048, intermediate_size=8192, head_dim=64
    ),
    "llama1b16": lambda: random_llama(
        "random-llama-1b", n_layers=16, hidden_size=2048, intermediate_size=8192, head_dim=64
    ),
    "llama8b": lambda: random_llama(
        "random-llama-8b-4-layers", hidden_size=4096, intermediate_size=14336, head_dim=128
    ),
    "llama8b32": lambda: random_llama(
        "random-llama-8b", n_layers=32, hidden_size=4096, intermediate_size=14336, head_dim=128
    ),
}
N_WARM = 4
TURN = 8  # steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Runner:
    """A model with one attention, and the cache of one batch."""

    def __init__(self, name: str, model, kind: str, cache):
        self.name, self.model, self.kind, self.cache = name, model, kind, cache
        self.run = model
        self.seconds: list[float] = []
        self.tokens: list[torch.Tensor] = []

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, chunk: int) -> None:
        self.model.set_attn_implementation(self.kind)
        wait(ids.device)
        start = time.perf_counter()
        for part in ids.split(chunk, dim=1):
            self.model(input_ids=part, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        wait(ids.device)
        self.prompt_seconds = time.perf_counter() - start

    @torch.no_grad()
    def decode(self, token: torch.Tensor, n_steps: int, feed: list[torch.Tensor] | None) -> None:
        """Feeds token, and then what `feed` says, or its own."""
        self.model.set_attn_implementation(self.kind)
        for _ in range(n_steps):
            start = time.perf_counter()
            logits = self.step(token)
            self.tokens.append(logits[:, -1:].argmax(dim=-1))
            wait(token.device)
            self.seconds.append(time.perf_counter() - start)
            token = (feed or self.tokens)[len(self.tokens) - 1]


    def step(self, token: torch.Tensor) -> torch.Tensor:
        return self.run(input_ids=token, past_key_values=self.cache, use_cache=True).logits


class Static(Runner):
    """sdpa over a StaticCache, its steps a CUDA graph."""

    graph = None

    def step(self, token: torch.Tensor) -> torch.Tensor:
        if self.graph is None:
            self.token = token.clone()
            lengths = [layer.cumulative_length.clone() for layer in self.cache.layers]
            super().step(self.token)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = super().step(self.token)
            for layer, n in zip(self.cache.layers, lengths):
                layer.cumulative_length.copy_(n)
        self.token.copy_(token)
        self.graph.replay()
        return self.logits


def own_runner(model, kind: str, n_columns: int) -> Runner:
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=n_columns)
        return Static("sdpa, static, graph", model, "sdpa", cache)
    return Runner(kind, model, kind, transformers.DynamicCache(config=model.config))


def bench(model, name: str, dtype: str, ids: torch.Tensor, args: argparse.Namespace) -> None:
    """Prints the rows of one cell."""
    batch, context = ids.shape
    n_steps = N_WARM + args.tokens
    wires = [None if wire == "model" else wire for wire in args.wires.split(",")]
    kv_dtypes = [None if kv == "model" else kv for kv in args.kv_dtypes.split(",")]
    ways = list(itertools.product(args.transport.split(","), wires, kv_dtypes))
    n_urls = sum("://" in transport for transport, *_ in ways) // len(kv_dtypes)
    n_blocks = batch * ((context + n_steps) // 16 + 2) * max(1, n_urls)  # they share a pool
    text = model.config
    kv_bytes = 2 * text.num_key_value_heads * text.head_dim * text.num_hidden_layers * 4
    memory = n_blocks * 16 * kv_bytes + (64 << 20)
    settings = {"device.kv_memory": f"{memory >> 20}M", "cache.io_memory": "512M"}
    if args.threads:
        settings["device.threads"] = args.threads
    settings.update(setting.split("=", 1) for setting in args.set)
    runners = [own_runner(model, kind, context + n_steps) for kind in args.own.split(",")]
    with contextlib.ExitStack() as stack:
        workers = []
        for transport, wire, kv_dtype in ways:
            graphs = transport == "graphs"
            lane = graphs or transport == "gpu"
            scheme = "gpu" if lane else transport
            url = transport
            if "://" not in transport:
                url = stack.enter_context(own_daemon.running(args, scheme, settings))
            client = stack.enter_context(attnd.connect(url, timeout=120))
            worker = stack.enter_context(
                attnd.hf.attach(
                    model,
                    client,
                    n_blocks=n_blocks,
                    lane=lane,
                    graphs=graphs,
                    wire_dtype=wire,
                    kv_dtype=kv_dtype,
                )
            )
            workers.append(worker)
            cache = stack.enter_context(worker.cache())
            what = f"attnd {client.info.backend}, {transport.partition(':')[0]}"
            what += f", {wire} on the wire" if wire else ""
            what += f", {kv_dtype} cached" if kv_dtype else ""
            runners.append(Runner(what, model, "attnd", cache))
            runners[-1].run = worker.forward
        first = runners[0]
        for r in runners:
            r.prefill(ids, args.chunk)
        for n in range(0, n_steps, TURN):
            for r in runners:
                token = first.tokens[n - 1] if n else ids[:, -1:]
                r.decode(token, min(TURN, n_steps - n), None if r is first else first.tokens)
            if n == 0:
                for worker in workers:
                    worker.spent = attnd.hf.Spent()
        medians = [statistics.median(r.seconds[N_WARM:]) for r in runners]
        n_own = len(runners) - len(workers)
        for i, (r, median) in enumerate(zip(runners, medians)):
            same = torch.stack([a == b for a, b in zip(r.tokens, first.tokens)]).float().mean()
            ratios = [f"{own / median:.2f}" for own in medians[:n_own]]
            layer = ""
            if i >= n_own and workers[i - n_own].spent.n_steps:  # over a lane nobody waits for one
                s, n = workers[i - n_own].spent, workers[i - n_own].spent.n_steps * 1e3
                layer = f"{s.copy_ns / n:.0f} + {s.total_ns / n:.0f}"
                layer += f" ({s.queue_ns / n:.0f}, {s.device_ns / n:.0f})"
            cells = [name, dtype, f"{batch}, {context}", r.name]
            cells += [f"{ids.numel() / r.prompt_seconds:.0f}", f"{median * 1e3:.2f}", *ratios]
            print("|", " | ".join([*cells, f"{same:.1%}", layer]), "|", flush=True)
        model.set_attn_implementation("attnd")  # as its workers expect


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--models", default="bytelm,llama8b")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--own", default="eager,sdpa", help="the model's attentions")
    parser.add_argument("--wires", default="model", help="wire_dtypes, each for all transports")
    parser.add_argument("--kv-dtypes", default="model", help="the same of kv_dtypes")
    parser.add_argument("--batches", default="32")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--tokens", type=int, default=64, help="steps that are timed")
    parser.add_argument("--chunk", type=int, default=512, help="columns of the prompt at a time")
    parser.add_argument("--threads", type=int, default=0, help="of torch, and of the cpu backend")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, of attnd.conf")
    args = parser.parse_args()
    own_daemon.use_library(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {where};"
        f" {args.tokens} steps"
    )
    against = " | ".join(f"against {kind}" for kind in args.own.split(","))
    print(
        f"| model | dtype | batch, context | attention | prompt, tokens/s | ms per step | {against} |"
        " agree | a layer, us: copy + step (queue, device) |"
    )
    print("|---" * (8 + len(args.own.split(","))) + "|")
    for model_name in args.models.split(","):
        for dtype in args.dtypes.split(","):
            torch.manual_seed(0)
            kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
            torch.set_default_dtype(kind)
            with torch.device(device):
                model = MODELS[model_name]().to(device, kind).eval()
            torch.set_default_dtype(torch.float32)
            for batch in map(int, args.batches.split(",")):
                for context in map(int, args.contexts.split(",")):
                    ids = torch.randint(3, 256, (batch, context), device=device)
                    bench(model, model_name, dtype, ids, args)


if __name__ == "__main__":
    main()
