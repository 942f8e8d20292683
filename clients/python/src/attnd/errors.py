"""Exceptions: one class for each status of libattn, all of them AttndError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._lib import library

if TYPE_CHECKING:
    from ._step import Result


class AttndError(Exception):
    """A call to attnd failed.

    status       the library's number, negative
    name         its name, such as "ATTN_ENOTFOUND"
    message      the sentence that says which field or limit was the matter
    retry_after  seconds to wait before trying again as the daemon advises, or None
    is_retryable True if the same call may succeed later, unchanged
    result       of a step that failed for some of its items only: its Result with the others' outputs
    """

    status: int = 0

    def __init__(self, message: str, retry_after: float | None = None, status: int | None = None):
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        if status is not None:
            self.status = status
        self._is_retryable: bool | None = None  # None: as the library says of the status
        self.result: Result | None = None

    @property
    def name(self) -> str:
        name: bytes = library().attn_status_name(self.status)
        return name.decode()

    @property
    def is_retryable(self) -> bool:
        if self._is_retryable is not None:
            return self._is_retryable
        return bool(library().attn_status_is_retryable(self.status))

    def __str__(self) -> str:
        return f"{self.message} ({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.retry_after, self.status)


class InvalidArgumentError(AttndError, ValueError):
    """A value is wrong, alone or with the pool; a position leaves a gap; a handle was closed."""

    status = -1


class NotFoundError(AttndError, LookupError):
    """No such session, pool or sequence; its classes below say which, where that is known."""

    status = -2


class SessionGoneError(NotFoundError):
    """The daemon was restarted, or the session's lease ended: Client.reopen(), then pools anew."""


class PoolGoneError(NotFoundError):
    """The pool went with an earlier session of this client: Client.create_pool() again."""


class SequenceGoneError(NotFoundError):
    """Nobody has this sequence: open another and feed it again."""


class MovedError(SequenceGoneError):
    """The sequence goes on at another daemon: Client.locate() says where."""

    status = -20


class AlreadyExistsError(AttndError):
    """The sequence exists, or the pool's name is taken by another spec."""

    status = -3


class OutOfBlocksError(AttndError):
    """The pool has no free block: close or truncate sequences, or wait until others do."""

    status = -4


class OverQuotaError(AttndError):
    """A limit that was set for this client."""

    status = -5


class OverloadedError(AttndError):
    """Queue, buffers, sessions or sequences are full, here or in the daemon."""

    status = -6


class DeadlineError(AttndError):
    """The daemon could not begin in time; nothing was done."""

    status = -7


class StaleEpochError(AttndError):
    """Another worker adopted the sequence: stop using it."""

    status = -8


class UnauthenticatedError(AttndError):
    status = -9


class UnsupportedError(AttndError, NotImplementedError):
    """The daemon or its backend cannot do it; the message names what."""

    status = -10


class DrainingError(AttndError):
    """The daemon is about to stop and takes nothing new."""

    status = -11


class DeviceLostError(AttndError):
    status = -12


class InternalError(AttndError):
    """A bug in the daemon; also any status this package does not know."""

    status = -13


class OutOfMemoryError(AttndError, MemoryError):
    """Host memory, or KV memory for a new pool."""

    status = -14


class ProtocolError(AttndError):
    """One side sent what the other could not read."""

    status = -15


class TimedOutError(AttndError, TimeoutError):
    """No answer came within the call's timeout."""

    status = -16


class ConnectionLostError(AttndError, ConnectionError):
    """There was no connection at the deadline, or the client was closed."""

    status = -17


class FileError(AttndError, OSError):
    """A sequence's file could not be read or written; the message names it and says why."""

    status = -18


class FencedError(AttndError):
    """The daemon serves no appends until its operator asks for it (`engine.fence`)."""

    status = -19


class NoWeightsError(AttndError):
    """The daemon has not all weights of the layer, and the pool was given none (`Pool.weights()`)."""

    status = -21


_CLASSES = {c.status: c for c in (*AttndError.__subclasses__(), MovedError)}
_GONE = {1: SessionGoneError, 2: PoolGoneError, 3: SequenceGoneError}  # enum attn_gone


def error_of(status: int, message: str, retry_after_us: int = 0, gone: int = 0) -> AttndError:
    """The exception for a status; one that is not known here is an InternalError with its number."""
    cls: type[AttndError] = _CLASSES.get(status, InternalError)
    if status == NotFoundError.status:
        cls = _GONE.get(gone, NotFoundError)
    return cls(message, retry_after_us / 1e6 if retry_after_us else None, status)


def last_gone(status: int) -> int:
    """What is gone, after a call of this thread that failed with status."""
    return library().attn_last_error_gone() if status == NotFoundError.status else 0


def check(status: int) -> None:
    """Raises what the calling thread's latest failed call left, if status says that it failed."""
    if status != 0:
        e = library().attn_last_error().contents
        message = e.message.decode("utf-8", "replace")
        raise error_of(status, message, e.retry_after_us, last_gone(status))
