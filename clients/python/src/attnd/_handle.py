"""What the objects that stand for something in the library share: arguments that are checked before
ctypes would cut them to size, closing safely, never pickling."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

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


def interruptible(call: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
    """call(), on a thread of its own if this one has to see signals meanwhile.

    undo is given the result of a call that an exception kept from waiting for it.
    """
    if not waits_for_signals():
        return call()
    lock = threading.Lock()
    done = threading.Event()
    state: dict[str, Any] = {"is_wanted": True}

    def run() -> None:
        try:
            result = call()
        except BaseException as e:
            state["error"] = e
        else:
            with lock:
                state["result"] = result
                is_wanted = state["is_wanted"]
            if not is_wanted:
                undo(result)
        done.set()

    threading.Thread(target=run, daemon=True).start()
    try:
        done.wait()
    except BaseException:
        with lock:
            state["is_wanted"] = False
        if "result" in state:
            undo(state["result"])
        raise
    if "error" in state:
        raise state["error"]
    return state["result"]  # type: ignore[no-any-return]


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


class Guard:
    """Counts the calls that are inside the library with one handle.

    `with guard:` around each of them; close() lets no more in and waits for the last to leave, so
    that the handle can be freed. Calls end by their timeouts, so the wait does, too.
    """

    def __init__(self, what: str):
        self._what = what
        self._changed = threading.Condition(threading.Lock())
        self._n_inside = 0
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
        with self._changed:
            self._n_inside -= 1
            if self.is_closed and self._n_inside == 0:
                self._changed.notify_all()

    def close(self) -> bool:
        """True for the one caller that is to free the handle."""
        if self.is_inherited:  # the lock may be held by a thread that does not exist here
            was_closed, self.is_closed = self.is_closed, True
            return not was_closed
        with self._changed:
            if self.is_closed:
                return False
            self.is_closed = True
            while self._n_inside > 0:
                self._changed.wait()
        return True
