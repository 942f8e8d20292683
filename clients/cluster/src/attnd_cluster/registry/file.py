"""A file that people write: for a few hosts that do not change.

    {"members": [{"name": "a", "url": "tls+tcp://10.0.0.1:7471", "agent": "http://10.0.0.1:9471"}]}

Nobody registers there, so nobody is ever declared dead: who takes a host out edits the file. It is
looked at again every `idle` seconds, and read whole: write a new one and rename it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

from ._base import Changes, Deleted, Entry, Key, Lease, Registry, RegistryLost, Snapshot


class FileRegistry(Registry):
    is_static = True

    def __init__(self, path: str):
        self._path = path
        self._is_closed = False

    def _refuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"file://{self._path} is written by people: {what} needs etcd or Kubernetes"
        )

    def grant(self, ttl: float, timeout: float) -> Lease:
        raise self._refuse("a lease")

    def put(
        self,
        key: Key,
        value: bytes,
        lease: Lease | None,
        timeout: float,
        only_while: tuple[Key, bytes] | None = None,
    ) -> None:
        raise self._refuse(f"writing {key}")

    def create(self, key: Key, value: bytes, lease: Lease | None, timeout: float) -> bool:
        raise self._refuse(f"writing {key}")

    def delete(self, key: Key, timeout: float) -> None:
        raise self._refuse(f"deleting {key}")

    def _read(self) -> tuple[str, dict[Key, bytes]]:
        """Which file it was, and its entries. Raises RegistryLost, which says what is wrong with it."""
        if self._is_closed:
            raise RegistryLost(f"file://{self._path} is closed")
        try:
            with open(self._path, "rb") as f:
                stat = os.fstat(f.fileno())
                content = json.loads(f.read())
            entries = {}
            for member in content["members"]:
                if not isinstance(member["name"], str) or not isinstance(member["url"], str):
                    raise ValueError("members: name and url are texts")
                if f"members/{member['name']}" in entries:
                    raise ValueError(f"members: two are named {member['name']!r}")
                entries[f"members/{member['name']}"] = json.dumps(member).encode()
        except KeyError as e:
            raise RegistryLost(f"{self._path}: {e} is missing") from None
        except (OSError, ValueError, TypeError) as e:
            raise RegistryLost(f"{self._path}: {e}") from None
        return f"{stat.st_ino}.{stat.st_mtime_ns}.{stat.st_size}", entries

    def list(self, prefix: Key, timeout: float) -> Snapshot:
        at, entries = self._read()
        return Snapshot({k: v for k, v in entries.items() if k.startswith(prefix)}, at, self._path)

    def watch(self, prefix: Key, at: str, idle: float) -> Iterator[Changes | None]:
        seen, entries = self._read()
        if seen != at:
            yield None
            return
        while True:
            time.sleep(idle)
            seen, now = self._read()
            events: list[Entry | Deleted] = [Deleted(k) for k in entries if k not in now]
            events += [Entry(k, v) for k, v in now.items() if entries.get(k) != v]
            entries = now
            yield Changes([e for e in events if e.key.startswith(prefix)], seen)

    def close(self) -> None:
        self._is_closed = True
