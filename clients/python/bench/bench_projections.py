"""Where heads of latent attention (MLA) are multiplied into the space of latents and back: in the worker,
or in the daemon, over each transport.

    python3 clients/python/bench/bench_projections.py --prefix PREFIX [--transport tcp,tls,shm]

Decode steps of one layer of DeepSeek-V3's geometry (128 heads, latents of 512 and 64, heads of 128 and 128) in
bf16, of --batch sequences with --context tokens each. `worker` is torch's two products and a step of 576 in and
512 out a head, `daemon` a step of 192 in and 128 out; `products` is the worker's part of its own, `step` the rest.
Medians of --runs, by turns. Torch's threads are --threads, as many as the daemon's. With --worker cuda torch
multiplies on a card, where q begins and outputs end, and what goes to the daemon is copied to the host: so
`daemon` has copies, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import time

import own_daemon

HEADS, LATENT, ROPE, NOPE, OUT = 128, 512, 64, 128, 128


@contextlib.contextmanager
def running(args, transport: str):
    import attnd

    settings = {
        "backend": args.backend,
        "engine.lease": "1h",
        "device.kv_memory": "512M",
        "cache.io_memory": "512M",
        "device.threads": args.threads,
    }
    program = args.prefix / "bin" / "attnd"
    with tempfile.TemporaryDirectory() as folder:
        if transport == "tls":
            keys = folder + "/keys"
            make = [args.prefix / "bin" / "attnctl", "keys", keys, "--host", "127.0.0.1"]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
            os.environ.update(ATTND_CA_FILE=keys + "/ca.crt", ATTND_KEY_FILE=keys + "/workers.token")
            settings |= {
                "listen.tls_cert": keys + "/server.crt",
                "listen.tls_key": keys + "/server.key",
                "listen.tenants": keys + "/tenants.conf",
            }
        scheme = {"tls": r"tls\+tcp", "tcp": "tcp"}.get(transport)
        if scheme is not None:
            url = scheme.replace("\\", "")
            settings["listen"] = f"{url}://127.0.0.1:0 ipc://{folder}/s"
        with attnd.Daemon(settings, scheme="shm" if transport == "shm" else "ipc", program=program) as d:
            if scheme is None:
                yield d.url
            else:
                yield re.search(scheme + r"://127\.0\.0\.1:[1-9]\d*", d.log.read_text())[0]
    for name in ("ATTND_CA_FILE", "ATTND_KEY_FILE"):
        os.environ.pop(name, None)


def median_ms(times: list[float]) -> float:
    return statistics.median(times) * 1e3


def measure(args, transport: str, url: str) -> None:
    import torch

    import attnd

    wait = torch.cuda.synchronize if args.worker == "cuda" else lambda: None
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    weights = torch.randn(HEADS, NOPE + OUT, LATENT).to(torch.bfloat16) / 16
    most = max(args.batch)
    spec = attnd.PoolSpec(
        "latents",
        1,
        HEADS,
        1,
        LATENT + ROPE,
        LATENT,
        n_blocks=most * (args.context // 16 + 2),
        q_dtype="bf16",
        layers=(attnd.LayerSpec(scale=192**-0.5),),
        is_v_in_k=True,
    )
    on = weights.to(args.worker)
    with attnd.connect(url, timeout=600) as client:
        here = client.create_pool(spec)
        there = client.create_pool(spec._replace(name="heads", q_nope_dim=NOPE, out_dim=OUT))
        there.weights(0, weights)
        sequences = [(here.open(), there.open()) for _ in range(most)]
        for pair in sequences:
            k = torch.randn(args.context, 1, LATENT + ROPE).to(torch.bfloat16)
            for pool, s in zip((here, there), pair):
                pool.step(0, [(s, 0, args.context)], None, k)
        for n in args.batch:
            q = torch.randn(n, HEADS, NOPE + ROPE).to(torch.bfloat16).to(args.worker)
            k = torch.randn(n, 1, LATENT + ROPE).to(torch.bfloat16)
            items = [pool.items([(pair[i], args.context, 1) for pair in sequences[:n]]) for i, pool in
                     enumerate((here, there))]
            times = {"worker": [], "daemon": [], "products": [], "step": []}
            device = {"worker": [], "daemon": []}
            with torch.inference_mode():
                for run in range(args.runs + 2):
                    began = time.perf_counter()
                    wide = torch.matmul(q[..., :NOPE].transpose(0, 1), on[:, :NOPE])
                    wide = torch.cat((wide.transpose(0, 1), q[..., NOPE:]), dim=-1).contiguous().cpu()
                    sent = time.perf_counter()
                    result = here.step(0, items[0], wide, k)
                    got = time.perf_counter()
                    out = torch.matmul(result.out.to(args.worker).transpose(0, 1), on[:, NOPE:].transpose(1, 2))
                    wait()
                    ended = time.perf_counter()
                    other = there.step(0, items[1], q.cpu(), k)
                    have = other.out.to(args.worker)
                    wait()
                    last = time.perf_counter()
                    if run < 2:
                        continue
                    times["worker"].append(ended - began)
                    times["products"].append(sent - began + ended - got)
                    times["step"].append(got - sent)
                    times["daemon"].append(last - ended)
                    device["worker"].append(result.device_ns)
                    device["daemon"].append(other.device_ns)
            want, have = out.transpose(0, 1).float(), have.float()
            error = float((want - have).norm() / want.norm())
            worker, daemon = median_ms(times["worker"]), median_ms(times["daemon"])
            print(
                f"| {transport} | {n} | {worker:.3f} | {daemon:.3f} | {daemon / worker:.2f} |"
                f" {median_ms(times['products']):.3f} | {median_ms(times['step']):.3f} | {statistics.median(device['worker']) / 1e6:.3f} |"
                f" {statistics.median(device['daemon']) / 1e6:.3f} | {error:.1e} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    own_daemon.add_arguments(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", default="cpu", choices=("cpu", "cuda"), help="where torch multiplies")
    args = parser.parse_args()
    own_daemon.use_library(args)
    if args.backend == "auto":
        args.backend = "cpu"
    print("| transport | sequences | worker, ms | daemon, ms | daemon over worker | products, ms | step, ms |"
          " device worker, ms | device daemon, ms | difference |")
    print("|" + "---|" * 10)
    for transport in args.transport.split(","):
        with running(args, transport) as url:
            measure(args, transport, url)


if __name__ == "__main__":
    main()
