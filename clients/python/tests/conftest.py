"""Starts the real attnd on its cpu backend for the tests, and has the float64 reference they use.

$ATTN_BUILD is the build folder with bin/attnd and lib/libattn.so.0; default build/ of this tree.
$ATTN_TRANSPORT is the scheme of the daemon's url, ipc (the default) or shm. $ATTN_LANE: attached
models use lanes. $ATTN_BACKEND is the daemon's, cpu by default; models are on a GPU if there is one.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent
ROOT = PACKAGE.parents[1]
BUILD = pathlib.Path(os.environ.get("ATTN_BUILD", ROOT / "build"))
HAS_LANES = "ATTN_LANE" in os.environ
BACKEND = os.environ.get("ATTN_BACKEND", "cpu")
TRANSPORT = os.environ.get("ATTN_TRANSPORT", "ipc")

if "ATTN_LIBRARY" not in os.environ:
    os.environ["ATTN_LIBRARY"] = str(BUILD / "lib" / "libattn.so.0")
if str(PACKAGE / "src") not in sys.path:
    sys.path.insert(0, str(PACKAGE / "src"))

import attnd  # noqa: E402

# a shell has what it runs in the background ignore it, and so would what tests start
signal.signal(signal.SIGINT, signal.default_int_handler)


class Daemon(attnd.Daemon):
    """An attnd that tests may freeze and kill."""

    def __init__(self, **settings: object):
        ours = {"backend": BACKEND, "cache.io_memory": "64M"}
        ours |= {"device.threads": 2} if BACKEND == "cpu" else {"device.kv_memory": "4G"}
        program = BUILD / "bin" / "attnd"
        super().__init__(
            {**ours, **settings}, scheme=TRANSPORT, has_lanes=True, program=program
        )

    def freeze(self) -> None:
        """Stops all of its threads, and returns when they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kills it and starts another in its place, which remembers nothing."""
        self.process.kill()
        self.stop()
        self.start()


class Kept(Daemon):
    """One whose cache outlives its process."""

    def start(self, timeout=60.0):
        self._command[1:1] = ["--supervise"]
        super().start(timeout)


def worker_of(keeper):
    """The process that serves, of one under --supervise."""
    children = pathlib.Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0])


@pytest.fixture(scope="session")
def daemon():
    """One daemon for all tests that do it no harm; it must end well."""
    with Daemon(**{"engine.lease": "10m", "cache.max_pools": 256}) as d:
        yield d
        assert d.stop() == 0, d.log.read_text()


@pytest.fixture
def own_daemon():
    """A daemon that a test may stop and kill."""
    with Daemon(**{"device.kv_memory": "64M"}) as d:
        yield d
        d.go_on()


@pytest.fixture
def client(daemon):
    with attnd.connect(daemon.url) as c:
        yield c


@pytest.fixture
def python_env(daemon):
    """Environment of subprocesses that use the package."""
    return {**os.environ, "PYTHONPATH": str(PACKAGE / "src"), "ATTND_ENDPOINT": daemon.url}


@pytest.fixture
def attach(client):
    """Attaches models, each over a pool of 256 blocks, and closes the workers at the end."""
    import attnd.hf

    workers = []

    def attach_one(model, **options):
        options = {"n_blocks": 256, "lane": HAS_LANES or None, **options}
        workers.append(attnd.hf.attach(model, client, **options))
        return workers[-1]

    yield attach_one
    for w in workers:
        w.close()


@pytest.fixture
def shared(attach):
    """Attaches models that share prompts; worker.passes has the columns of each forward pass."""

    def attach_shared(model, **options):
        worker = attach(model, share_prefixes=True, **options)
        note_passes(worker)
        return worker

    return attach_shared


def note_passes(worker):
    from attnd.hf._key import base_of
    from hf_models import columns

    worker.passes = []
    base_of(worker.model).register_forward_hook(
        lambda m, args, kwargs, out: worker.passes.append(columns(kwargs)), with_kwargs=True
    )
