"""What the objects that stand for something in the library share: arguments that are checked before
ctypes would cut them to size, closing safely, never pickling."""

from __future__ import annotations

import array
import ctypes
import operator
import os
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from .errors import AttndError, InvalidArgumentError

_T = TypeVar("_T")
U32_MAX = 0xFFFFFFFF
U64_MAX = 0xFFFFFFFFFFFFFFFF


def whole(name: str, value: Any, most: int = U32_MAX) -> int:
    """value if it is a whole number from 0 to most; ctypes would take it modulo 2^32 or 2^64."""
    try:
        n = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number") from None
    if not 0 <= n <= most:
        raise ValueError(f"{name} is {n}, expected 0 to {most}")
    return n


def text(name: str, value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, expected a str")
    return value.encode()


def timeout_us(timeout: float | None) -> int:
    """Microseconds for the library; None is 0, the client's default."""
    if timeout is None:
        return 0
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}, expected seconds above 0, or None")
    return max(1, round(min(timeout * 1e6, 2.0**63)))


def waits_for_signals() -> bool:
    """True on the thread that runs Python's signal handlers, which it does between calls only: its
    waits are cut into pieces, so that Ctrl-C ends them."""
    return threading.current_thread() is threading.main_thread()


class WaitTimes:
    """Seconds of one piece of a wait after the other, 1 ms at first, at most 0.1 s."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0.0005

    def __next__(self) -> float:
        self._next = min(self._next * 2, 0.1)
        return self._next


class _Helper:
    """A thread that makes calls for one that has to see signals meanwhile, one at a time."""

    _idle: list[_Helper] = []

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()

    @classmethod
    def start(cls, run: Callable[[], None]) -> None:
        try:
            helper = cls._idle.pop()
        except IndexError:
            helper = cls()

        def call() -> None:
            run()
            cls._idle.append(helper)

        helper._calls.put(call)


def run_beside(run: Callable[[], None]) -> None:
    """run() on a thread that does not keep the process from ending."""
    _Helper.start(run)


os.register_at_fork(after_in_child=_Helper._idle.clear)  # the child has one thread


class _Call(Generic[_T]):
    """A call on a helper's thread. Whoever is last to know of the other leaves the guard."""

    def __init__(
        self, call: Callable[[], _T], undo: Callable[[_T], object] | None, guard: Inside | None
    ):
        self._call, self._undo, self._guard = call, undo, guard
        self._lock = threading.Lock()
        self._is_done = threading.Lock()
        self._is_done.acquire()
        self._is_begun = False  # by the helper's thread, or taken back before that
        self._outcome: tuple[bool, Any] | None = None  # (True, result) or (False, exception)
        self._is_abandoned = False

    def _begin(self) -> bool:
        """False: the other thread was first."""
        with self._lock:
            is_first, self._is_begun = not self._is_begun, True
        return is_first

    def run(self) -> None:
        if not self._begin():
            return
        outcome: tuple[bool, Any]
        try:
            outcome = True, self._call()
        except BaseException as e:
            outcome = False, e
        with self._lock:
            self._outcome = outcome
            is_abandoned = self._is_abandoned
        if is_abandoned:
            self._clean_up(outcome)
        self._is_done.release()

    def _clean_up(self, outcome: tuple[bool, Any]) -> None:
        """Of a call whose result nobody waits for."""
        is_ok, result = outcome
        try:
            if is_ok and self._undo is not None:
                self._undo(result)
        except AttndError:
            pass
        finally:
            if self._guard is not None:
                self._guard.leave_abandoned()

    def run_and_wait(self) -> _T:
        try:
            run_beside(self.run)  # an exception may come before, within and after it
            while not self._is_done.acquire(timeout=0.1):
                pass  # a signal just before the wait does not end it
        except BaseException:
            if self._begin():
                if self._guard is not None:
                    self._guard.__exit__()
                raise
            with self._lock:
                self._is_abandoned = True
                if self._guard is not None:
                    self._guard.abandon()
                outcome = self._outcome
            if outcome is not None:
                self._clean_up(outcome)
            raise
        if self._guard is not None:
            self._guard.__exit__()
        assert self._outcome is not None
        is_ok, result = self._outcome
        if not is_ok:
            raise result
        return result  # type: ignore[no-any-return]


