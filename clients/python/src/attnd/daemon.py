"""A daemon of this process's own, for notebooks and tests."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping

from . import _lib
from ._handle import Closing, NotPicklable
from .client import Client, connect
from .errors import ConnectionLostError, TimedOutError

_DEFAULTS = {"listen.http": "off", "device.kv_memory": "512M"}
# Ends the daemon when this process is gone, however that came about: its end of the pipe closes.
_WATCH = 'read line; kill "$0"'
_STOP_SECONDS = 30.0


def _program() -> pathlib.Path:
    """attnd in the wheel, in the prefix that holds this package, in the source tree's build/, in PATH."""
    package = pathlib.Path(__file__).resolve().parent
    above = list(package.parents)
    places = [package / "native"]
    if package.parent.name == "python":  # PREFIX/lib/attnd/python/attnd, or a folder deeper
        places += above[3:5]
    elif (above[3] / "clients" / "libattn").is_dir():  # a source tree's clients/python/src/attnd
        places.append(above[3] / "build")
    for place in places:
        if (place / "bin" / "attnd").is_file():
            return place / "bin" / "attnd"
    found = shutil.which("attnd")
    if found is None:
        raise FileNotFoundError(
            "attnd is not in this package, nor installed, nor in PATH: build the wheel from a tree that"
            " cmake has built, or name it (attnd.Daemon(program=...))"
        )
    return pathlib.Path(found)


class Daemon(Closing, NotPicklable):
    """An attnd that runs while this does, on a socket that only this user can open.

        with attnd.Daemon() as daemon, daemon.connect() as client:
            ...

    settings  as attnd.conf names them: {"device.kv_memory": "2G"}. Without them HTTP is off and 512 MiB
              are for keys and values
    scheme    of its url: ipc or shm
    has_lanes it opens lanes, too (Client.open_lane)
    program   the attnd to run; None: the one that came with this package, or the one installed
    timeout   seconds it may take to start

    Ends with stop(), with the `with` block, or with this process. Raises FileNotFoundError, and
    RuntimeError with what attnd said if it does not start.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        scheme: str = "ipc",
        has_lanes: bool = False,
        program: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
    ):
        path = pathlib.Path(program).resolve() if program is not None else _program()
        self._dir = tempfile.mkdtemp(prefix="attnd-", dir="/tmp")  # paths of sockets are short
        self.url = f"{scheme}://{self._dir}/s"
        self.log = pathlib.Path(self._dir, "log")
        self._command = [str(path), "--listen", self.url]
        if has_lanes:
            self._command += ["--listen", f"gpu://{self._dir}/g"]
        for name, value in {**_DEFAULTS, **(settings or {})}.items():
            self._command += [f"--{name}", str(value)]
        self._env = dict(os.environ)
        if path.parent.parent.name == "native":
            self._env["LD_LIBRARY_PATH"] = str(path.parent.parent / "lib")
        self._remove = weakref.finalize(self, _remove, os.getpid(), self._dir)
        self.start(timeout)

    def start(self, timeout: float = 60.0) -> None:
        """Starts it again, after stop()."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._watch = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, str(self.process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, os.getpid(), self.process, self._watch)
        until, attempt = time.monotonic() + timeout, 0.5
        while True:
            try:
                connect(self.url, connect_timeout=attempt).close()
                return
            except (ConnectionLostError, TimedOutError):
                attempt *= 2  # a large region of shared memory takes long to be made
                if self.process.poll() is None and time.monotonic() < until:
                    continue
            except BaseException:
                self._end()
                raise
            said = self.log.read_text(errors="replace")
            self._end()
            raise RuntimeError(f"attnd did not start: {' '.join(self._command)}\n{said}")

    def connect(self, **options: object) -> Client:
        """attnd.connect() to it."""
        return connect(self.url, **options)  # type: ignore[arg-type]

    def stop(self) -> int:
        """Lets work in flight finish; the exit status, negative: the signal that ended it."""
        self._end()
        status: int = self.process.returncode
        return status

    def close(self) -> None:
        self.stop()
        self._remove()

    def __repr__(self) -> str:
        return f"<attnd.Daemon {self.url}>"


def _remove(owner: int, directory: str) -> None:
    if os.getpid() == owner:  # not a fork of the process that it belongs to
        shutil.rmtree(directory, ignore_errors=True)


def _end(owner: int, process: subprocess.Popen[bytes], watch: subprocess.Popen[bytes]) -> None:
    if os.getpid() != owner:
        return
    watch.kill()
    watch.wait()
    if watch.stdin is not None:
        watch.stdin.close()
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
