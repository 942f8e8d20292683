"""A sequence of a cluster: on one daemon at a time, and found again when it is on another."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attnd
from attnd._handle import Closing, NotPicklable

from .hosts import Host
from .keys import LEAVING, SERVING, Member
from .place import home_of

if TYPE_CHECKING:
    from .pool import ClusterPool

log = logging.getLogger("attnd.cluster")
_MOVE_SECONDS = 5.0  # that a move may take from its adoption of a sequence to its end
_ATTEMPTS = 4
_LOST = (attnd.ConnectionLostError, attnd.TimedOutError, attnd.DrainingError)


def random_id(host: str) -> int:
    return home_of(host) << 48 | int.from_bytes(os.urandom(6), "little")


class ClusterSequence(Closing, NotPicklable):
    """As attnd.Sequence. Made by ClusterPool.open() and the like.

    id      another one when it was made anew on another daemon; `where` names the daemon
    tokens  those that are known, from the first on: of open() and set_tokens()
    note    what whoever adopts it is to know, as set_note() left it, also another worker's
    """

    is_long = False  # it is on one daemon

    def __init__(
        self,
        pool: ClusterPool,
        host: Host,
        inner: attnd.Sequence,
        tokens: Iterable[int] = (),
        adapter: int = 0,
        note: bytes | None = None,
    ):
        self.pool = pool
        self.note = note or b""
        self._note_is_set = note is not None  # or cleared: what a move has left may have another
        self.tokens = list(tokens)
        self.adapter = adapter
        self.is_closed = False
        self.n_rebuilt = 0
        self._lock = threading.RLock()
        self._version = 0  # rises when it is somewhere else, or has another epoch
        self._lens = [inner.n_cached] * pool.spec.num_layers  # tokens that were acknowledged
        self._tree: int | None = None  # where the tree that was appended last begins
        self._set(host, inner)
        self.n_cached: int = inner.n_cached
        self.layer_len: tuple[int, ...] = inner.layer_len
        if inner.layer_len:
            self._lens = list(inner.layer_len)

    def _set(self, host: Host, inner: attnd.Sequence) -> None:
        self._host, self._inner = host, inner
        self._version += 1
        host.hold(inner)

    @property
    def id(self) -> int:
        return self._inner.id

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    @property
    def where(self) -> str:
        return self._host.name

    def _acknowledged(self, layer: int, pos: int, n: int, is_tree: bool) -> None:
        if is_tree:  # commit() says what of it there is
            self._tree = pos
        past = pos if is_tree else pos + n
        if self._lens[layer] < past:
            self._lens[layer] = past

    # ---- finding it again

    def _recover(self, version: int, is_stale: bool) -> None:
        """After a request of `version` found it gone, or stale. Raises SequenceGoneError,
        StaleEpochError (it is another worker's), or what rebuild() does."""
        with self._lock:
            if self._version != version:
                return  # another thread has
            if self.is_closed:
                raise attnd.SequenceGoneError(f"sequence {self.id} is closed")
            if is_stale and not self._host.is_gone and self._await_move():
                return
            if not self._host.is_gone or self._member().state == LEAVING:
                if self._find():
                    return
            self._rebuild()

    def _await_move(self) -> bool:
        """Somebody has adopted it: a move, which ends with it gone from here, or another worker. True:
        the move was given up, and it is ours here again."""
        host, until = self._host, time.monotonic() + _MOVE_SECONDS
        pause = 0.001
        while not host.is_gone:
            try:  # refused by its epoch, if by nothing else
                host.call(lambda: self._inner.retain(0xFFFFFFFF))
                return False
            except attnd.StaleEpochError:
                pass
            except attnd.NotFoundError:
                return False
            except _LOST:
                pass
            if time.monotonic() > until:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        if host.is_gone:
            return False
        if self._member().state == SERVING:
            raise attnd.StaleEpochError(f"another worker has adopted sequence {self.id}")
        try:
            self._set(host, self.pool.at(host, lambda pool: pool.adopt(self.id)))
        except attnd.NotFoundError:
            return False
        return True

    def _member(self) -> Member:
        """Of its host, as it was last."""
        return self.pool.client.members.known(self._host.name) or self._host.member

    def _moved_to(self) -> str:
        """The url of where it went, if its daemon says so; else "". Only members are followed."""
        if self._host.is_gone:
            return ""
        host, inner = self._host, self._inner
        try:
            at: attnd.Place = host.call(lambda: host.client().locate(inner.id, inner.epoch))
        except attnd.AttndError as e:
            log.debug("sequence %d: %s does not say where it went: %s", self.id, host.name, e)
            return ""
        return at.url

    def _find(self) -> bool:
        """Adopts it wherever it is, with all that was acknowledged: where its daemon says that it
        went, where that one's latest moves went, where its id says that it began, then all others."""
        client, old = self.pool.client, self._host
        members = client.members.all()
        late = list(reversed(self._member().moved_to))
        url = self._moved_to()
        names = sorted(
            (n for n in members if n != old.name or old.is_gone),
            key=lambda n: (
                members[n].url != url,
                late.index(n) if n in late else len(late),
                home_of(n) != self.id >> 48,
            ),
        )
        for name in names:
            host = client.host(members[name])
            try:
                inner = self.pool.at(host, lambda pool: pool.adopt(self.id))
            except attnd.NotFoundError:
                continue
            except _LOST as e:
                log.debug("sequence %d at %s: %s", self.id, name, e)
                continue
            if any(have < want for have, want in zip(inner.layer_len, self._lens)):
                log.warning("sequence %d at %s lacks tokens: what a move has left", self.id, name)
                self._drop(host, inner)
                continue
            log.info("sequence %d is at %s now", self.id, name)
            self._set(host, inner)
            if old.is_gone and self._note_is_set:  # with all tokens, but perhaps an older note
                self._set_note_again()
            return True
        return False

    @staticmethod
    def _drop(host: Host, inner: attnd.Sequence) -> None:
        """A copy that is no use; its blocks are."""
        try:
            host.call(inner.close)
        except attnd.AttndError as e:
            log.debug("sequence %d at %s: %s", inner.id, host.name, e)

    def _rebuild(self) -> None:
        rebuild = self.pool.client.rebuild
        what = f"sequence {self.id} went with {self._host.name}"
        if rebuild is None:
            raise attnd.SequenceGoneError(f"{what}: open another and feed it again")
        if len(self.tokens) < max(self._lens, default=0):
            raise attnd.SequenceGoneError(
                f"{what}, and of its {max(self._lens)} tokens only {len(self.tokens)} are known:"
                " set_tokens() tells them"
            )
        host, inner = self.pool.place(None, self.tokens, self.adapter, None)
        log.warning("%s, is made anew at %s", what, host.name)
        self._set(host, inner)
        self.n_cached, self.layer_len = inner.n_cached, ()
        self._lens = [inner.n_cached] * self.pool.spec.num_layers
        self.n_rebuilt += 1
        if self.note:
            self._set_note_again()
        rebuild(self)

    def _set_note_again(self) -> None:
        try:
            self._host.call(lambda: self._inner.set_note(self.note))
        except attnd.AttndError as e:  # an older daemon, or no room
            log.warning("sequence %d at %s is without its note: %s", self.id, self.where, e)

    def _do(self, what: Any) -> Any:
        """what(), which asks of self._inner; again where it is found after a move, or made anew."""
        for _ in range(_ATTEMPTS):
            version = self._version
            try:
                return self._host.call(what)
            except attnd.NotFoundError:
                self._recover(version, False)
            except attnd.StaleEpochError:
                self._recover(version, True)
            except attnd.ConnectionLostError:
                if not self._host.is_gone:
                    raise
                self._recover(version, False)
        raise self._went()

    # ---- as attnd.Sequence

    def fork(
        self,
        new_id: int | None = None,
        n_tokens: int | None = None,
        *,
        timeout: float | None = None,
    ) -> ClusterSequence:
        def fork() -> ClusterSequence:
            id = random_id(self._host.name) if new_id is None else new_id
            host = self._host
            inner = self._inner.fork(id, n_tokens, timeout=timeout)
            n = min(inner.layer_len, default=0)
            return ClusterSequence(self.pool, host, inner, self.tokens[:n], self.adapter)

        made: ClusterSequence = self._do(fork)
        return made

    def set_tokens(self, pos: int, tokens: Iterable[int], *, timeout: float | None = None) -> None:
        ids = list(getattr(tokens, "tolist", lambda: tokens)())
        self._do(lambda: self._inner.set_tokens(pos, ids, timeout=timeout))
        with self._lock:
            self.tokens[pos : pos + len(ids)] = ids

    def set_note(self, note: bytes, *, timeout: float | None = None) -> None:
        """As attnd.Sequence.set_note(); it is set again where the sequence is made anew, and where it
        is found after its host's death."""
        with self._lock:  # who finds the sequence meanwhile would set the one before
            self._do(lambda: self._inner.set_note(note, timeout=timeout))
            self.note, self._note_is_set = bytes(note), True

    def retain(self, first_token: int = 0, **options: Any) -> None:
        self._do(lambda: self._inner.retain(first_token, **options))

    def truncate(self, n_tokens: int, *, timeout: float | None = None) -> None:
        self._do(lambda: self._inner.truncate(n_tokens, timeout=timeout))
        with self._lock:
            self._version += 1
            self._lens = [min(n, n_tokens) for n in self._lens]
            del self.tokens[n_tokens:]

    def commit(self, nodes: Iterable[int], *, timeout: float | None = None) -> None:
        path = list(nodes)
        self._do(lambda: self._inner.commit(path, timeout=timeout))
        with self._lock:
            self._version += 1
            if self._tree is None:  # of one that was adopted with its tree
                self._do(lambda: self._inner.adopt(timeout=timeout))
                self._lens = list(self._inner.layer_len)
            else:
                self._lens = [self._tree + len(path)] * len(self._lens)
                self._tree = None

    def export(self, path: str | os.PathLike[str], *, timeout: float | None = None) -> Any:
        return self._do(lambda: self._inner.export(path, timeout=timeout))

    def move(self, to: str, *, timeout: float | None = None) -> ClusterSequence:
        """Takes it to the member of that name, while other threads decode it; gives itself. Raises
        NotFoundError (no such member) and what attnd.Sequence.move() does."""
        member = self.pool.client.members.now().get(to)
        if member is None:
            raise attnd.NotFoundError(f"no member is named {to!r}")
        host = self.pool.client.host(member)

        def move() -> None:
            with self._lock:
                if self._host is host:
                    return
                try:
                    inner = self.pool.at(host, lambda to: self._inner.move(to, timeout=timeout))
                except attnd.AttndError as e:
                    if not isinstance(e, (attnd.NotFoundError, attnd.StaleEpochError)):
                        self._take_back()
                    raise
                self._set(host, inner)

        self._do(move)
        return self

    def _take_back(self) -> None:
        """After a move that failed: it is where it was, perhaps under another epoch."""
        source = self._host
        try:
            self._set(source, self.pool.at(source, lambda pool: pool.adopt(self.id)))
        except attnd.AttndError as e:
            log.debug("sequence %d after a move that failed: %s", self.id, e)

    def adopt(self, *, timeout: float | None = None) -> None:
        """Takes the sequence (back) under a new epoch; sets layer_len, and note to what another worker
        may have left."""
        with self._lock:
            other = self._adopted(timeout)
            self._set(other._host, other._inner)
            self.layer_len, self._lens = other.layer_len, other._lens
            if other._note_is_set:  # else an older daemon has not said
                self.note, self._note_is_set = other.note, True

    def _adopted(self, timeout: float | None) -> ClusterSequence:
        """Wherever it is; made anew where its host was lost, as by every other request."""
        for _ in range(_ATTEMPTS):
            version = self._version
            try:
                return self.pool.adopt_one(self.id, timeout)
            except attnd.SequenceGoneError:
                self._recover(version, False)
        raise self._went()

    def _went(self) -> attnd.SequenceGoneError:
        return attnd.SequenceGoneError(f"sequence {self.id} went each time that it was found")

    def close(self, *, timeout: float | None = None) -> None:
        """Forgets it, wherever it is. Safe to call again."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            try:
                self._host.call(lambda: self._inner.close(timeout=timeout))
            except attnd.ConnectionLostError:
                if not self._host.is_gone:
                    raise

    def __exit__(self, *exc: Any) -> None:
        if not self.pool.client.is_closed:
            super().__exit__(*exc)

    def __repr__(self) -> str:
        return f"<attnd_cluster.ClusterSequence {self.id} at {self.where}>"
