"""Starts an attnd for a benchmark, from a build folder or an unpacked package."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
for folder in (HERE.parent / "src", HERE.parent / "examples"):
    sys.path.insert(0, str(folder))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefix",
        type=pathlib.Path,
        default=ROOT / "build",
        help="folder with bin/attnd and lib/libattn.so.0 (default: build/)",
    )
    parser.add_argument("--backend", default="auto", help="attnd's: auto, cpu, cuda, hip")
    parser.add_argument("--transport", default="ipc", help="scheme of the socket, comma-separated")


@contextlib.contextmanager
def running(args: argparse.Namespace, transport: str, *flags: str) -> Iterator[str]:
    """The url of an attnd that runs meanwhile."""
    os.environ.setdefault("ATTN_LIBRARY", str(args.prefix / "lib" / "libattn.so.0"))
    import attnd

    with tempfile.TemporaryDirectory(prefix="attnd-bench-", dir="/tmp") as folder:
        url = f"{transport}://{folder}/s"
        command = [str(args.prefix / "bin" / "attnd"), "--backend", args.backend, "--listen", url]
        command += ["--listen.http", "off", "--engine.lease", "1h", *flags]
        log = pathlib.Path(folder, "log")
        with log.open("wb") as f:
            process = subprocess.Popen(command, stdout=f, stderr=f)
        try:
            while True:
                try:
                    attnd.connect(url, connect_timeout=1).close()
                    break
                except attnd.AttndError:
                    if process.poll() is not None:
                        raise SystemExit(f"attnd did not start:\n{log.read_text()}") from None
            yield url
        except attnd.AttndError:
            print(log.read_text(), file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()
