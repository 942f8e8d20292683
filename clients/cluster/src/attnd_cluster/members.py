"""Who is there, as a watch of the registry tells.

While the registry is lost the members stay as they were. One whose lease ended is a suspect: no new
sequences go there, what is there goes on, until its fate is decided (keys.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .keys import BACK, DEAD, GRACE_SECONDS, MEMBERS, Member, decide
from .registry import Deleted, Entry, Registry, RegistryLost

_RETRY_SECONDS = 0.2
log = logging.getLogger("attnd.cluster")


class _Suspect(NamedTuple):
    member: Member
    since: float
    is_awaited: bool = False  # its agent has said that this registration comes, and it was not seen


class Members:
    """A thread that watches. close() ends it.

    on_gone  is called with each member that is gone, on that thread; it must not wait. Who has none
             decides no fate either
    idle     seconds without a word after which the registry is asked whether it is there
    """

    def __init__(
        self, registry: Registry, on_gone: Callable[[Member], None] | None = None, idle: float = 2.0
    ):
        self._registry, self._on_gone, self._idle = registry, on_gone, idle
        self._changed = threading.Condition()
        self._now: dict[str, Member] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._ends = False
        self._store = ""
        self._lost_at, self._heard_at = float("-inf"), time.monotonic()
        self.is_known = False  # the registry was read, once at least
        self.is_frozen = True  # the registry is not there
        self.n_lost = 0  # how often it was lost
        self.why = ""  # it is lost
        self._thread = threading.Thread(target=self._run, name="attnd-members", daemon=True)
        self._thread.start()

    def now(self) -> dict[str, Member]:
        """Without suspects."""
        with self._changed:
            return dict(self._now)

    def known(self, name: str) -> Member | None:
        """A member or a suspect; None: it is gone, or was never there."""
        with self._changed:
            suspect = self._suspects.get(name)
            return self._now.get(name) or (suspect.member if suspect is not None else None)

    def all(self) -> dict[str, Member]:
        """With suspects, behind the others: what is there goes on, so it can be asked for."""
        with self._changed:
            return {**self._now, **{name: s.member for name, s in self._suspects.items()}}

    def wait(self, timeout: float, condition: Callable[[dict[str, Member]], bool]) -> bool:
        """Until condition(members) holds; False: it did not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_known and condition(self._now), timeout)

    def close(self) -> None:
        self._ends = True
        self._thread.join(0.2)  # else it ends by itself, at the watch's next word

    # ---- the thread

    def _run(self) -> None:
        at = None
        while not self._ends:
            try:
                if at is None:
                    at = self._list()
                for changes in self._registry.watch(MEMBERS, at, self._idle):
                    if self._ends:
                        return
                    if changes is None:
                        at = None
                        break
                    at = changes.at
                    self._take(changes.events)
            except RegistryLost as e:
                self._freeze(str(e))
                at = None  # it may come back as another one
                time.sleep(_RETRY_SECONDS)
            except Exception:
                if self._ends:
                    return
                log.exception("watching members")
                at = None
                time.sleep(_RETRY_SECONDS)

    def _freeze(self, why: str) -> None:
        if self._ends:
            return
        with self._changed:
            if not self.is_frozen:
                log.warning("registry lost, members stay as they are: %s", why)
                self.n_lost += 1
            self.is_frozen, self.why, self._lost_at = True, why, time.monotonic()
            self._changed.notify_all()

    def _list(self) -> str:
        seen = self._registry.list(MEMBERS, 2 * self._idle)
        if self._store not in ("", seen.store):
            log.warning("the registry is another one: its data was lost")
            self._lost_at = time.monotonic()
        self._store = seen.store
        with self._changed:
            missing = [key for key in self._now if MEMBERS + key not in seen.entries]
        events: list[Entry | Deleted] = [Deleted(MEMBERS + name) for name in missing]
        events += [Entry(key, value) for key, value in seen.entries.items()]
        self._take(events)
        return seen.at

    def _take(self, events: Iterable[Entry | Deleted]) -> None:
        gone: list[Member] = []
        before, self._heard_at = self._heard_at, time.monotonic()
        if self._heard_at - before > 1.5 * self._idle:
            self._lost_at = self._heard_at  # this process was away, and others may have been, too
        with self._changed:
            for event in events:
                name = event.key[len(MEMBERS) :]
                if isinstance(event, Entry):
                    self._enter(name, event.value, gone)
                elif name in self._now:
                    self._suspects[name] = _Suspect(self._now.pop(name), time.monotonic())
            self.is_frozen, self.why, self.is_known = False, "", True
            self._changed.notify_all()
        try:
            self._judge(gone)
        finally:  # also if the registry is lost behind some of them
            for member in gone:
                log.warning("%s is gone", member.name)
                if self._on_gone is not None:
                    self._on_gone(member)

    def _enter(self, name: str, value: bytes, gone: list[Member]) -> None:
        try:
            member = Member.of_json(value)._replace(name=name)
        except ValueError as e:
            log.warning("registry: %s: %s", name, e)
            return
        suspect = self._suspects.pop(name, None)
        old = self._now.get(name) or (suspect.member if suspect is not None else None)
        if old is not None and old.registration not in (member.registration, *member.was):
            gone.append(old)  # and another came in its place
        self._now[name] = member

    def _judge(self, gone: list[Member]) -> None:
        """Decides the fate of suspects, as far as the time for it has come. Raises RegistryLost."""
        if self._on_gone is None:
            self._suspects.clear()
            return
        now = time.monotonic()
        is_calm = now - self._lost_at > GRACE_SECONDS
        for name, suspect in list(self._suspects.items()):
            may_wait = suspect.is_awaited or not is_calm
            if may_wait and now - suspect.since <= GRACE_SECONDS:
                continue
            fate = DEAD
            if not self._registry.is_static:
                key = MEMBERS + name
                if suspect.is_awaited and key in self._registry.list(key, self._idle).entries:
                    continue  # the watch is about to tell of it
                fate = decide(self._registry, suspect.member.registration, DEAD, self._idle)
            with self._changed:
                if fate.startswith(BACK):
                    again = suspect.member._replace(registration=fate[len(BACK) :].decode())
                    self._suspects[name] = _Suspect(again, now, True)
                elif self._suspects.pop(name, None) is not None:
                    gone.append(suspect.member)
                    self._changed.notify_all()
