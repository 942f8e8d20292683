"""What a registry can do, and what its users may rely on.

Every method may be called from any thread and returns or raises within the timeout it was given,
also if the other side is stopped and answers nothing. A write that raised RegistryLost may have
been done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Union

Key = str  # as "members/a"; without the registry's own prefix


class RegistryLost(Exception):
    """No answer, or none with a majority behind it. Nothing is known to have changed."""


class LeaseGone(Exception):
    """The lease ended, and with it the keys that were put under it."""


class Entry(NamedTuple):
    key: Key
    value: bytes


class Deleted(NamedTuple):
    """The key is gone, and the registry has written that down: it was deleted or its lease ended."""

    key: Key


class Snapshot(NamedTuple):
    """All entries below a prefix at one moment, which `at` names to watch().

    store  which registry this is: another number, and what is missing was not deleted but lost
    """

    entries: dict[Key, bytes]
    at: str
    store: str


class Changes(NamedTuple):
    """What happened in their order; empty: nothing did, and a majority says so. `at` is behind them."""

    events: list[Union[Entry, Deleted]]
    at: str


class Lease:
    """A promise to call keep() within every ttl seconds."""

    ttl: float

    def keep(self, timeout: float) -> None:
        """Renews it. Raises LeaseGone, RegistryLost."""
        raise NotImplementedError

    def end(self, timeout: float) -> None:
        """Ends it with the keys put under it. Raises RegistryLost; one that is gone is no error."""
        raise NotImplementedError


class Registry:
    is_static = False  # True: only people write it, so nobody registers

    def grant(self, ttl: float, timeout: float) -> Lease:
        """A lease of at least ttl seconds. Raises RegistryLost."""
        raise NotImplementedError

    def put(
        self,
        key: Key,
        value: bytes,
        lease: Lease | None,
        timeout: float,
        only_while: tuple[Key, bytes] | None = None,
    ) -> None:
        """Writes; under a lease, until that ends. With only_while, a key and its value, nothing is
        written once that key has another one, however late the write arrives. Raises LeaseGone (then,
        too), RegistryLost."""
        raise NotImplementedError

    def create(self, key: Key, value: bytes, lease: Lease | None, timeout: float) -> bool:
        """put() if nobody has the key; whether it was. Raises LeaseGone, RegistryLost."""
        raise NotImplementedError

    def delete(self, key: Key, timeout: float) -> None:
        """Raises RegistryLost."""
        raise NotImplementedError

    def list(self, prefix: Key, timeout: float) -> Snapshot:
        """What a majority has now. Raises RegistryLost."""
        raise NotImplementedError

    def watch(self, prefix: Key, at: str, idle: float) -> Iterator[Changes | None]:
        """What changes below prefix behind `at`.

        Gives a Changes for what happened, one without events after `idle` seconds in which nothing
        did, and None where `at` is too old: list() again. Raises RegistryLost; go on then with the
        `at` that came last. Closing the iterator ends the watch.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Ends its connections; watches raise RegistryLost."""
        raise NotImplementedError
