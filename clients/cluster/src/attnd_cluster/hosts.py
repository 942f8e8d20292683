"""Connections to the members: one client for each, made when it is first wanted.

What waits for a daemon also waits for its end as a member: a call or step on a host that the registry
has declared gone ends with HostGone, not by its time-out, and lanes end as if their daemon had.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import attnd
from attnd._handle import run_beside
from attnd._lib import Seq

from .keys import Member

_T = TypeVar("_T")
_POLL_SECONDS = 0.02
_MAX_ENDED = 1024
_FREEING_SECONDS = 1.0  # for a host that is gone to answer
_PAUSE_SECONDS = 1.0  # after a connection that was not made: who comes meanwhile is told so at once
log = logging.getLogger("attnd.cluster")


def beside(what: Callable[[], _T]) -> concurrent.futures.Future[_T]:
    """what() on another thread."""
    asked: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def ask() -> None:
        try:
            asked.set_result(what())
        except BaseException as e:
            asked.set_exception(e)

    run_beside(ask)
    return asked


Weights = dict[str, dict[int, Any]]  # by a pool's name, of its layers: Pool.weights()'s


class Dtypes(NamedTuple):
    """attnd.Client.create_pool()'s: of arrays in steps, and of q, k and v on their way."""

    array_dtype: str | None = None
    wire_dtype: str | None = None


class HostGone(attnd.ConnectionLostError):
    """The daemon is no member any more."""


class Host:
    """A member, as one registration of it: when it is gone and another comes, that is another Host."""

    def __init__(
        self, member: Member, options: dict[str, Any], connect_timeout: float, weights: Weights
    ):
        self.member = member
        self.name = member.name
        self._options, self._connect_timeout = options, connect_timeout
        self._weights = weights
        self._client: attnd.Client | None = None
        self._pools: dict[str, attnd.Pool] = {}
        self._lock = threading.RLock()
        self._failed: tuple[float, str] = float("-inf"), ""  # the last try to connect
        self._held: weakref.WeakSet[attnd.Sequence] = weakref.WeakSet()
        self._held_lock = threading.Lock()
        self._gone: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.is_released = threading.Event()  # gone, and the library has let go of all arrays

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    def hold(self, seq: attnd.Sequence) -> None:
        """A sequence there, which is to be freed should the host be gone."""
        with self._held_lock:
            self._held.add(seq)

    def _take_held(self) -> list[tuple[str, Seq]]:
        """Names of pools, and sequences in them."""
        with self._held_lock:
            held, self._held = self._held, weakref.WeakSet()
        return [(s.pool.spec.name, Seq(s.id, s.epoch)) for s in held if not s.is_closed]

    def end(self) -> None:
        """It is gone. Returns at once; what waits for it ends. Nothing where that is known."""
        if self.is_gone:
            return
        held = self._take_held()  # before those who wait drop them
        if self._say_gone():
            if (client := self._client) is not None:
                client.give_up()
            name = f"attnd-end-{self.name}"
            threading.Thread(target=self._end, args=(held,), name=name, daemon=True).start()

    def _end(self, held: list[tuple[str, Seq]]) -> None:
        client = self._client
        try:
            session = 0 if client is None else client.info.session
        except attnd.InvalidArgumentError:  # closed meanwhile, and its session with it
            session = 0
        self.close()
        held += self._take_held()  # of opens that were on their way
        if session and held:
            self._free(session, held)

    def _free(self, session: int, held: Iterable[tuple[str, Seq]]) -> None:
        """What was opened there, if the daemon is there all the same: its agent may have freed what it saw
        before. Epochs tell those that somebody has adopted since."""
        options = {**self._options, "timeout": _FREEING_SECONDS}
        try:
            with attnd.connect(self.member.url, session=session, **options) as client:
                for name, seq in held:
                    try:
                        attnd.Sequence(client.pool(name), seq).close()
                    except (attnd.NotFoundError, attnd.StaleEpochError):
                        pass
        except attnd.AttndError as e:
            log.debug("%s, which is gone, does not free what it has: %s", self.name, e)

    def _say_gone(self) -> bool:
        try:
            self._gone.set_result(None)
        except concurrent.futures.InvalidStateError:
            return False
        return True

    def close(self) -> None:
        self._say_gone()
        with self._lock:  # who connects has done so
            client, self._client = self._client, None
            self._pools.clear()
        try:
            if client is not None:
                client.close()
        finally:
            self.is_released.set()

    def _refuse(self) -> HostGone:
        return HostGone(f"{self.name} ({self.member.url}) is no member of the cluster any more")

    def client(self) -> attnd.Client:
        """Raises AttndError."""
        with self._lock:
            if self._gone.done():
                raise self._refuse()
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> attnd.Client:
        at, why = self._failed
        if time.monotonic() - at < _PAUSE_SECONDS:
            raise attnd.ConnectionLostError(why)
        try:
            return attnd.connect(
                self.member.url, connect_timeout=self._connect_timeout, **self._options
            )
        except (attnd.ConnectionLostError, attnd.TimedOutError) as e:
            self._failed = time.monotonic(), e.message
            raise

    def pool(self, spec: attnd.PoolSpec, dtypes: Dtypes) -> attnd.Pool:
        """Its pool of this spec, made if it is missing. Raises AttndError."""
        with self._lock:
            pool = self._pools.get(spec.name)
            if pool is None:
                pool = self.client().create_pool(spec, **dtypes._asdict())
                for layer, weights in list(self._weights.get(spec.name, {}).items()):
                    pool.weights(layer, weights)
                self._pools[spec.name] = pool
            return pool

    def give_weights(self, name: str, layer: int, weights: Any) -> None:
        """To its pool, if it has one now."""
        with self._lock:
            pool = self._pools.get(name)
            if pool is not None:
                pool.weights(layer, weights)

    def ask(
        self,
        spec: attnd.PoolSpec,
        dtypes: Dtypes,
        what: Callable[[attnd.Pool], _T],
        seconds: float | None = None,
    ) -> _T:
        """what(pool), as call(); again where session and pools went with an earlier daemon."""
        try:
            return self.call(lambda: what(self.pool(spec, dtypes)), seconds)
        except (attnd.SessionGoneError, attnd.PoolGoneError):
            self.call(self.begin_anew, seconds)
            return self.call(lambda: what(self.pool(spec, dtypes)), seconds)

    def begin_anew(self) -> None:
        """After SessionGoneError: the daemon was restarted without its cache. Raises AttndError."""
        with self._lock:
            self._pools.clear()
            self.client().reopen()

    def release_pool(self, name: str) -> None:
        with self._lock:
            pool = self._pools.pop(name, None)
        if pool is not None:
            pool.close()

    def call(self, what: Callable[[], _T], seconds: float | None = None) -> _T:
        """what(), which may ask the daemon; its end as a member ends the wait, and so do the seconds,
        while what() goes on. Raises AttndError."""
        if self._gone.done():
            raise self._refuse()
        asked = beside(what)
        either: list[concurrent.futures.Future[Any]] = [asked, self._gone]
        concurrent.futures.wait(either, seconds, concurrent.futures.FIRST_COMPLETED)
        if not asked.done():
            if self._gone.done():
                raise self._refuse()
            raise attnd.TimedOutError(f"{self.name} ({self.member.url}) is not connected yet")
        try:
            return asked.result()
        except (attnd.InvalidArgumentError, attnd.ConnectionLostError):
            if self._gone.done():  # it was closed meanwhile
                raise self._refuse() from None
            raise

    def wait(self, step: attnd.Step) -> attnd.Result:
        """The step's result, as Step.wait(); raises HostGone, too."""
        client, seconds = step._pool.client, 0.001
        while not step.is_done:
            if self._gone.done():
                raise self._refuse()
            try:
                client.poll_once(seconds)
            except attnd.InvalidArgumentError:
                if self._gone.done():  # it was closed meanwhile
                    raise self._refuse() from None
                raise
            seconds = min(2 * seconds, _POLL_SECONDS)
        return step.wait()


