"""Layers over a lane, on the card: first whether they are right, then what the hand-over costs.

    bench_lane.py --prefix PREFIX                       one GPU, under MPS
    bench_lane.py --prefix PREFIX --device-index 1      two GPUs, no MPS
    bench_lane.py --prefix PREFIX --device-index 0,1    a daemon with two, under MPS
    bench_lane.py --prefix PREFIX --device-index 0,1 --split heads      and pools split over them

Workers are on the first GPU. Over several cards `kernels` is what a card's part of a layer takes, in
the mean; of a pool that is split, or a layer of sequences on several cards, the answer is the host's.

right  layers of random shapes and lengths, eagerly and in replayed CUDA graphs, byte for byte those
       of steps through shared memory; workers that come and go meanwhile
cost   32 layers in one CUDA graph, a few sequences of a short context: microseconds per layer from
       the graph's events, of which the daemon's kernels by its own count. What is added is their
       difference: copying q, k and v, the bell, the launch, the answer. Of it, `engine` is from the
       bell that was seen to the launch; `in it` the whole of a layer as the daemon sees it
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import signal
import time

import own_daemon

import torch

import attnd
import attnd.torch

ARGS = argparse.Namespace(device_index="0", split="whole")
IS_LOST = "is lost; the others go on"  # the log's word


def n_cards():
    return len(ARGS.device_index.split(","))


def make_pool(client, name, layers, heads, kv_heads, dim, n_blocks, is_invariant=True):
    return client.create_pool(
        attnd.PoolSpec(
            name,
            num_layers=layers,
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_k=dim,
            n_blocks=n_blocks,
            q_dtype="bf16",
            is_batch_invariant=is_invariant,
            split=ARGS.split,
            block_tokens=16 * n_cards() if ARGS.split == "tokens" else 16,
        )
    )


def tensors(pool, n, device="cuda"):
    s = pool.spec
    make = lambda h, d: torch.randn(n, h, d, device=device, dtype=torch.bfloat16)  # noqa: E731
    return (
        make(s.num_q_heads, s.head_dim_k),
        make(s.num_kv_heads, s.head_dim_k),
        make(s.num_kv_heads, s.head_dim_v),
    )


def expect(pool, layer, items, qkv, got):
    want = pool.step(layer, items, *(x.cpu() for x in qkv)).out
    if not torch.equal(got.cpu(), want):
        wrong = (got.cpu() != want).float().mean()
        raise SystemExit(f"layer {layer} of {len(items)} items: {wrong:.2%} of the bytes differ")


def check_eager(url, seed, n_layers):
    """Layers against steps of twin sequences."""
    random.seed(seed)
    torch.manual_seed(seed)
    done = 0
    with attnd.connect(url, timeout=60) as client:
        shapes = [(32, 8, 128), (8, 2, 64), (8, 8, 128), (64, 8, 128), (16, 1, 256)]
        if ARGS.split == "heads":
            shapes = [s for s in shapes if s[1] % n_cards() == 0]
        while done < n_layers:
            heads, kv_heads, dim = random.choice(shapes)
            name = f"{heads}-{kv_heads}-{dim}"
            pool = make_pool(client, name, 4, heads, kv_heads, dim, 4000)
            with client.open_lane(in_bytes=64 << 20, out_bytes=64 << 20) as lane:
                assert not lane.is_host
                attention = attnd.torch.Attention(lane, pool)
                n = random.randint(1, 24)
                pairs = [(pool.open(), pool.open()) for _ in range(n)]
                lens = [0] * n
                for _ in range(random.randint(2, 12)):
                    chosen = random.sample(range(n), random.randint(1, n))
                    more = [1 if random.random() < 0.8 else random.randint(2, 60) for _ in chosen]
                    attention.plan([(pairs[i][0], lens[i], m) for i, m in zip(chosen, more)])
                    twins = [(pairs[i][1], lens[i], m) for i, m in zip(chosen, more)]
                    made = []
                    for _ in range(4):  # all are enqueued before one is looked at
                        qkv = tensors(pool, sum(more))
                        made.append((qkv, attention(*qkv)))
                    torch.cuda.synchronize()
                    attention.check()
                    for layer, (qkv, out) in enumerate(made):
                        expect(pool, layer, twins, qkv, out)
                        done += 1
                    for i, m in zip(chosen, more):
                        lens[i] += m
                for pair in pairs:
                    for seq in pair:
                        seq.close()
    return done


def check_graph(url, n_replays):
    """A captured pass of 8 layers, whose plan alone changes from token to token."""
    with attnd.connect(url, timeout=60) as client:
        pool = make_pool(client, "graph", 8, 32, 8, 128, 4000)
        with client.open_lane() as lane:
            attention = attnd.torch.Attention(lane, pool)
            pairs = [(pool.open(), pool.open()) for _ in range(5)]
            fixed = [tensors(pool, 5) for _ in range(8)]
            outs = []
            items = attnd.Items([(a, 0, 1) for a, _ in pairs])
            attention.plan(items)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for qkv in fixed:
                    attention(*qkv)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                outs = [attention(*qkv) for qkv in fixed]
            for pos in range(n_replays):
                for qkv in fixed:
                    for x in qkv:
                        x.normal_()
                attention.plan([(a, pos, 1) for a, _ in pairs])
                graph.replay()
                torch.cuda.synchronize()
                attention.check()
                for layer, (qkv, out) in enumerate(zip(fixed, outs)):
                    expect(pool, layer, [(b, pos, 1) for _, b in pairs], qkv, out)
            for pair in pairs:
                for seq in pair:
                    seq.close()
    return 8 * n_replays


def check_end(args):
    """A daemon killed while a layer waits for it: the stream goes on, the device is as it was."""
    program = args.prefix / "bin" / "attnd"
    settings = {"device.kv_memory": "256M", "device.index": args.device_index}
    milliseconds = []
    for _ in range(args.kills):
        with attnd.Daemon(settings, scheme="shm", has_lanes=True, program=program) as daemon:
            with daemon.connect(timeout=60) as client:
                pool = make_pool(client, "end", 2, 32, 8, 128, 100)
                lane = client.open_lane()
                attention = attnd.torch.Attention(lane, pool)
                seq = pool.open()
                for pos in range(3):
                    attention.plan([(seq, pos, 1)])
                    if pos == 2:
                        daemon.process.send_signal(signal.SIGSTOP)
                        os.waitpid(daemon.process.pid, os.WUNTRACED)  # all its threads stand
                    outs = [attention(*tensors(pool, 1)) for _ in range(2)]
                    if pos == 2:
                        time.sleep(0.02)  # the first one waits
                        start = time.monotonic()
                        daemon.process.kill()
                        torch.cuda.synchronize()
                        milliseconds.append((time.monotonic() - start) * 1e3)
                    assert bool(outs[0].isnan().any()) == (pos == 2)
                    assert bool(outs[1].isnan().any()) == (pos == 2)
                try:
                    attention.check()
                    raise SystemExit("a lane to a dead daemon is well")
                except attnd.ConnectionLostError:
                    pass
                lane.close()
    if milliseconds:
        milliseconds.sort()
        print(
            f"right: {args.kills} daemons killed, their workers went on after"
            f" {milliseconds[len(milliseconds) // 2]:.1f} ms (p50), {milliseconds[-1]:.1f} at most",
            flush=True,
        )


def decode_for_ever(args, url, is_ready, may_go):
    """A worker to be killed."""
    global ARGS
    ARGS = args
    with attnd.connect(url, timeout=60) as client:
        pool = make_pool(client, "victim", 2, 32, 8, 128, 4000, False)
        with client.open_lane() as lane:
            attention = attnd.torch.Attention(lane, pool)
            seqs = [pool.open() for _ in range(8)]
            for n in itertools.count():
                attention.plan([(seq, n % 64, 1) for seq in seqs])
                for _ in range(2):
                    attention(*tensors(pool, 8))
                torch.cuda.synchronize()
                if n == 3:
                    is_ready.set()
                    may_go.wait()


def check_by_step(pool):
    """A step of the daemon's, against what it must give."""
    seq = pool.open()
    qkv = [torch.randn(4, 8, 64, dtype=torch.bfloat16) for _ in range(3)]
    out = torch.full((4, 8, 64), torch.nan, dtype=torch.bfloat16)
    pool.step(0, [(seq, 0, 4)], *qkv, out=out)
    if not torch.equal(out[0], qkv[2][0]):  # the first sees itself alone
        raise SystemExit("after a kill a step is wrong")
    seq.close()


