"""Starts an attnd for a benchmark, from a build folder or an unpacked package."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import sys
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


def use_library(args: argparse.Namespace) -> None:
    """libattn.so is the one beside that attnd."""
    os.environ.setdefault("ATTN_LIBRARY", str(args.prefix / "lib" / "libattn.so.0"))


@contextlib.contextmanager
def running(args: argparse.Namespace, transport: str, settings: dict[str, object]) -> Iterator[str]:
    """The url of an attnd that runs meanwhile."""
    use_library(args)
    import attnd

    settings = {"backend": args.backend, "engine.lease": "1h", **settings}
    program = args.prefix / "bin" / "attnd"
    has_lanes = transport == "gpu"  # messages go through shared memory
    scheme = "shm" if has_lanes else transport
    with attnd.Daemon(settings, scheme=scheme, has_lanes=has_lanes, program=program) as daemon:
        try:
            yield daemon.url
        except attnd.AttndError:
            print(daemon.log.read_text(), file=sys.stderr)
            raise
