"""A real etcd of one or three members, as the tests start it, and daemons with their agents.

$ATTN_BUILD is the build folder with bin/attnd and lib/libattn.so.0; default build/ of this tree.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
BUILD = pathlib.Path(os.environ.get("ATTN_BUILD", ROOT / "build"))

os.environ.setdefault("ATTN_LIBRARY", str(BUILD / "lib" / "libattn.so.0"))
PATHS = [str(ROOT / "clients" / "python" / "src"), str(ROOT / "clients" / "cluster" / "src")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(
    PATHS + os.environ.get("PYTHONPATH", "").split(os.pathsep)
)

from etcd import Etcd  # noqa: E402

WAIT = 300.0  # seconds after which what is awaited does not come


def await_(what, condition, seconds: float = WAIT):
    """What condition() gives once it is true."""
    until = time.monotonic() + seconds
    while True:
        got = condition()
        if got:
            return got
        assert time.monotonic() < until, f"{what} did not happen in {seconds} s"
        time.sleep(0.01)


@pytest.fixture
def etcd1(tmp_path):
    with Etcd(tmp_path / "etcd", 1) as e:
        yield e


@pytest.fixture
def etcd3(tmp_path):
    with Etcd(tmp_path / "etcd", 3) as e:
        yield e
