"""connect() to a cluster: pools, sequences and steps as with one daemon, over all of its members.

    def rebuild(seq):                       # its host is lost: K and V of seq.tokens anew
        for layer in range(...):
            seq.pool.step(layer, [(seq, seq.n_cached, ...)], k=..., v=...)

    client = attnd_cluster.connect("cluster+etcd://10.0.0.1:2379/attnd", rebuild=rebuild)
    pool = client.create_pool(spec)         # on every daemon
    seq = pool.open(tokens=prompt)          # on one of them: place.py
    pool.step(0, [(seq, 0, n)], q, k, v)    # of sequences wherever they are

A sequence that was moved is found where it is now. One whose daemon is gone is opened elsewhere and
given to rebuild(); without that, or where its token ids are not all known, it is SequenceGoneError.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import attnd
from attnd._handle import Closing, NotPicklable

from .hosts import Dtypes, Host, Hosts
from .keys import LEAVING, SERVING, Member
from .members import Members
from .place import Backlog
from .pool import ClusterPool
from .registry import open_registry
from .sequence import ClusterSequence

log = logging.getLogger("attnd.cluster")
_AT_ONCE = 16  # daemons on which a pool is made at once; on others, when something is placed there
Rebuild = Callable[[ClusterSequence], None]


def connect(
    url: str,
    *,
    timeout: float = 10.0,
    connect_timeout: float | None = None,
    rebuild: Rebuild | None = None,
    idle: float = 2.0,
    **options: Any,
) -> ClusterClient:
    """Watches a cluster's members; waits until there is one.

    url      cluster+etcd://HOST:PORT[,HOST:PORT...][/PREFIX], cluster+file:///PATH: the registry
    rebuild  is given a sequence whose daemon is lost, open on another one: it appends K and V of
             seq.tokens from seq.n_cached on, in every layer of seq.pool. On the thread that needed
             the sequence. Of a sequence in shards it is given a range in its place, whose tokens
             end where the lost shard does
    idle     seconds without a word after which the registry is asked whether it is there
    others   as attnd.connect(), of each daemon; connect_timeout also for the first member

    Raises ConnectionLostError (no member in time, and why), InvalidArgumentError (url).
    """
    if not url.startswith("cluster+"):
        raise attnd.InvalidArgumentError(f"url is {url!r}, expected cluster+etcd://... or the like")
    try:
        registry = open_registry(url[len("cluster+") :])
    except ValueError as e:
        raise attnd.InvalidArgumentError(str(e)) from None
    wait = timeout if connect_timeout is None else connect_timeout
    client = ClusterClient(url, registry, rebuild, idle, {"timeout": timeout, **options}, wait)
    if not client.members.wait(wait, bool):
        why = client.members.why or "nobody has registered there"
        client.close()
        raise attnd.ConnectionLostError(f"{url} has no members: {why}")
    return client


# What is asked of a host, on another thread, which may go on after the host is gone.


def _describe(host: Host, name: str) -> attnd.PoolSpec:
    with host.client().pool(name) as found:
        return found.spec


def _ping(host: Host, timeout: float | None) -> float:
    return host.client().ping(timeout=timeout)


def _stats(host: Host, timeout: float | None) -> dict[str, Any]:
    return host.client().stats(timeout=timeout)


class ClusterClient(Closing, NotPicklable):
    """As attnd.Client, of many daemons. Made by connect().

    members  who is there: members.now(), by name; members.is_frozen: the registry is not
    """

    def __init__(
        self,
        url: str,
        registry: Any,
        rebuild: Rebuild | None,
        idle: float,
        options: dict[str, Any],
        connect_timeout: float,
    ):
        self.url = url
        self.rebuild = rebuild
        self.timeout: float = options["timeout"]
        self.backlog = Backlog()
        self.lock = threading.Lock()  # of backlog and of the pools' indexes
        self._registry = registry
        self.hosts = Hosts(options, min(connect_timeout, 5.0))
        self._pools: set[ClusterPool] = set()
        self._info: attnd.ClientInfo | None = None
        self.is_closed = False
        self.members = Members(registry, self._on_gone, idle)

    def _on_gone(self, member: Member) -> None:
        with self.lock:
            self.backlog.forget(member.name)
        self.hosts.end(member)

    # ---- hosts

    def serving(self) -> list[Member]:
        return [m for m in self.members.now().values() if m.state == SERVING]

    def host(self, member: Member) -> Host:
        return self.hosts.of(member)

    def _first(self, what: Callable[[Host], Any]) -> Any:
        """what(host) of the first member that does it. Raises the last one's AttndError."""
        failed: attnd.AttndError | None = None
        for member in self.members.now().values():
            try:
                host = self.host(member)
                return host.call(functools.partial(what, host))
            except (attnd.ConnectionLostError, attnd.TimedOutError, attnd.DrainingError) as e:
                failed = e
        raise failed or attnd.ConnectionLostError(f"{self.url} has no members")

    @property
    def info(self) -> attnd.ClientInfo:
        """Of the first daemon that answered: all members are to have the same limits."""
        if self._info is None:
            self._info = self._first(lambda host: host.client().info)
        return self._info

    # ---- as attnd.Client

    def create_pool(
        self,
        spec: attnd.PoolSpec,
        *,
        array_dtype: str | None = None,
        wire_dtype: str | None = None,
        timeout: float | None = None,
    ) -> ClusterPool:
        """A pool of this spec on every daemon; n_blocks is each one's. Those that come later, and
        those beyond the first 16, make it when a sequence is placed there. Raises what
        attnd.Client.create_pool() does if none of them could make it."""
        dtypes = Dtypes(array_dtype, wire_dtype)
        members = self.members.now().values()
        made: ClusterPool | None = None
        failed: attnd.AttndError | None = None
        for member in sorted(members, key=lambda m: m.state == LEAVING)[:_AT_ONCE]:
            host = self.host(member)
            try:
                has = host.ask(spec, dtypes, lambda pool: pool.spec)
                made = made or ClusterPool(self, has, spec, dtypes)
            except attnd.AttndError as e:
                log.warning("pool %s on %s: %s", spec.name, member.name, e)
                failed = e
        if made is None:
            raise failed or attnd.ConnectionLostError(f"{self.url} has no members")
        self._pools.add(made)
        return made

    def pool(self, name: str, *, timeout: float | None = None) -> ClusterPool:
        """Finds a pool by name on any daemon. Raises NotFoundError."""
        failed: attnd.NotFoundError | None = None
        for member in self.members.now().values():
            try:
                host = self.host(member)

                spec = host.call(functools.partial(_describe, host, name))
                pool = ClusterPool(self, spec, spec)
                self._pools.add(pool)
                return pool
            except attnd.NotFoundError as e:
                failed = e
            except (attnd.ConnectionLostError, attnd.TimedOutError):
                continue
        raise failed or attnd.ConnectionLostError(f"{self.url} has no members")

    def reopen(self, *, timeout: float | None = None) -> None:
        """A new session on each daemon that was restarted without its cache."""
        for host in self.hosts.all():
            try:
                host.call(functools.partial(_ping, host, None))
            except attnd.SessionGoneError:
                host.begin_anew()
            except attnd.AttndError as e:
                log.warning("%s: %s", host.name, e)

    def ping(self, *, timeout: float | None = None) -> float:
        """Seconds of one round trip to each member, the longest. Raises the first one's AttndError."""
        longest = 0.0
        for member in self.members.now().values():
            host = self.host(member)
            longest = max(longest, host.call(functools.partial(_ping, host, timeout)))
        return longest

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Each daemon's counters, by the member's name; without those that do not answer."""
        found = {}
        for member in self.members.now().values():
            host = self.host(member)
            try:
                found[member.name] = host.call(functools.partial(_stats, host, timeout))
            except attnd.AttndError as e:
                log.warning("%s: %s", member.name, e)
        return found

    def open_lane(self, *args: Any, **options: Any) -> Any:
        raise attnd.UnsupportedError("lanes are of one daemon on this host: attnd_cluster.torch opens them")

    def pin_memory(self) -> None:
        raise attnd.UnsupportedError("memory is shared with one daemon on this host: connect to it")

    def close(self) -> None:
        """Disconnects from all; safe to call again. Sequences that are open wait for adoption."""
        if self.is_closed:
            return
        self.is_closed = True
        self.members.close()
        self.hosts.close()
        self._registry.close()

    def forget_pool(self, pool: ClusterPool) -> None:
        self._pools.discard(pool)
        if any(p.spec.name == pool.spec.name for p in self._pools):
            return
        self.hosts.forget_pool(pool.spec.name)

    def __repr__(self) -> str:
        return f"<attnd_cluster.ClusterClient {self.url}{' closed' if self.is_closed else ''}>"