class Bystander:
    """A worker whose lane is there all the time."""

    def __init__(self, client):
        self.pool = make_pool(client, "bystander", 2, 32, 8, 128, 1000)
        self.lane = client.open_lane()
        self.attention = attnd.torch.Attention(self.lane, self.pool)
        self.pairs = [(self.pool.open(), self.pool.open()) for _ in range(4)]
        self.pos = 0

    def check(self):
        """Its next token, against steps."""
        self.attention.plan([(a, self.pos, 1) for a, _ in self.pairs])
        made = []
        for _ in range(2):
            qkv = tensors(self.pool, len(self.pairs))
            made.append((qkv, self.attention(*qkv)))
        torch.cuda.synchronize()
        self.attention.check()
        for layer, (qkv, out) in enumerate(made):
            expect(self.pool, layer, [(b, self.pos, 1) for _, b in self.pairs], qkv, out)
        self.pos += 1


def kill_workers(args, daemon, n, n_ready):
    """Kills up to n workers in the middle of layers, n_ready of them made ready at a time, until one
    takes a card or the daemon along; how many were."""
    fork = multiprocessing.get_context("forkserver")
    ready = []
    try:
        with daemon.connect(timeout=60) as client:
            pool = make_pool(client, "after", 1, 8, 8, 64, 10)
            bystander = Bystander(client) if n_ready > 1 else None
            for k in range(n):
                while len(ready) < min(n_ready, n - k):
                    events = fork.Event(), fork.Event()
                    worker = fork.Process(target=decode_for_ever, args=(args, daemon.url, *events))
                    worker.start()
                    ready.append((worker, *events))
                worker, is_ready, may_go = ready.pop(0)
                if not is_ready.wait(120):
                    raise SystemExit("the worker that is to be killed did not begin")
                may_go.set()
                time.sleep(0.02 + random.random() * 0.05)
                worker.kill()
                worker.join()
                if worker.exitcode != -signal.SIGKILL:
                    raise SystemExit(f"a worker left before it was killed, with {worker.exitcode}")
                try:
                    check_by_step(pool)
                    if bystander is not None:
                        bystander.check()
                except attnd.AttndError:
                    return k + 1
                if IS_LOST in daemon.log.read_text():
                    check_by_step(pool)
                    return k + 1
        return n
    finally:
        for worker, _, _ in ready:
            worker.kill()