def interruptible(
    call: Callable[[], _T],
    undo: Callable[[_T], object] | None = None,
    guard: Inside | None = None,
) -> _T:
    """call(), which Ctrl-C ends for the caller; the library goes on with it until its timeout.

    undo   is given the result if an exception kept the caller from waiting for it
    guard  what call() is inside of, until it has ended
    """
    if not waits_for_signals():
        if guard is None:
            return call()
        with guard:
            return call()
    if guard is not None:
        guard.__enter__()
    return _Call(call, undo, guard).run_and_wait()


class NotPicklable:
    """A connection or something behind one belongs to its process."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"cannot pickle {type(self).__name__!r}: it belongs to one process; pass the url and the"
            " sequence ids, and connect or adopt there"
        )


class Closing:
    """`with` closes at its end. What close() raises is not to hide an exception on its way."""

    __slots__ = ()

    def __enter__(self: _T) -> _T:
        return self

    def __exit__(self, exc_type: object, *exc: object) -> None:
        try:
            self.close()
        except AttndError:
            if exc_type is None:
                raise

    def close(self) -> None:
        raise NotImplementedError


class Inside(Protocol):
    """What calls are inside of: a Guard, or two."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def abandon(self) -> None: ...

    def leave_abandoned(self) -> None: ...


class Guard:
    """Counts the calls that are inside the library with one handle.

    `with guard:` around each of them; close() lets no more in and waits for the last to leave, so
    that the handle can be freed. Calls end by their timeouts, so the wait does, too. It does not wait
    for those that were abandoned, by Ctrl-C: the last of them frees the handle when it leaves.
    """

    def __init__(self, what: str):
        self._what = what
        self._changed = threading.Condition(threading.Lock())
        self._n_inside = 0  # abandoned ones among them
        self._n_abandoned = 0
        self._free: Callable[[], object] | None = None
        self._pid = os.getpid()
        self.is_closed = False

    @property
    def is_inherited(self) -> bool:
        """True in a process that was forked after the handle was made."""
        return os.getpid() != self._pid

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidArgumentError(f"{self._what} was opened before fork and is the parent's")
        with self._changed:
            if self.is_closed:
                raise InvalidArgumentError(f"{self._what} is closed")
            self._n_inside += 1

    def __exit__(self, *exc: object) -> None:
        self._leave(0)

    def abandon(self) -> None:
        """Somebody inside will leave by leave_abandoned()."""
        with self._changed:
            self._n_abandoned += 1
            self._changed.notify_all()

    def leave_abandoned(self) -> None:
        self._leave(1)

    def _leave(self, n_abandoned: int) -> None:
        free = None
        with self._changed:
            self._n_inside -= 1
            self._n_abandoned -= n_abandoned
            if self.is_closed and self._n_inside == self._n_abandoned:
                self._changed.notify_all()
            if self._n_inside == 0:
                free, self._free = self._free, None
        if free is not None:
            free()

    def close(self, free: Callable[[], object]) -> bool:
        """Has free() called once; True for the one caller whose free it is."""
        if self.is_inherited:  # the lock may be held by a thread that does not exist here
            if self.is_closed:
                return False
            self.is_closed = True
            free()
            return True
        with self._changed:
            if self.is_closed:
                return False
            self.is_closed = True
            while self._n_inside > self._n_abandoned:
                self._changed.wait()
            if self._n_inside > 0:
                self._free = free
                return True
        free()
        return True


def random_id() -> int:
    return int.from_bytes(os.urandom(8), "little")


def token_ids(tokens: Iterable[int]) -> Any:
    """As libattn takes them: of a list, or of an array or tensor of one dimension."""
    tolist = getattr(tokens, "tolist", None)
    ids = tolist() if tolist is not None else list(tokens)
    kind = ctypes.c_uint32 * len(ids)
    try:
        return kind.from_buffer(array.array("I", ids))
    except (TypeError, OverflowError):  # one of them is no token id: says which
        return kind(*(whole("token", t, U32_MAX) for t in ids))
