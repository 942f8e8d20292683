"""Daemons with their agents as processes, which a test kills, stops and cuts off."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import attnd
from conftest import BUILD, await_
from etcd import free_ports

import attnd_cluster

SPEC = attnd.PoolSpec(
    "p", num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim_k=64, q_dtype="f32", n_blocks=128
)
TOKEN = "a token of the tests"


def _signal(process: subprocess.Popen, number: int) -> None:
    os.killpg(process.pid, number)
    if number == signal.SIGSTOP:
        os.waitpid(process.pid, os.WUNTRACED)  # returns when all of its threads have stopped
    if number == signal.SIGKILL:
        process.wait()


class Host:
    """A daemon and its agent on one address. namespace: where both run, None: here."""

    def __init__(
        self, directory: pathlib.Path, name: str, registry: str, namespace=None, ip=None, ttl=2.0
    ):
        self.name, self.registry, self._namespace, self.ttl = name, registry, namespace, ttl
        self._dir = directory / name
        self._dir.mkdir(parents=True)
        port, http = free_ports(2)
        address = ip or "127.0.0.1"
        self.url = f"tcp://{address}:{port}"
        self.http = f"{address}:{http}"
        self.socket = (
            f"/tmp/{directory.name[:8]}{os.getpid()}{name}.sock"  # paths of sockets are short
        )
        self.log, self.agent_log = self._dir / "attnd.log", self._dir / "agent.log"
        (self._dir / "token").write_text(TOKEN + "\n")
        self.key_file = None
        if ip is not None:  # beyond loopback workers need a token
            self.key_file = str(self._dir / "token")
            digest = hashlib.sha256(TOKEN.encode()).hexdigest()
            (self._dir / "tenants").touch(0o600)
            (self._dir / "tenants").write_text(f"[t]\ntoken_sha256 = {digest}\n")
        self.daemon: subprocess.Popen | None = None
        self.agent: subprocess.Popen | None = None

    def _run(self, command: list[str], log: pathlib.Path, **options) -> subprocess.Popen:
        if self._namespace is not None:
            command = ["ip", "netns", "exec", self._namespace, *command]
        with log.open("ab") as f:
            return subprocess.Popen(command, stdout=f, stderr=f, start_new_session=True, **options)

    def start_daemon(self, *settings: str, supervised: bool = False) -> None:
        command = [str(BUILD / "bin" / "attnd"), "--backend", "cpu", "--device.threads", "1"]
        command += ["--device.kv_memory", "16M", "--cache.io_memory", "64M", "--listen", self.url]
        command += ["--listen.admin", self.socket, "--listen.http", "off"]
        command += ["--listen.insecure_tcp", "yes", *settings]
        if self.key_file is not None:
            command += ["--listen.tenants", str(self._dir / "tenants")]
        self.daemon = self._run(command + ["--supervise"] * supervised, self.log)

        def is_there():
            assert self.daemon.poll() is None, self.log.read_text()
            try:
                attnd.connect(f"ipc://{self.socket}", connect_timeout=0.5).close()
                return True
            except attnd.AttndError:
                return False

        await_("the daemon", is_there)

    def start_agent(self, *options: str) -> None:
        command = [sys.executable, "-B", "-m", "attnd_cluster.agent", "--registry", self.registry]
        command += ["--name", self.name, "--url", self.url, "--endpoint", f"ipc://{self.socket}"]
        command += ["--http", self.http, "--ttl", str(self.ttl), "--evacuate", "60"]
        command += ["--token-file", str(self._dir / "token"), *options]
        if self.key_file is not None:
            command += ["--key-file", self.key_file]
        self.agent = self._run(command, self.agent_log)

    def start(self) -> Host:
        self.start_daemon()
        self.start_agent()
        return self

    def signal_daemon(self, number: int) -> None:
        _signal(self.daemon, number)

    def signal_agent(self, number: int) -> None:
        _signal(self.agent, number)

    def get(self, path: str, body=None, token: str | None = None) -> tuple[int, str]:
        """Of the agent; (0, why) without an answer."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://{self.http}{path}", data)
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as r:
                return r.status, r.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError as e:
            return 0, str(e)

    def await_agent(self) -> None:
        await_("the agent", lambda: self.get("/healthz")[0] == 200)

    def close(self) -> None:
        for process in (self.agent, self.daemon):
            if process is not None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()


class HostsInAFile:
    """Daemons without agents, which a file of members names, and clients of them."""

    def __init__(self, directory: pathlib.Path, rebuild):
        self._directory, self._rebuild = directory, rebuild
        self._path = directory / "members.json"
        self._clients: list[attnd_cluster.ClusterClient] = []
        self.hosts: dict[str, Host] = {}

    def make(self, *names: str, **options):
        """A client; these are the members from now on."""
        for name in names:
            if name not in self.hosts:
                self.hosts[name] = Host(self._directory, name, "unused")
                self.hosts[name].start_daemon()
        self.say(*names)
        options = {"rebuild": self._rebuild, "idle": 0.05, "timeout": 300.0, **options}
        self._clients.append(attnd_cluster.connect(f"cluster+file://{self._path}", **options))
        return self._clients[-1]

    def say(self, *names: str) -> None:
        new = self._directory / "new.json"
        members = [{"name": n, "url": self.hosts[n].url} for n in names]
        new.write_text(json.dumps({"members": members}))
        os.replace(new, self._path)

    def kill(self, name: str) -> None:
        self.hosts[name].signal_daemon(signal.SIGKILL)
        self.say(*(n for n in self.hosts if n != name))

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for host in self.hosts.values():
            host.close()
