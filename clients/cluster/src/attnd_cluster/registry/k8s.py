"""Kubernetes as a registry: each key is a Lease object (coordination.k8s.io), its value an annotation.

The API server ends no leases. So whoever watches does: a Lease whose renewal it has not seen change for
its duration, by its own clock, is deleted on condition that nobody has renewed it meanwhile. A deletion
is a write of the API server's own registry, so nobody is declared dead without it.

Renewals are events for all that watch, so leases are to be longer here than with etcd: 15 seconds.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import re
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import urllib3

try:
    import kubernetes
except ImportError as e:
    raise ValueError(f"k8s:// needs the package kubernetes: pip install kubernetes ({e})") from None

from ._base import Changes, Deleted, Entry, Key, Lease, LeaseGone, Registry, RegistryLost, Snapshot

_T = TypeVar("_T")
_KEY, _VALUE, _LABEL = "attnd.io/key", "attnd.io/value", "attnd.io/registry"
_GONE, _CONFLICT, _MISSING = 410, 409, 404
_ATTEMPTS = 5  # of a write that others race with


class _Missing(Exception):
    pass


class _Conflict(Exception):
    pass


class _TooOld(Exception):
    pass


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


class K8sLease(Lease):
    def __init__(self, registry: K8sRegistry, ttl: float):
        self._registry, self.ttl = registry, ttl
        self.keys: list[Key] = []

    def keep(self, timeout: float) -> None:
        for key in self.keys:
            body = {"spec": {"renewTime": _now().isoformat().replace("+00:00", "Z")}}
            try:
                self._registry._patch(key, body, timeout)
            except _Missing:
                raise LeaseGone(f"Lease of {key} was deleted") from None

    def end(self, timeout: float) -> None:
        for key in self.keys:
            self._registry.delete(key, timeout)
        self.keys = []


class K8sRegistry(Registry):
    """k8s://NAMESPACE[/PREFIX][?kubeconfig=FILE]: the pod's service account, else the kubeconfig."""

    def __init__(self, url: str):
        parts = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", parts.netloc) or set(query) - {
            "kubeconfig"
        }:
            raise ValueError(
                f"registry is {url!r}, expected k8s://NAMESPACE[/PREFIX][?kubeconfig=FILE]"
            )
        self._namespace, self._prefix = parts.netloc, parts.path.strip("/") or "attnd"
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", self._prefix):
            raise ValueError(f"registry is {url!r}: a prefix is of a-z, 0-9 and -, 42 at most")
        config = kubernetes.client.Configuration()
        try:
            if "kubeconfig" in query:
                kubernetes.config.load_kube_config(query["kubeconfig"], client_configuration=config)
            else:
                try:
                    kubernetes.config.load_incluster_config(client_configuration=config)
                except kubernetes.config.ConfigException:
                    kubernetes.config.load_kube_config(client_configuration=config)
        except (kubernetes.config.ConfigException, OSError) as e:
            raise ValueError(f"registry is {url!r}: {e}") from None
        config.retries = False  # calls end within their timeouts
        self._api = kubernetes.client.CoordinationV1Api(kubernetes.client.ApiClient(config))
        self._lock = threading.Lock()
        # renewals as they were first seen, by name: (resource version, when), monotonic
        self._seen: dict[str, tuple[Any, float]] = {}

    # ---- requests

    def _name(self, key: Key) -> str:
        plain = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")[:150]
        return f"{self._prefix}-{plain}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def _call(self, what: Callable[..., _T], *args: Any, timeout: float, **options: Any) -> _T:
        try:
            # to connect and to read; older clients leave a plain number out unless it is an integer
            return what(*args, _request_timeout=(timeout, timeout), **options)
        except kubernetes.client.ApiException as e:
            if e.status == _MISSING:
                raise _Missing(str(e.reason)) from None
            if e.status == _CONFLICT:
                raise _Conflict(str(e.reason)) from None
            if e.status == _GONE:
                raise _TooOld(str(e.reason)) from None
            raise self._lost(f"{e.status} {e.reason}") from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:
            raise self._lost(str(e)) from None

    def _lost(self, why: str) -> RegistryLost:
        """Who can't see renewals counts from when it can again."""
        with self._lock:
            self._seen.clear()
        return RegistryLost(f"API server: {why}")

    def _patch(self, key: Key, body: dict[str, Any], timeout: float) -> None:
        patch = self._api.patch_namespaced_lease
        self._call(patch, self._name(key), self._namespace, body, timeout=timeout)

    def _body(self, key: Key, value: bytes, lease: Lease | None) -> dict[str, Any]:
        spec: dict[str, Any] = {}
        if lease is not None:
            now = _now().isoformat().replace("+00:00", "Z")
            spec = {
                "leaseDurationSeconds": max(1, round(lease.ttl)),
                "renewTime": now,
                "acquireTime": now,
            }
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._name(key),
                "labels": {_LABEL: self._prefix},
                "annotations": {_KEY: key, _VALUE: base64.b64encode(value).decode()},
            },
            "spec": spec,
        }

    # ---- Registry

    def grant(self, ttl: float, timeout: float) -> K8sLease:
        return K8sLease(self, ttl)

    def put(
        self,
        key: Key,
        value: bytes,
        lease: Lease | None,
        timeout: float,
        only_while: tuple[Key, bytes] | None = None,
    ) -> None:
        body, name = self._body(key, value, lease), self._name(key)
        assert lease is None or isinstance(lease, K8sLease)
        for _ in range(_ATTEMPTS):
            try:
                try:
                    read = self._api.read_namespaced_lease
                    there = self._call(read, name, self._namespace, timeout=timeout)
                except _Missing:
                    if lease is not None and key in lease.keys:
                        raise LeaseGone(f"Lease of {key} was deleted") from None
                    self._check(only_while, timeout)
                    create = self._api.create_namespaced_lease
                    self._call(create, self._namespace, body, timeout=timeout)
                else:
                    self._check(only_while, timeout)  # behind the read, with which late writes conflict
                    body["metadata"]["resourceVersion"] = there.metadata.resource_version
                    replace = self._api.replace_namespaced_lease
                    self._call(replace, name, self._namespace, body, timeout=timeout)
            except (_Conflict, _Missing):
                body["metadata"].pop("resourceVersion", None)
                continue
            if lease is not None and key not in lease.keys:
                lease.keys.append(key)
            return
        raise RegistryLost(f"{key}: others wrote it each time")

    def _check(self, only_while: tuple[Key, bytes] | None, timeout: float) -> None:
        if only_while is None:
            return
        key = only_while[0]
        read = self._api.read_namespaced_lease
        try:
            there = self._entry(self._call(read, self._name(key), self._namespace, timeout=timeout))
        except _Missing:
            there = key, b""
        if there != only_while:
            raise LeaseGone(f"{key} has another value")

    def create(self, key: Key, value: bytes, lease: Lease | None, timeout: float) -> bool:
        body = self._body(key, value, lease)
        assert lease is None or isinstance(lease, K8sLease)
        for _ in range(2):
            try:
                create = self._api.create_namespaced_lease
                self._call(create, self._namespace, body, timeout=timeout)
            except _Conflict:
                try:
                    read = self._api.read_namespaced_lease
                    there = self._call(
                        read, body["metadata"]["name"], self._namespace, timeout=timeout
                    )
                except _Missing:
                    continue
                self._note(there)
                if not self._end_if_late(there, timeout):
                    return False
                continue
            if lease is not None:
                lease.keys.append(key)
            return True
        return False

    def delete(self, key: Key, timeout: float) -> None:
        try:
            delete = self._api.delete_namespaced_lease
            self._call(delete, self._name(key), self._namespace, timeout=timeout)
        except _Missing:
            pass

    def _listed(self, timeout: float) -> Any:
        return self._call(
            self._api.list_namespaced_lease,
            self._namespace,
            label_selector=f"{_LABEL}={self._prefix}",
            timeout=timeout,
        )

    @staticmethod
    def _entry(lease: Any) -> tuple[Key, bytes]:
        notes = lease.metadata.annotations or {}
        return notes.get(_KEY, ""), base64.b64decode(notes.get(_VALUE, ""))

    def list(self, prefix: Key, timeout: float) -> Snapshot:
        listed = self._listed(timeout)
        entries = dict(self._entry(lease) for lease in listed.items)
        entries = {k: v for k, v in entries.items() if k.startswith(prefix)}
        return Snapshot(entries, listed.metadata.resource_version, self._namespace)

    def watch(self, prefix: Key, at: str, idle: float) -> Iterator[Changes | None]:
        leases: dict[str, Any] = {}
        for lease in self._listed(2 * idle).items:
            leases[lease.metadata.name] = lease
            self._note(lease)
        values: dict[Key, bytes] = {}
        while True:
            watch = kubernetes.watch.Watch()
            try:
                for event in self._events(watch, at, idle):
                    lease = event["object"]
                    at = lease.metadata.resource_version
                    key, value = self._entry(lease)
                    changed: Entry | Deleted | None = None
                    if event["type"] == "DELETED":
                        leases.pop(lease.metadata.name, None)
                        values.pop(key, None)
                        changed = Deleted(key)
                    else:
                        leases[lease.metadata.name] = lease
                        self._note(lease)
                        if values.get(key) != value:  # else a renewal
                            values[key] = value
                            changed = Entry(key, value)
                    if changed is not None and key.startswith(prefix):
                        yield Changes([changed], at)
            except _TooOld:
                yield None
                return
            finally:
                watch.stop()
            for lease in list(leases.values()):
                if self._entry(lease)[0].startswith(prefix):
                    self._end_if_late(lease, idle)
            yield Changes([], at)

    def _events(self, watch: Any, at: str, idle: float) -> Iterator[Any]:
        """Until the server ends the watch, after idle seconds. Raises RegistryLost, _TooOld."""
        events = watch.stream(
            self._api.list_namespaced_lease,
            self._namespace,
            label_selector=f"{_LABEL}={self._prefix}",
            resource_version=at,
            timeout_seconds=max(1, round(idle)),
            _request_timeout=(idle, max(1, round(idle)) + 2 * idle),
        )
        end = object()
        while True:
            try:
                event = next(events, end)
            except kubernetes.client.ApiException as e:
                if e.status == _GONE:
                    raise _TooOld(str(e.reason)) from None
                raise self._lost(f"{e.status} {e.reason}") from None
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as e:
                raise self._lost(str(e)) from None
            if event is end:
                return
            yield event

    # ---- leases that nobody renews

    def _note(self, lease: Any) -> None:
        name, version = lease.metadata.name, lease.metadata.resource_version
        with self._lock:
            if self._seen.get(name, (None, 0.0))[0] != version:
                self._seen[name] = version, time.monotonic()

    def _end_if_late(self, lease: Any, timeout: float) -> bool:
        """Deletes it if it was not renewed for its duration; whether it is gone."""
        name, duration = lease.metadata.name, lease.spec.lease_duration_seconds
        with self._lock:
            version, since = self._seen.get(name, (None, time.monotonic()))
        if duration is None or time.monotonic() - since <= duration:
            return False
        body = {"preconditions": {"resourceVersion": version}}
        try:
            delete = self._api.delete_namespaced_lease
            self._call(delete, name, self._namespace, body=body, timeout=timeout)
        except _Conflict:
            return False  # it was renewed
        except _Missing:
            pass
        with self._lock:
            self._seen.pop(name, None)
        return True

    def close(self) -> None:
        self._api.api_client.close()
