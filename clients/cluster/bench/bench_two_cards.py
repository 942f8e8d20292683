"""Two daemons of one host, each with a card of its own: what they do together.

    bench_two_cards.py --prefix PREFIX                      on two GPUs, all under MPS
    bench_two_cards.py --prefix PREFIX --backend cpu --tokens 4096          a rehearsal

shards  decode steps of one layer (32 query heads, 8 kv heads of 128, bf16) of one sequence of --tokens:
        whole on the first daemon, and in two shards over both. First that outputs and lse are those of
        float64 and of one daemon, then the times of both by turns; over each of --transport
shard lanes  such steps of a process on the first GPU, over a lane to each daemon and merged on the GPU,
        against a lane to one: eagerly, and in a CUDA graph
lanes   one process on the first GPU with a lane to each daemon: layers on both at once, byte for byte
        those of steps through shared memory; then 32 layers in a CUDA graph for each, one after the
        other and both at once. On CPUs the first part of it
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[3]
for part in ("python/bench", "python/src", "cluster/src"):
    sys.path.insert(0, str(ROOT / "clients" / part))
import numpy as np  # noqa: E402
import own_daemon  # noqa: E402

Q_HEADS, KV_HEADS, DIM, CHUNK = 32, 8, 128, 4096
N_MADE = 64


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Two daemons on two cards of one host.")
    own_daemon.add_arguments(p)
    p.add_argument("--tokens", default="1048576", help="comma-separated (%(default)s)")
    p.add_argument("--spin", help="engine.spin, such as 2ms: of steps through shm")
    p.add_argument("--steps", type=int, default=60, help="of each round (%(default)s)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--layers", type=int, default=400, help="of lanes, that are checked")
    p.add_argument("--replays", type=int, default=200)
    p.add_argument("--no-lanes", action="store_true")
    p.add_argument("--no-shards", action="store_true")
    p.add_argument("--no-shard-lanes", action="store_true")
    return p.parse_args()


# ---- shards


def wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def keys(tokens: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """k and v of a chunk of the prompt, or, below 0, of a token, bf16. V is positive, and four times as
    large in the second half: output and lse of half of the tokens are far from those of all."""
    rng = np.random.default_rng(chunk + 64)
    n = min(CHUNK, tokens - chunk * CHUNK) if chunk >= 0 else 1
    k, v = rng.integers(0, 1 << 16, (2, n, KV_HEADS, DIM), np.uint16)
    is_late = chunk * CHUNK >= tokens // 2
    return k & 0x81FF | 0x3C00, v & 0x01FF | (0x3D00 if is_late else 0x3C00)


@functools.cache
def made(tokens: int) -> list[tuple[np.ndarray, ...]]:
    """q, k and v of tokens behind the prompt, by position modulo N_MADE."""
    rng = np.random.default_rng(7)
    return [(queries(rng), *(x[:1] for x in keys(tokens, -1 - i))) for i in range(N_MADE)]


def queries(rng: np.random.Generator) -> np.ndarray:
    f = np.float32(8) * rng.standard_normal((1, Q_HEADS, DIM), np.float32)
    return (f.view(np.uint32) >> 16).astype(np.uint16)


@functools.cache
def reference(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of the first token behind the prompt, in float64."""
    n_chunks = -(-tokens // CHUNK)
    q, k, v = made(tokens)[tokens % N_MADE]
    x = wide(q).astype(np.float64).reshape(KV_HEADS, -1, DIM) / np.sqrt(DIM)
    top = np.full(x.shape[:2], -np.inf)
    total, out = np.zeros(x.shape[:2]), np.zeros(x.shape)
    for chunk in range(n_chunks + 1):
        a, b = (k, v) if chunk == n_chunks else keys(tokens, chunk)
        s = x @ wide(a).astype(np.float64).transpose(1, 2, 0)
        new = np.maximum(top, s.max(2))
        p, scale = np.exp(s - new[..., None]), np.exp(top - new)
        total = total * scale + p.sum(2)
        out = out * scale[..., None] + p @ wide(b).astype(np.float64).transpose(1, 0, 2)
        top = new
    return (out / total[..., None]).reshape(1, Q_HEADS, DIM), (top + np.log(total)).reshape(1, -1)


def expect(what: str, got: Any, want: tuple) -> None:
    out = np.abs(wide(got.out) - want[0]).max() / np.abs(want[0]).max()
    lse = np.abs(got.lse - want[1]).max()
    print(f"{what}: out differs by {out:.1e} of the largest, lse by {lse:.1e}", flush=True)
    if not (out < 1e-2 and lse < 2e-3):
        raise SystemExit("wrong")


@contextlib.contextmanager
def connected(urls: list[str]) -> Iterator[tuple[Any, Any]]:
    """Clients of the first daemon, and of both as a cluster."""
    import attnd
    import attnd_cluster

    file = pathlib.Path(tempfile.mkdtemp()) / "members.json"
    file.write_text(json.dumps({"members": [{"name": str(i), "url": u} for i, u in enumerate(urls)]}))
    with (
        attnd.connect(urls[0], timeout=120) as alone,
        attnd_cluster.connect(f"cluster+file://{file}", timeout=120) as both,
    ):
        yield alone, both


def shards(options: argparse.Namespace, urls: list[str]) -> None:
    with connected(urls) as (alone, both):
        print(f"{urls[0].split(':')[0]}, engine.spin {options.spin or 'as it comes'}")
        for tokens in map(int, options.tokens.split(",")):
            compare(options, tokens, alone, both)


@contextlib.contextmanager
def filled(tokens: int, alone: Any, both: Any) -> Iterator[tuple[Any, Any, Any, Any]]:
    """A pool of one daemon and a sequence of so many tokens there, and those in two shards over both."""
    import attnd

    block = 16
    n_blocks = tokens // block + 200
    spec = attnd.PoolSpec("one", 1, Q_HEADS, KV_HEADS, DIM, block_tokens=block, n_blocks=n_blocks)
    spec = spec._replace(q_dtype="bf16")
    half = (tokens // 2 // block + 64) * block
    start = time.monotonic()
    with (
        alone.create_pool(spec) as one,
        both.create_pool(spec._replace(name="two", n_blocks=n_blocks // 2 + 200)) as two,
        one.open() as whole,
        two.open(shard_tokens=half) as split,
    ):
        for pos in range(0, tokens, CHUNK):
            k, v = keys(tokens, pos // CHUNK)
            one.step(0, [(whole, pos, len(k))], k=k, v=v)
            two.step(0, [(split, pos, len(k))], k=k, v=v)
        where = [s.where for s in split.shards]
        print(f"{tokens} tokens in {time.monotonic() - start:.0f} s; shards on {where}")
        if sorted(where) != ["0", "1"]:
            raise SystemExit("the shards are not on both daemons")
        yield one, whole, two, split


def compare(options: argparse.Namespace, tokens: int, alone: Any, both: Any) -> None:
    import attnd

    with filled(tokens, alone, both) as (one, whole, two, split):

        def token(pool: Any, seq: Any, pos: int) -> attnd.Result:
            return pool.step(0, [(seq, pos, 1)], *made(tokens)[pos % N_MADE], lse=True)

        pos = tokens
        a, b = token(one, whole, pos), token(two, split, pos)
        expect("one daemon and float64", a, reference(tokens))
        expect("two daemons and float64", b, reference(tokens))
        for pos in range(pos + 1, pos + 5):
            a, b = token(one, whole, pos), token(two, split, pos)
            expect("two daemons and one", b, (wide(a.out), a.lse))
        times: dict[str, list[list[float]]] = {"one": [], "two": []}
        parts: dict[str, list[tuple[float, ...]]] = {"one": [], "two": []}
        pos += 1
        for _ in range(options.rounds):
            for name, pool, seq in (("one", one, whole), ("two", two, split)):
                took = []
                for i in range(options.steps):
                    start, cpu = time.perf_counter(), time.thread_time()
                    r = token(pool, seq, pos + i)
                    cpu = time.thread_time() - cpu
                    took.append((time.perf_counter() - start) * 1e6)
                    ns = (r.device_ns, r.queue_ns, r.total_ns, cpu * 1e9)
                    parts[name].append(tuple(x / 1e3 for x in ns))
                times[name].append(sorted(took))
            pos += options.steps
        print("| daemons | step p50, us, rounds | median | p99 | device | queue | total | thread's CPU |")
        print("|---|---|---|---|---|---|---|---|")
        middle = {}
        for name, rounds in times.items():
            p50 = [r[len(r) // 2] for r in rounds]
            middle[name] = statistics.median(p50)
            p99 = statistics.median(r[int(len(r) * 0.99)] for r in rounds)
            row = ", ".join(f"{x:.0f}" for x in p50)
            rest = " | ".join(f"{statistics.median(x):.0f}" for x in zip(*parts[name]))
            print(f"| {name} | {row} | {middle[name]:.0f} | {p99:.0f} | {rest} |")
        print(f"two over one: {middle['two'] / middle['one']:.3f} x the time", flush=True)


# ---- shards by lanes


def shard_lanes(options: argparse.Namespace, urls: list[str]) -> None:
    import torch

    if options.backend != "cpu":
        torch.cuda.set_device(0)
    with connected(urls) as (alone, both):
        for tokens in map(int, options.tokens.split(",")):
            compare_shard_lanes(options, tokens, alone, both)


def compare_shard_lanes(options: argparse.Namespace, tokens: int, alone: Any, both: Any) -> None:
    import attnd
    import attnd.torch
    import attnd_cluster.torch
    import torch

    is_cpu = options.backend == "cpu"
    device = "cpu" if is_cpu else "cuda"
    wait = (lambda: None) if is_cpu else torch.cuda.synchronize
    with (
        filled(tokens, alone, both) as (one, whole, two, split),
        alone.open_lane() as lane,
        attnd_cluster.torch.Attention(two) as shared,
    ):
        sides = {"one": (attnd.torch.Attention(lane, one), whole), "two": (shared, split)}
        qkv = [
            [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device) for x in token]
            for token in made(tokens)
        ]

        def token(name: str, pos: int) -> Any:
            attention, seq = sides[name]
            attention.plan([(seq, pos, 1)])
            out = attention(*qkv[pos % N_MADE])
            wait()
            attention.check()
            return out

        def numbers(x: Any) -> np.ndarray:
            return x.float().cpu().numpy()

        pos, want = tokens, reference(tokens)[0]
        for _ in range(5):
            outs = {name: numbers(token(name, pos)) for name in sides}
            if pos > tokens:
                want = outs["one"]
            for name, out in outs.items():
                off = np.abs(out - want).max() / np.abs(want).max()
                print(f"{name} differs by {off:.1e} of the largest", flush=True)
                if not off < 1e-2:
                    raise SystemExit("wrong")
            pos += 1
        middle: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name in sides:
                took = []
                for i in range(options.steps):
                    start = time.perf_counter()
                    token(name, pos + i)
                    took.append((time.perf_counter() - start) * 1e6)
                middle[name].append(statistics.median(took))
            pos += options.steps
        for name, p50 in middle.items():
            row = ", ".join(f"{x:.0f}" for x in p50)
            print(f"| by lanes, {name} | {row} | {statistics.median(p50):.0f} |")
        x = statistics.median(middle["two"]) / statistics.median(middle["one"])
        print(f"{tokens} tokens by lanes, a plan and its layer: two over one {x:.3f} x the time", flush=True)
        if not is_cpu:
            graphs(options, tokens, sides, qkv, pos)


def graphs(options: argparse.Namespace, tokens: int, sides: Any, qkv: Any, pos: int) -> None:
    """The layer in a CUDA graph: what the stream takes for it, without the plan."""
    import torch

    captured, outs = {}, {}
    for name, (attention, seq) in sides.items():
        attention.plan([(seq, pos, 1)])
        captured[name] = torch.cuda.CUDAGraph()
        outs[name] = torch.empty_like(qkv[0][0])
        with torch.cuda.graph(captured[name], stream=torch.cuda.Stream()):
            attention(*qkv[pos % N_MADE], out=outs[name])
    took: dict[str, list[float]] = {name: [] for name in sides}
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(options.rounds * options.steps):
        for name, (attention, seq) in sides.items():
            if i > 0:
                attention.plan([(seq, pos, 1)])  # the same token is written again
            a.record()
            captured[name].replay()
            b.record()
            torch.cuda.synchronize()
            attention.check()
            took[name].append(a.elapsed_time(b) * 1e3)
    off = (outs["one"].float() - outs["two"].float()).abs().max() / outs["one"].float().abs().max()
    p50 = {name: statistics.median(x) for name, x in took.items()}
    print(
        f"{tokens} tokens by lanes, the layer in a graph: {p50['one']:.0f} and {p50['two']:.0f} us,"
        f" {p50['two'] / p50['one']:.3f} x the time; outputs differ by {float(off):.1e}",
        flush=True,
    )


# ---- lanes


class Side:
    """A worker's lane to one daemon, and sequences there with twins for what it must give."""

    def __init__(self, url: str, n: int, n_blocks: int):
        import attnd
        import attnd.torch
        import bench_lane
        import torch

        self.lanes = bench_lane
        self.client = attnd.connect(url, timeout=60)
        self.pool = bench_lane.make_pool(self.client, "two", 32, Q_HEADS, KV_HEADS, DIM, n_blocks)
        self.lane = self.client.open_lane(in_bytes=64 << 20, out_bytes=64 << 20)
        self.device = "cpu" if self.lane.is_host else "cuda"
        self.attention = attnd.torch.Attention(self.lane, self.pool)
        self.pairs = [(self.pool.open(), self.pool.open()) for _ in range(n)]
        self.lens = [0] * n
        self.stream = torch.cuda.Stream() if self.device == "cuda" else None

    def enqueue(self, n_layers: int) -> None:
        """Some tokens of some sequences."""
        import torch

        n = len(self.pairs)
        chosen = random.sample(range(n), random.randint(1, n))
        more = [1 if random.random() < 0.8 else random.randint(2, 60) for _ in chosen]
        items = [(self.pairs[i][0], self.lens[i], m) for i, m in zip(chosen, more)]
        self.attention.plan(items, layers=range(n_layers))
        self.twins = [(self.pairs[i][1], self.lens[i], m) for i, m in zip(chosen, more)]
        self.made = []
        with torch.cuda.stream(self.stream):
            for _ in range(n_layers):
                qkv = self.lanes.tensors(self.pool, sum(more), self.device)
                self.made.append((qkv, self.attention(*qkv)))
        for i, m in zip(chosen, more):
            self.lens[i] += m

    def check(self) -> int:
        self.attention.check()
        for layer, (qkv, out) in enumerate(self.made):
            self.lanes.expect(self.pool, layer, self.twins, qkv, out)
        return len(self.made)

    def capture(self, n: int, context: int) -> None:
        """A graph of all layers of the next token of n new sequences of so many tokens."""
        import torch

        self.seqs, self.pos = [self.pool.open() for _ in range(n)], context
        for layer in range(32):
            qkv = [x.cpu() for x in self.lanes.tensors(self.pool, n * context)]
            self.pool.step(layer, [(s, 0, context) for s in self.seqs], *qkv)
        qkv = self.lanes.tensors(self.pool, n)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(32):
                at = torch.cuda.current_stream().cuda_stream
                self.lane.enqueue(self.pool, n, *(x.data_ptr() for x in qkv), stream=at)

    def replay(self) -> None:
        import torch

        self.attention.plan([(s, self.pos, 1) for s in self.seqs])
        self.pos += 1
        with torch.cuda.stream(self.stream):
            self.graph.replay()


def timed(sides: list[Side], n: int) -> float:
    """Microseconds of a layer, p50 of replays on all of these at once."""
    import torch

    took = []
    for _ in range(n + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for side in sides:
            side.replay()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - start) * 1e6 / 32)
        for side in sides:
            side.attention.check()
    return statistics.median(took[20:])


def lanes(options: argparse.Namespace, urls: list[str]) -> None:
    import torch

    random.seed(3)
    torch.manual_seed(3)
    is_cpu = options.backend == "cpu"
    if not is_cpu:
        torch.cuda.set_device(0)
    sides, done = [Side(url, 8, 100 if is_cpu else 4000) for url in urls], 0
    while done < options.layers:
        for side in sides:
            side.enqueue(4)
        if not is_cpu:
            torch.cuda.synchronize()
        done += sum(side.check() for side in sides)
    print(f"right: {done} layers over two lanes at once, byte for byte", flush=True)
    if not is_cpu:
        compare_lanes(options, sides)
    for side in sides:
        side.lane.close()
        side.client.close()


def compare_lanes(options: argparse.Namespace, sides: list[Side]) -> None:
    print("| sequences of each | context | first alone, us a layer | second alone | both at once |")
    print("|---|---|---|---|---|")
    for n, context in ((1, 64), (16, 512), (32, 512)):
        for side in sides:
            side.capture(n, context)
        alone = [timed([side], options.replays) for side in sides]
        both = timed(sides, options.replays)
        print(f"| {n} | {context} | {alone[0]:.1f} | {alone[1]:.1f} | {both:.1f} |", flush=True)
        for side in sides:
            for seq in side.seqs:
                seq.close()


def main() -> None:
    options = arguments()
    own_daemon.use_library(options)
    import attnd

    tokens = max(map(int, options.tokens.split(",")))
    settings = {"backend": options.backend, "engine.lease": "1h", "device.kv_memory": "12G"}
    settings |= {"cache.max_seq_tokens": tokens + 8192, "cache.io_memory": "512M"}
    settings |= {"listen.shm_client": "256M"}
    if options.backend == "cpu":
        settings |= {"device.kv_memory": "512M", "device.threads": 1}
    if options.spin:
        settings |= {"engine.spin": options.spin}
    program = options.prefix / "bin" / "attnd"
    runs: list[tuple[Any, str]] = []
    if not options.no_shards:
        runs += [(shards, scheme) for scheme in options.transport.split(",")]
    runs += [(shard_lanes, "shm")] * (not options.no_shard_lanes)
    runs += [(lanes, "shm")] * (not options.no_lanes)
    for run, scheme in runs:
        daemons: list[attnd.Daemon] = []
        try:
            for card in (0, 1):
                own = settings if options.backend == "cpu" else {**settings, "device.index": card}
                daemons.append(
                    attnd.Daemon(own, scheme=scheme, has_lanes=run is not shards, program=program)
                )
            run(options, [d.url for d in daemons])
        except attnd.AttndError:
            for d in daemons:
                print(d.log.read_text(), file=sys.stderr)
            raise
        finally:
            for d in daemons:
                d.close()


if __name__ == "__main__":
    main()
