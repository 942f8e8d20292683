"""Starts the real attnd on its cpu backend for the tests, and has the float64 reference they use.

$ATTN_BUILD is the build folder with bin/attnd and lib/libattn.so.0; default build/ of this tree.
$ATTN_TRANSPORT is the scheme of the daemon's url, ipc (the default) or shm.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
PACKAGE = HERE.parent
ROOT = PACKAGE.parents[1]
BUILD = pathlib.Path(os.environ.get("ATTN_BUILD", ROOT / "build"))
TRANSPORT = os.environ.get("ATTN_TRANSPORT", "ipc")

if "ATTN_LIBRARY" not in os.environ:
    os.environ["ATTN_LIBRARY"] = str(BUILD / "lib" / "libattn.so.0")
if str(PACKAGE / "src") not in sys.path:
    sys.path.insert(0, str(PACKAGE / "src"))

import attnd  # noqa: E402


class Daemon:
    """An attnd process; its socket is in a folder of its own."""

    def __init__(self, *flags: str):
        self.dir = tempfile.mkdtemp(prefix="attnd-py-", dir="/tmp")
        self.url = f"{TRANSPORT}://{self.dir}/s"
        self.log = pathlib.Path(self.dir, "log")
        command = [str(BUILD / "bin" / "attnd"), "--backend", "cpu", "--listen", self.url]
        command += ["--listen.http", "off", "--device.threads", "2", "--cache.io_memory", "64M"]
        self.command = [*command, *flags]
        self._start()

    def _start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        until = time.monotonic() + 60
        while True:
            try:
                attnd.connect(self.url, connect_timeout=0.5).close()
                return
            except (attnd.ConnectionLostError, attnd.TimedOutError):
                if self.process.poll() is not None or time.monotonic() > until:
                    self.process.kill()
                    raise RuntimeError(f"attnd did not start:\n{self.log.read_text()}") from None

    def freeze(self) -> None:
        """Stops all of its threads, and returns when they have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kills it and starts another in its place, which remembers nothing."""
        self.process.kill()
        self.process.wait()
        self._start()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(30)
            if code != 0:
                print(f"attnd left with {code}:\n{self.log.read_text()}", file=sys.stderr)
            return code
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            shutil.rmtree(self.dir, ignore_errors=True)


@pytest.fixture(scope="session")
def daemon():
    """One daemon for all tests that do it no harm; it must end well."""
    d = Daemon("--engine.lease", "10m", "--device.kv_memory", "512M", "--cache.max_pools", "256")
    yield d
    assert d.stop() == 0


@pytest.fixture
def own_daemon():
    """A daemon that a test may stop and kill."""
    d = Daemon("--device.kv_memory", "64M")
    yield d
    d.stop()


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
        workers.append(attnd.hf.attach(model, client, **{"n_blocks": 256, **options}))
        return workers[-1]

    yield attach_one
    for w in workers:
        w.close()
