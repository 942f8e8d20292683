"""Debian's etcd, of one or several members on loopback or in network namespaces of a test's own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request

import pytest


def free_ports(n: int) -> list[int]:
    """Of loopback, each given once to all tests of this user until they have gone round: below those that
    the kernel gives to connections, and to no test that begins at the same time."""
    first, past = 10000, 32000
    with open(pathlib.Path(tempfile.gettempdir()) / f"attnd-test-ports-{os.getuid()}", "a+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        at, ports = int(f.read() or random.randrange(first, past)), []
        while len(ports) < n:
            at = at + 1 if at + 1 < past else first
            with socket.socket() as s, contextlib.suppress(OSError):
                s.bind(("127.0.0.1", at))
                ports.append(at)
        f.truncate(0)
        f.write(str(at))
    return ports


class Etcd:
    """hosts    (network namespace or None, address) of each member
    options  of each, as --election-timeout: a lease is 1.5 of them at least, in whole seconds"""

    def __init__(self, directory: pathlib.Path, n: int, hosts=None, options=()):
        if shutil.which("etcd") is None:
            pytest.skip("etcd is not installed (apt-get install etcd-server)")
        self._dir, self._options = directory, list(options)
        self._hosts = hosts or [(None, "127.0.0.1")] * n
        ports = free_ports(2 * n)
        self.clients = [f"http://{a}:{p}" for (_, a), p in zip(self._hosts, ports[:n])]
        self._peers = [f"http://{a}:{p}" for (_, a), p in zip(self._hosts, ports[n:])]
        self.processes: list[subprocess.Popen | None] = [None] * n
        directory.mkdir(parents=True)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(c[len("http://") :] for c in self.clients) + "/t"

    def __enter__(self) -> Etcd:
        for i in range(len(self.clients)):
            self.start(i)
        self.await_ready()
        return self

    def start(self, i: int) -> None:
        namespace, _ = self._hosts[i]
        command = ["etcd", "--name", f"m{i}", "--data-dir", str(self._dir / f"m{i}")]
        command += [
            "--listen-client-urls",
            self.clients[i],
            "--advertise-client-urls",
            self.clients[i],
        ]
        command += ["--listen-peer-urls", self._peers[i]]
        command += ["--initial-advertise-peer-urls", self._peers[i], "--log-level", "error"]
        cluster = ",".join(f"m{j}={p}" for j, p in enumerate(self._peers))
        command += ["--initial-cluster", cluster, *self._options]
        if namespace is not None:
            command = ["ip", "netns", "exec", namespace, *command]
        with open(self._dir / f"m{i}.log", "ab") as log:
            self.processes[i] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )

    def await_ready(self) -> None:
        until = time.monotonic() + 120
        body = json.dumps({"key": "AA==", "count_only": True}).encode()
        while True:
            try:
                for client in self.clients:
                    urllib.request.urlopen(f"{client}/v3/kv/range", body, timeout=2).read()
                return
            except OSError:
                assert time.monotonic() < until, (self._dir / "m0.log").read_text()[-3000:]
                time.sleep(0.05)

    def leader(self) -> int:
        """The member that leads, as it says itself; waits for one."""
        until = time.monotonic() + 120
        while True:
            for i, client in enumerate(self.clients):
                try:
                    r = urllib.request.urlopen(f"{client}/v3/maintenance/status", b"{}", timeout=2)
                    status = json.loads(r.read())
                    if status["leader"] == status["header"]["member_id"]:
                        return i
                except (OSError, KeyError):
                    pass
            assert time.monotonic() < until, "etcd has no leader"
            time.sleep(0.05)

    def signal(self, i: int, number: int) -> None:
        process = self.processes[i]
        os.killpg(process.pid, number)
        if number == signal.SIGSTOP:
            os.waitpid(process.pid, os.WUNTRACED)  # returns when all of its threads have stopped
        if number == signal.SIGKILL:
            process.wait()
            self.processes[i] = None

    def __exit__(self, *exc) -> None:
        for process in self.processes:
            if process is not None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
