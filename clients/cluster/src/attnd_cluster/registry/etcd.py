"""etcd by its v3 JSON gateway: plain HTTP, so that no gRPC is needed. 3.4 and newer.

Requests go to the endpoint that answered last; after a failure to the next. Reads and writes need
a majority (no serializable reads). A watch alone does not: a member cut off from the others, or one
that is stopped, says nothing for ever. So a watch that is idle asks the next endpoint where the
majority is, and goes on there.
"""

from __future__ import annotations

import base64
import json
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import urllib3

from ._base import Changes, Deleted, Entry, Key, Lease, LeaseGone, Registry, RegistryLost, Snapshot

_NOT_FOUND = 5  # gRPC's code: of a lease
_MAX_LINE = 64 << 20  # of a watch: bytes of one message


def _b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def _past(prefix: str) -> str:
    """The key behind all that begin with prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


class _Refused(Exception):
    """etcd's answer is an error."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class EtcdLease(Lease):
    def __init__(self, registry: EtcdRegistry, id: str, ttl: float):
        self._registry, self.id, self.ttl = registry, id, ttl

    def keep(self, timeout: float) -> None:
        answer = self._registry._ask("lease/keepalive", {"ID": self.id}, timeout)
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            raise LeaseGone(f"etcd lease {self.id} ended")

    def end(self, timeout: float) -> None:
        try:
            self._registry._ask("lease/revoke", {"ID": self.id}, timeout)
        except _Refused as e:
            if e.code != _NOT_FOUND:
                raise RegistryLost(str(e)) from None


