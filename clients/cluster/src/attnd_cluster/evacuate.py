"""Sends a daemon's sequences to other daemons: they are copied while they decode.

What has arrived belongs to a session of the sender's until the worker adopts it there: so clients
to targets are kept until close(), which leaves the sequences a lease's time more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attnd

from .keys import SERVING, Member

log = logging.getLogger("attnd.agent")


class Mover:
    """source: gives the client that moves; options: of attnd.connect() to targets."""

    def __init__(self, source: Callable[[], attnd.Client], **options: Any):
        self._source, self._options = source, options
        self._targets: dict[str, tuple[str, attnd.Client]] = {}
        self._pools: dict[tuple[str, str], attnd.Pool] = {}
        self._given: dict[tuple[str, str], int] = {}  # blocks, since the target's load was told
        self._told: dict[str, Member] = {}

    def _client(self, member: Member) -> attnd.Client:
        url, client = self._targets.get(member.name, ("", None))
        if client is not None and url == member.url:
            return client
        self._forget(member.name)
        client = attnd.connect(member.url, name="attnd-agent", **self._options)
        self._targets[member.name] = member.url, client
        return client

    def _forget(self, name: str) -> None:
        """A target that did not answer, or has another address."""
        for key in [key for key in self._pools if key[0] == name]:
            self._pools.pop(key).close(timeout=0.5)
        _, client = self._targets.pop(name, ("", None))
        if client is not None:
            client.close()

    def _pool(self, member: Member, name: str) -> attnd.Pool:
        pool = self._pools.get((member.name, name))
        if pool is None:
            client = self._client(member)
            try:
                pool = client.pool(name)
            except attnd.SessionGoneError:
                raise
            except attnd.NotFoundError:  # it has had no sequence of that model yet
                with self._source().pool(name) as source:
                    pool = client.create_pool(source.spec)
            self._pools[member.name, name] = pool
        return pool

    def targets(
        self, members: dict[str, Member], own: str, pool: str, n_blocks: int
    ) -> list[Member]:
        """Where a sequence of n_blocks has room, the emptiest first."""
        found = []
        for m in members.values():
            if self._told.get(m.name) != m:
                self._told[m.name] = m
                self._given = {k: v for k, v in self._given.items() if k[0] != m.name}
            if m.name == own or m.state != SERVING:
                continue
            if m.pools is None or pool not in m.pools:  # not known, or it has to be made: try
                found.append((0, m.name, m))
            else:
                free = m.pools[pool].n_free_blocks - self._given.get((m.name, pool), 0)
                if free > n_blocks:
                    found.append((-free, m.name, m))
        return [m for _, _, m in sorted(found)]

    def move(
        self, sequence: dict[str, Any], members: dict[str, Member], own: str, to: str | None = None
    ) -> str | None:
        """One sequence, as inspect lists it, to the member `to`, or where there is most room. The
        name of who has it now; None: nobody took it, it is where it was."""
        id, pool, n_blocks = int(sequence["sequence"]), sequence["pool"], sequence["blocks"]
        for member in self.targets(members, own, pool, n_blocks):
            if to is not None and member.name != to:
                continue
            try:
                target = self._pool(member, pool)
                self._source().move(id, target)
                key = member.name, pool
                self._given[key] = self._given.get(key, 0) + n_blocks
                return member.name
            except attnd.SequenceGoneError:
                return None  # closed meanwhile
            except attnd.AttndError as e:
                log.warning("sequence %d does not move to %s: %s", id, member.name, e)
                if isinstance(
                    e, (attnd.ConnectionLostError, attnd.TimedOutError, attnd.NotFoundError)
                ):
                    self._forget(member.name)
        return None

    def close(self) -> None:
        for name in list(self._targets):
            self._forget(name)
