"""How well clients of a cluster place the prompts of a trace: the share of blocks found in the cache
with N daemons against one that has as many blocks as all of them, and how even the load is.

    python3 clients/cluster/bench/bench_placement.py TRACE.jsonl [--blocks 5000] [--daemons 4]

TRACE is in Mooncake's format: a line of JSON for each request, whose hash_ids name the blocks of its
prompt in order. Each becomes a block of 16 tokens of a small pool. Requests come one after the other,
from the clients by turns; --open sequences are open at a time, the oldest is closed first. Counts,
not times: they depend on the machine only where steps queue.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
for part in ("python", "cluster"):
    sys.path.insert(0, str(ROOT / "clients" / part / "src"))
SIZE = 16


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Hit ratio and spread of placement over daemons.")
    p.add_argument("trace", type=pathlib.Path)
    p.add_argument("--prefix", type=pathlib.Path, default=ROOT / "build", help="with bin/ and lib/")
    p.add_argument("--daemons", type=int, default=4)
    p.add_argument("--blocks", type=int, default=5000, help="of each daemon (%(default)s)")
    p.add_argument("--clients", type=int, default=1)
    p.add_argument("--open", type=int, default=32, help="sequences at a time (%(default)s)")
    p.add_argument("--requests", type=int, default=0, help="the first so many (all)")
    return p.parse_args(argv)


def prompts(options: argparse.Namespace) -> list[list[int]]:
    """The tokens of each request: SIZE for each block, and one that is always computed."""
    made = []
    with options.trace.open() as f:
        for line in f:
            ids = json.loads(line)["hash_ids"]
            made.append([t for h in ids for t in range(h * SIZE, (h + 1) * SIZE)] + [2**32 - 1])
            if len(made) == options.requests:
                break
    return made


def run(options: argparse.Namespace, n_daemons: int, n_blocks: int) -> tuple[float, float, float]:
    """The share of blocks that were found; of the busiest daemon, requests and tokens to compute
    over the mean of all."""
    import attnd
    import numpy as np

    import attnd_cluster

    spec = attnd.PoolSpec(
        "p", num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim_k=8, q_dtype="f32",
        block_tokens=SIZE, n_blocks=n_blocks,
    )  # fmt: skip
    settings = {
        "backend": "cpu",
        "device.threads": 1,
        "device.kv_memory": f"{n_blocks * 4096 // 2**20 + 16}M",  # as many records as blocks
        "cache.io_memory": "64M",
        "engine.lease": "1h",
    }
    program = options.prefix / "bin" / "attnd"
    requests: collections.Counter[str] = collections.Counter()
    computed: collections.Counter[str] = collections.Counter()
    n_found = n_all = 0
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(attnd.Daemon(settings, program=program)).url
            for _ in range(n_daemons)
        ]
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        members = [{"name": f"d{i}", "url": url} for i, url in enumerate(urls)]
        (folder / "members.json").write_text(json.dumps({"members": members}))
        url = f"cluster+file://{folder}/members.json"
        clients = [
            stack.enter_context(attnd_cluster.connect(url, timeout=60))
            for _ in range(options.clients)
        ]
        for client in clients:
            client.members.wait(60, lambda now: len(now) == n_daemons)
        pools = [client.create_pool(spec) for client in clients]
        is_open = collections.deque()
        for i, tokens in enumerate(prompts(options)):
            pool = pools[i % len(pools)]
            while len(is_open) >= options.open:
                is_open.popleft().close()
            seq = pool.open(tokens=tokens)
            n_cached = seq.n_cached
            kv = np.zeros((len(tokens) - n_cached, 1, 8), "f4")
            pool.step(0, [(seq, n_cached, len(kv))], k=kv, v=kv)
            is_open.append(seq)
            requests[seq.where] += 1
            computed[seq.where] += len(kv)
            n_found += n_cached // SIZE
            n_all += len(tokens) // SIZE
        while is_open:
            is_open.popleft().close()
    spread = [max(c.values()) * n_daemons / sum(c.values()) for c in (requests, computed)]
    return n_found / n_all, spread[0], spread[1]


def main() -> None:
    options = arguments()
    os.environ.setdefault("ATTN_LIBRARY", str(options.prefix / "lib" / "libattn.so.0"))
    many = run(options, options.daemons, options.blocks)
    one = run(options, 1, options.blocks * options.daemons)
    print("| clients | blocks of each | found by all | by one | share | requests | tokens |")
    print(
        f"| {options.clients} | {options.blocks:,} | {many[0]:.3f} | {one[0]:.3f} |"
        f" {many[0] / one[0]:.3f} | {many[1]:.3f} | {many[2]:.3f} |"
    )


if __name__ == "__main__":
    main()
