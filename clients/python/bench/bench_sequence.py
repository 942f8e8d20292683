"""Sequences to a file, out of it, and to another daemon while they decode.

    python3 clients/python/bench/bench_sequence.py --prefix PREFIX   (bin/attnd, lib/libattn.so.0)

One sequence of `--tokens` in a pool of Llama-3-8B's shape (32 layers, 8 KV heads of 128, bf16: 2 MiB
a block of 16 tokens). export and import: to and from a file in `--folder`, with all verifying, syncing
and renaming. move: to a second daemon on the same host, idle, and while a worker decodes it, one
token of all layers after another. Medians of `--runs`. token is what one of the worker's takes, alone
and while blocks move; stop from the adoption at the source to the last block at the target; gap
from the last token at the source to the first one at the target, that token included.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import pathlib
import statistics
import tempfile
import threading
import time

import own_daemon

import numpy as np

import attnd
from attnd import _lib

LAYERS, Q_HEADS, KV_HEADS, DIM, BLOCK = 32, 32, 8, 128, 16
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * DIM * BLOCK * 2


def bf16(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def append(pool: attnd.Pool, seq: attnd.Sequence, n: int) -> None:
    rng = np.random.default_rng(1)
    for pos in range(0, n, 512):
        count = min(512, n - pos)
        k, v = bf16(rng, count, KV_HEADS, DIM), bf16(rng, count, KV_HEADS, DIM)
        for layer in range(LAYERS):
            pool.step(layer, [(seq, pos, count)], None, k, v)


class Worker:
    """Decodes a sequence on a thread, wherever it is."""

    def __init__(self, pool: attnd.Pool, seq: attnd.Sequence, n: int):
        rng = np.random.default_rng(2)
        self.q, self.k = bf16(rng, 1, Q_HEADS, DIM), bf16(rng, 1, KV_HEADS, DIM)
        self.pool, self.seq, self.n = pool, seq, n
        self.times: list[float] = []  # when a token was done
        self.arrived = threading.Event()
        self.is_ending = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.is_ending:
            try:
                for layer in range(LAYERS):
                    items = [(self.seq, self.n, 1)]
                    self.pool.step(layer, items, self.q, self.k, self.k)
            except (attnd.StaleEpochError, attnd.SequenceGoneError):
                self.arrived.wait()
                continue
            self.n += 1
            self.times.append(time.perf_counter())

    def await_tokens(self, n: int) -> None:
        n += len(self.times)
        while len(self.times) < n:
            time.sleep(0.001)

    def end(self) -> None:
        self.is_ending = True
        self.thread.join()


def move(seq: attnd.Sequence, to: attnd.Pool) -> tuple[attnd.Sequence, _lib.Moved]:
    """Sequence.move(), with what the library tells of it."""
    lib, new = _lib.library(), _lib.Seq()
    moved = _lib.Moved(ctypes.sizeof(_lib.Moved))
    source = seq.pool.client._handle
    status = lib.attn_seq_move(source, seq.id, to._handle, 0, ctypes.byref(new), moved)
    if status != 0:
        raise RuntimeError(lib.attn_last_error().contents.message.decode())
    return attnd.Sequence(to, new), moved


def timed(call):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def row(name: str, seconds: list[float], n_bytes: int) -> None:
    s = statistics.median(seconds)
    print(f"{name:34} {s * 1e3:9.1f} ms {n_bytes / s / 1e9:7.2f} GB/s")


def bench_files(pool, there, seq, n_bytes, args, folder) -> None:
    path, out, back = pathlib.Path(folder) / "bench.seq", [], []
    for _ in range(args.runs):
        out.append(timed(lambda: seq.export(path, timeout=120))[0])
        seconds, got = timed(lambda: there.import_sequence(path, timeout=120))
        back.append(seconds)
        got.close()
    row("export to a file", out, n_bytes)
    row("import out of it", back, n_bytes)


def bench_moves(pools, seq, n_bytes, args) -> attnd.Sequence:
    idle, at = [], 0
    for _ in range(args.runs):
        seconds, (seq, _) = timed(lambda: move(seq, pools[1 - at]))
        idle.append(seconds)
        at = 1 - at
    row("move, nobody decodes", idle, n_bytes)
    if at == 1:
        seq, _ = move(seq, pools[0])
    tokens, beside, stops, gaps, blocks, took = [], [], [], [], [], []
    at = 0
    for _ in range(args.runs):
        w = Worker(pools[at], seq, args.n)
        w.await_tokens(10)
        begin = len(w.times)
        tokens += list(np.diff(w.times))
        seconds, (seq, moved) = timed(lambda: move(seq, pools[1 - at]))
        n_source = len(w.times)
        w.pool, w.seq, at = pools[1 - at], seq, 1 - at
        w.arrived.set()
        w.await_tokens(3)
        w.end()
        took.append(seconds)
        beside += list(np.diff(w.times[begin:n_source]))
        gaps.append(w.times[n_source] - w.times[n_source - 1])
        stops.append(moved.stop_ns / 1e9)
        blocks.append(moved.n_blocks_stopped)
        args.n = w.n
    row("move beside a worker that decodes", took, n_bytes)
    ms = lambda x: f"{statistics.median(x) * 1e3:.1f} ms"  # noqa: E731
    print(f"token alone {ms(tokens)}, beside the move {ms(beside)}, largest {max(beside) * 1e3:.1f}")
    print(f"stop {ms(stops)} of {statistics.median(blocks)} blocks, gap {ms(gaps)}")
    return seq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="where the file is made (default: the system's)")
    args = parser.parse_args()
    args.n = args.tokens
    n_blocks = args.tokens // BLOCK + 256
    n_bytes = args.tokens // BLOCK * BLOCK_BYTES
    settings = {
        "device.kv_memory": f"{(n_blocks + 16) * BLOCK_BYTES >> 20}M",
        "cache.io_memory": "256M",
    }
    spec = attnd.PoolSpec("bench", LAYERS, Q_HEADS, KV_HEADS, DIM, n_blocks=n_blocks, q_dtype="bf16")
    for transport in args.transport.split(","):
        with contextlib.ExitStack() as stack:
            pools = []
            for _ in range(2):
                url = stack.enter_context(own_daemon.running(args, transport, settings))
                pools.append(stack.enter_context(attnd.connect(url)).create_pool(spec))
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder))
            args.n = args.tokens
            seq = pools[0].open()
            append(pools[0], seq, args.tokens)
            print(f"{transport}, {args.tokens} tokens, {n_bytes >> 20} MiB")
            bench_files(pools[0], pools[1], seq, n_bytes, args, folder)
            bench_moves(pools, seq, n_bytes, args)


if __name__ == "__main__":
    main()
