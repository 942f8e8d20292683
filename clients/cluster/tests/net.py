"""Hosts of a test's own in network namespaces on a bridge, joined to nothing else; links that are cut."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Net:
    """hub: where the test's own processes run; each host's address by its name.

    The test itself enters the hub (setns), so this is for a process that does nothing else.
    """

    def __init__(self, *names: str):
        if os.geteuid() != 0 or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and iproute2")
        self._id = f"ac{os.getpid() % 100000}"
        self.hub = self._id + "h"
        self.address = {name: f"10.99.0.{i + 2}" for i, name in enumerate(names)}
        self._made: list[str] = []

    def namespace(self, name: str) -> str:
        return f"{self._id}{name}"

    def __enter__(self) -> Net:
        try:
            self._make(self.hub)
            hub = ("-n", self.hub)
            _ip(*hub, "link", "add", "br0", "type", "bridge")
            _ip(*hub, "addr", "add", "10.99.0.1/24", "dev", "br0")
            _ip(*hub, "link", "set", "br0", "up")
            for name, address in self.address.items():
                self._make(self.namespace(name))
                end = ("peer", "name", "eth0", "netns", self.namespace(name))
                _ip("link", "add", f"v{name}", "netns", self.hub, "type", "veth", *end)
                _ip(*hub, "link", "set", f"v{name}", "master", "br0")
                _ip(*hub, "link", "set", f"v{name}", "up")
                host = ("-n", self.namespace(name))
                _ip(*host, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip(*host, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as e:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {e.stderr.strip()}")
        return self

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")

    def cut(self, name: str) -> None:
        _ip("-n", self.hub, "link", "set", f"v{name}", "down")

    def heal(self, name: str) -> None:
        _ip("-n", self.hub, "link", "set", f"v{name}", "up")

    def __exit__(self, *exc) -> None:
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], check=False)
