"""Where the members of a cluster are written down: one interface over etcd, Kubernetes, a file.

    registry = open_registry("etcd://10.0.0.1:2379,10.0.0.2:2379/attnd")

What a key means is its users' business (keys.py). A registry is small: a key for each daemon and
each role, none for a sequence.
"""

from __future__ import annotations

from ._base import Changes, Deleted, Entry, Key, Lease, LeaseGone, Registry, RegistryLost, Snapshot

__all__ = [
    "Changes",
    "Deleted",
    "Entry",
    "Key",
    "Lease",
    "LeaseGone",
    "Registry",
    "RegistryLost",
    "Snapshot",
    "open_registry",
]


def open_registry(url: str) -> Registry:
    """The registry that url names; nothing is asked of it yet.

    etcd://HOST:PORT[,HOST:PORT...][/PREFIX]   etcd's v3 JSON gateway
    etcds://...[?ca=FILE&cert=FILE&key=FILE]   the same over TLS
    k8s://NAMESPACE[/PREFIX][?kubeconfig=FILE] Kubernetes, in Lease objects of that namespace
    file:///PATH                               members in a file, which never changes by itself

    Raises ValueError, which says what is wrong with url.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("etcd", "etcds"):
        from .etcd import EtcdRegistry

        return EtcdRegistry.of_url(url)
    if separator and scheme == "file":
        from .file import FileRegistry

        return FileRegistry(rest)
    if separator and scheme == "k8s":
        from .k8s import K8sRegistry

        return K8sRegistry(url)
    raise ValueError(f"registry is {url!r}, expected etcd://, etcds://, k8s:// or file://")