def check_killed_workers(args):
    """Workers of another GPU than the daemon's harm nobody: it goes on, and so does a bystander.
    Under MPS they may take a card of it along: what is left of it never answers nonsense."""
    is_shared = "0" in args.device_index.split(",")
    settings = {"device.kv_memory": "1G", "device.index": args.device_index}
    multiprocessing.set_forkserver_preload(["torch", "attnd.torch"])
    n_killed = n_lost = 0
    codes = []
    while n_killed < args.worker_kills:
        program = args.prefix / "bin" / "attnd"
        with attnd.Daemon(settings, scheme="shm", has_lanes=True, program=program) as daemon:
            n_left = args.worker_kills - n_killed
            n_killed += kill_workers(args, daemon, n_left, 1 if is_shared else 8)
            try:
                with daemon.connect(timeout=10) as client:
                    client.ping()
                n_lost += IS_LOST in daemon.log.read_text()
            except attnd.AttndError:
                codes.append(daemon.process.wait(60))
    if args.worker_kills:
        print(
            f"{n_killed} workers killed in a layer: the daemon lost a card and went on {n_lost} times,"
            f" ended {len(codes)} times with {sorted(set(codes))}",
            flush=True,
        )
    if (codes or n_lost) and not is_shared:
        raise SystemExit("a worker on another GPU took a card with it")


def come_and_go(args, url, seed):
    global ARGS
    ARGS = args
    try:
        check_eager(url, seed, 60)
    except BaseException as e:
        print(f"worker {seed}: {type(e).__name__}: {e}", flush=True)
        raise SystemExit(1)