class EtcdRegistry(Registry):
    """endpoints: http://HOST:PORT of each member; prefix: of all keys, ends with /."""

    def __init__(self, endpoints: list[str], prefix: str = "attnd/", **tls: Any):
        self._endpoints, self._prefix = endpoints, prefix
        self._lock = threading.Lock()
        self._next = 0
        # connections are kept, so a renewal is one round trip; watches have theirs besides
        self._pool = urllib3.PoolManager(num_pools=2 * len(endpoints), maxsize=4, **tls)

    @classmethod
    def of_url(cls, url: str) -> EtcdRegistry:
        parts = urllib.parse.urlsplit(url)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        names = {"ca": "ca_certs", "cert": "cert_file", "key": "key_file"}
        unknown = sorted(set(query) - set(names))
        if unknown or (query and parts.scheme != "etcds"):
            raise ValueError(
                f"registry is {url!r}: {(unknown or list(query))[0]} is not known there"
            )
        hosts = [host for host in parts.netloc.split(",") if host]
        if not hosts or any(not host.rpartition(":")[2].isdigit() for host in hosts):
            raise ValueError(
                f"registry is {url!r}, expected {parts.scheme}://HOST:PORT[,HOST:PORT...]"
            )
        scheme = "https" if parts.scheme == "etcds" else "http"
        prefix = (parts.path.strip("/") or "attnd") + "/"
        tls = {names[name]: value for name, value in query.items()}
        return cls([f"{scheme}://{host}" for host in hosts], prefix, **tls)

    # ---- requests

    def _ask(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Of one endpoint after the other, each for its share of the time."""
        n, why = len(self._endpoints), ""
        share = timeout / n
        for _ in range(n):
            with self._lock:
                index = self._next
            endpoint = self._endpoints[index]
            try:
                return self._ask_one(endpoint, path, body, share)
            except _Refused as e:
                if e.code == _NOT_FOUND:
                    raise
                why = f"{endpoint}: {e}"
            except (urllib3.exceptions.HTTPError, ValueError, OSError) as e:
                why = f"{endpoint}: {e}"
            self._leave(index)
        raise RegistryLost(why)

    def _leave(self, index: int) -> None:
        """The next request goes to the endpoint behind this one, unless another thread has seen to it."""
        with self._lock:
            if self._next == index:
                self._next = (index + 1) % len(self._endpoints)

    def _ask_one(
        self, endpoint: str, path: str, body: dict[str, Any], timeout: float
    ) -> dict[str, Any]:
        r = self._pool.request(
            "POST",
            f"{endpoint}/v3/{path}",
            body=json.dumps(body).encode(),
            timeout=urllib3.Timeout(total=timeout),
            retries=False,
        )
        answer = json.loads(r.data)
        if not isinstance(answer, dict):
            raise ValueError(f"answered {answer!r}")
        error = answer.get("error")
        if r.status != 200 or error is not None:
            if isinstance(error, dict):  # of a stream
                raise _Refused(error.get("grpc_code", 2), str(error.get("message")))
            raise _Refused(answer.get("code", 2), str(error or r.status))
        return answer

    def _key(self, key: Key) -> str:
        return self._prefix + key

    def _range(self, prefix: Key) -> dict[str, Any]:
        begin = self._key(prefix)
        return {"key": _b64(begin), "range_end": _b64(_past(begin))}

    # ---- Registry

    def grant(self, ttl: float, timeout: float) -> EtcdLease:
        answer = self._write("lease/grant", {"TTL": str(max(1, round(ttl)))}, timeout)
        return EtcdLease(self, answer["ID"], float(answer["TTL"]))

    def put(
        self,
        key: Key,
        value: bytes,
        lease: Lease | None,
        timeout: float,
        only_while: tuple[Key, bytes] | None = None,
    ) -> None:
        if only_while is None:
            self._write("kv/put", self._put_of(key, value, lease), timeout)
            return
        name, held = (_b64(x) for x in (self._key(only_while[0]), only_while[1]))
        body = {
            "compare": [{"key": name, "target": "VALUE", "result": "EQUAL", "value": held}],
            "success": [{"request_put": self._put_of(key, value, lease)}],
        }
        if not self._write("kv/txn", body, timeout).get("succeeded", False):
            raise LeaseGone(f"{only_while[0]} has another value")

    def create(self, key: Key, value: bytes, lease: Lease | None, timeout: float) -> bool:
        name = _b64(self._key(key))
        body = {
            "compare": [
                {"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            ],
            "success": [{"request_put": self._put_of(key, value, lease)}],
        }
        return bool(self._write("kv/txn", body, timeout).get("succeeded", False))

    def _put_of(self, key: Key, value: bytes, lease: Lease | None) -> dict[str, Any]:
        put = {"key": _b64(self._key(key)), "value": _b64(value)}
        if lease is not None:
            assert isinstance(lease, EtcdLease)
            put["lease"] = lease.id
        return put

    def _write(self, path: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        try:
            return self._ask(path, body, timeout)
        except _Refused as e:
            raise LeaseGone(str(e)) from None

    def delete(self, key: Key, timeout: float) -> None:
        self._write("kv/deleterange", {"key": _b64(self._key(key))}, timeout)

    def list(self, prefix: Key, timeout: float) -> Snapshot:
        answer = self._write("kv/range", self._range(prefix), timeout)
        entries = {}
        for kv in answer.get("kvs", []):
            key, value = self._kv(kv)
            entries[key] = value
        header = answer["header"]
        return Snapshot(entries, header["revision"], header["cluster_id"])

    def _kv(self, kv: dict[str, Any]) -> tuple[Key, bytes]:
        name = base64.b64decode(kv["key"]).decode()[len(self._prefix) :]
        return name, base64.b64decode(kv.get("value", ""))

    def watch(self, prefix: Key, at: str, idle: float) -> Iterator[Changes | None]:
        while True:
            # that a majority is there; what the watch itself says does not tell
            self._write("kv/range", {**self._range(prefix), "count_only": True}, idle)
            yield Changes([], at)
            with self._lock:
                index = self._next
            create = {**self._range(prefix), "start_revision": str(int(at) + 1)}
            for message in self._stream(index, {"create_request": create}, idle):
                if "compact_revision" in message or message.get("canceled"):
                    yield None
                    return
                events = message.get("events", [])
                if events:  # a message's header may be ahead of them
                    at = events[-1]["kv"]["mod_revision"]
                    yield Changes([self._event(e) for e in events], at)
            self._leave(index)

    def _event(self, e: dict[str, Any]) -> Entry | Deleted:
        key, value = self._kv(e["kv"])
        return Deleted(key) if e.get("type") == "DELETE" else Entry(key, value)

    def _stream(self, index: int, body: dict[str, Any], idle: float) -> Iterator[dict[str, Any]]:
        """The messages of a watch until there is none for idle seconds. Raises RegistryLost."""
        endpoint = self._endpoints[index]
        response = None
        try:
            response = self._pool.request(
                "POST",
                f"{endpoint}/v3/watch",
                body=json.dumps(body).encode(),
                timeout=urllib3.Timeout(connect=idle, read=idle),
                retries=False,
                preload_content=False,
            )
            rest = b""
            for piece in response.stream(1 << 16):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ValueError(f"a message of more than {_MAX_LINE} bytes")
                for line in lines:
                    message = json.loads(line)
                    if "result" not in message:
                        raise ValueError(f"answered {message.get('error')}")
                    yield message["result"]
            raise RegistryLost(f"{endpoint}: ended the watch")
        except urllib3.exceptions.ReadTimeoutError:
            return
        except (urllib3.exceptions.HTTPError, ValueError, OSError) as e:
            self._leave(index)
            raise RegistryLost(f"{endpoint}: {e}") from None
        finally:
            if response is not None:
                response.close()  # not back to the pool: the stream has not ended

    def close(self) -> None:
        self._pool.clear()