class Hosts:
    """Of all members, by registration: what is on its way to one that is gone does not touch the one
    that came in its place. Hosts of members that are gone end themselves."""

    def __init__(self, options: dict[str, Any], connect_timeout: float):
        self._options, self._connect_timeout = options, connect_timeout
        self._lock = threading.Lock()
        self._weights: Weights = {}  # of all hosts
        self._hosts: dict[str, Host] = {}  # of one that goes on with earlier ones, by each of them
        self._ended: collections.deque[str] = collections.deque(maxlen=_MAX_ENDED)

    @staticmethod
    def _keys(member: Member) -> list[str]:
        return [r or f"static {member.name}" for r in (member.registration, *member.was)]

    def of(self, member: Member) -> Host:
        """One that is gone where the member is: who asks knew it before."""
        with self._lock:
            host = next((h for k in self._keys(member) if (h := self._hosts.get(k))), None)
            if host is None or host.is_gone or host.member.url != member.url:
                host = Host(member, self._options, self._connect_timeout, self._weights)
                if member.registration in self._ended:
                    host.end()
                    return host
            for key in self._keys(member):
                self._hosts[key] = host
            host.member = member
            return host

    def end(self, member: Member) -> None:
        with self._lock:
            ended = [self._hosts.pop(key, None) for key in self._keys(member)]
            self._ended.extend(r for r in (member.registration, *member.was) if r)
        for host in ended:
            if host is not None:
                host.member = member  # as it was last: where its sequences went
                host.end()

    def all(self) -> list[Host]:
        with self._lock:
            return list(set(self._hosts.values()))

    def give_weights(self, name: str, layer: int, weights: Any) -> None:
        """To the pools of that name, those that are made later, too."""
        self._weights.setdefault(name, {})[layer] = weights
        for host in self.all():
            host.give_weights(name, layer, weights)

    def forget_pool(self, name: str) -> None:
        self._weights.pop(name, None)
        for host in self.all():
            host.release_pool(name)

    def close(self) -> None:
        for host in self.all():
            host.close()