def hand_over(url, n_sequences, context, n_replays):
    """Microseconds per layer: p50 and p99 of replays, the daemon's kernels, its engine, all of it."""
    layers = 32
    with attnd.connect(url, timeout=60) as client:
        pool = make_pool(client, f"cost{context}", layers, 32, 8, 128, 4000, False)
        with client.open_lane() as lane:
            attention = attnd.torch.Attention(lane, pool)
            seqs = [pool.open() for _ in range(n_sequences)]
            for layer in range(layers):  # the context
                n = n_sequences * context
                qkv = [x.cpu() for x in tensors(pool, n)]
                pool.step(layer, [(s, 0, context) for s in seqs], *qkv)
            qkv = tensors(pool, n_sequences)
            stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(layers):
                    # as a projection would have written them: in place, and out is read there
                    lane.enqueue(
                        pool,
                        n_sequences,
                        *(x.data_ptr() for x in qkv),
                        stream=torch.cuda.current_stream().cuda_stream,
                    )
            times = []
            for n in range(n_replays + 20):
                if n == 20:
                    before = client.stats()
                attention.plan([(s, context + n, 1) for s in seqs])
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record(stream)
                with torch.cuda.stream(stream):
                    graph.replay()
                b.record(stream)
                b.synchronize()
                times.append(a.elapsed_time(b) * 1e3 / layers)
            after = client.stats()
            attention.check()
            for s in seqs:
                s.close()
    took = after["device_seconds_total"] - before["device_seconds_total"]
    batches = after["batches_total"] - before["batches_total"]
    parts = []
    for what in ("queue", "total"):
        a, b = (x[f"step_{what}_seconds"]["gpu"] for x in (before, after))
        parts.append((b["sum"] - a["sum"]) / (b["count"] - a["count"]) * 1e6)
    times = sorted(times[20:])
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    return p50, p99, took / batches * 1e6, *parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--layers", type=int, default=3000, help="that are checked; 0: kills alone")
    parser.add_argument("--kills", type=int, default=3, help="daemons killed under a waiting layer")
    parser.add_argument("--worker-kills", type=int, default=0, help="workers killed in a layer")
    parser.add_argument("--device-index", default="0", help="the daemon's: 0, 1, or 0,1")
    parser.add_argument("--split", default="whole", help="of pools over them: heads, tokens")
    parser.add_argument("--replays", type=int, default=300, help="of 32 layers that are timed")
    global ARGS
    ARGS = args = parser.parse_args()
    args.transport = "gpu"
    torch.cuda.set_device(0)
    if args.layers > 0:
        check_and_time(args)
    check_end(args)
    check_killed_workers(args)


def check_and_time(args):
    settings = {
        "device.kv_memory": "24G",
        "device.index": args.device_index,
        "cache.io_memory": "512M",
        "listen.shm_client": "256M",
    }
    print(
        f"workers on GPU 0, the daemon on GPU {args.device_index}, pools {args.split}", flush=True
    )
    with own_daemon.running(args, "gpu", settings) as url:
        start = time.monotonic()
        n = check_eager(url, 1, args.layers)
        print(f"right: {n} layers eagerly, {time.monotonic() - start:.0f} s", flush=True)
        print(f"right: {check_graph(url, 60)} layers of a replayed graph", flush=True)
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=come_and_go, args=(args, url, 10 + i)) for i in range(4)]
        for w in workers:
            w.start()
        check_eager(url, 2, 400)
        for w in workers:
            w.join()
            if w.exitcode != 0:
                raise SystemExit(f"a worker left with {w.exitcode}")
        print("right: beside 4 workers that came and went", flush=True)
        print(
            "| sequences | context | us per layer, p50 | p99 | kernels | added | engine | in it |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for n_sequences, context in ((1, 64), (3, 64), (3, 512), (16, 512), (32, 512)):
            p50, p99, kernels, queue, total = hand_over(url, n_sequences, context, args.replays)
            print(
                f"| {n_sequences} | {context} | {p50:.1f} | {p99:.1f} | {kernels:.1f} |"
                f" {p50 - kernels:.1f} | {queue:.1f} | {total:.1f} |",
                flush=True,
            )
        with attnd.connect(url, timeout=60) as client:
            refused = client.stats()["bells_refused_total"]
            print(f"bells refused: {refused}", flush=True)


if __name__ == "__main__":
    main()
