"""A connection to a daemon."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _lib
from ._handle import (
    U32_MAX,
    U64_MAX,
    Closing,
    Guard,
    NotPicklable,
    WaitTimes,
    interruptible,
    text,
    timeout_us,
    waits_for_signals,
    whole,
)
from .errors import InvalidArgumentError, OutOfMemoryError, check
from .lane import Lane, open_lane
from .pool import Pool, Sequence
from .spec import PoolSpec, check_array_dtype, dtype_number, to_c


class ClientInfo(NamedTuple):
    """What the daemon said at connect; fixed for the session, except boot_id.

    session    give it to connect(session=...) to go on with this session elsewhere
    lease      seconds of silence after which the session's sequences are freed
    max_sequences  of all clients together; 0: the daemon does not say
    boot_id    of the daemon's process when this was read: changes when it restarts
    """

    protocol_version: int
    session: int
    lease: float
    max_message_bytes: int
    max_step_items: int
    max_step_tokens: int
    max_seq_tokens: int
    max_sequences: int
    server_version: str
    backend: str
    boot_id: int


class Place(NamedTuple):
    """Where a sequence is.

    url    of its daemon, as the one who moved it connected to that; "": it is here
    id     there
    epoch  there: of a sequence here now, else at the end of the move
    """

    url: str
    id: int
    epoch: int


class ClientCounters(NamedTuple):
    """What a client did so far.

    n_in_flight  requests without an answer yet
    n_sent       requests, repeats included
    n_resent     after a lost connection
    n_retried    after a retryable status
    n_timed_out  requests that got no answer in time
    n_stray      answers to requests that no longer waited
    """

    n_in_flight: int
    n_sent: int
    n_resent: int
    n_retried: int
    n_timed_out: int
    n_stray: int


def default_url() -> str:
    """Where a daemon on this host is if nobody says otherwise: $ATTND_ENDPOINT; else, if not root,
    ipc://$XDG_RUNTIME_DIR/attnd.sock where that exists; else ipc:///run/attnd/attnd.sock."""
    return str(_lib.library().attn_default_url().decode())


def connect(
    url: str | None = None,
    *,
    timeout: float = 10.0,
    connect_timeout: float | None = None,
    max_retries: int = 0,
    session: int = 0,
    name: str | None = None,
    token_file: str | None = None,
    ca_file: str | None = None,
    cert_file: str | None = None,
    cert_key_file: str | None = None,
) -> Client:
    """Connects to a daemon and opens or resumes a session. The daemon may come up meanwhile.

    url              ipc://PATH, tcp://HOST:PORT, tls+tcp://HOST:PORT, or shm://PATH (this host,
                     through shared memory); None: default_url(). cluster+REGISTRY: one of many
                     daemons for each sequence, a ClusterClient of the package attnd-cluster
    timeout          seconds, of calls that name none
    connect_timeout  seconds, of this call; None: timeout
    max_retries      how often a request that was answered with a retryable status is repeated
    session          a session to go on with (ClientInfo.session); 0: a new one
    name             for the daemon's logs; None: the process's name
    token_file       a file whose first line says which tenant this is; None: $ATTND_KEY_FILE
    ca_file          of tls+tcp://: CAs of the daemon's certificate; None: $ATTND_CA_FILE, else the
                     system's
    cert_file, cert_key_file  a certificate of the worker's own, where the daemon wants one; None:
                     $ATTND_TLS_CERT_FILE, $ATTND_TLS_CERT_KEY_FILE

    Raises ConnectionLostError, TimedOutError, InvalidArgumentError (url), NotFoundError (session),
    LibraryNotFound.
    """
    if isinstance(url, str) and url.startswith("cluster+"):
        return _connect_cluster(
            url,
            timeout=timeout,
            connect_timeout=connect_timeout,
            max_retries=max_retries,
            name=name,
            token_file=token_file,
            ca_file=ca_file,
            cert_file=cert_file,
            cert_key_file=cert_key_file,
        )
    lib = _lib.library()
    if url is None:
        url = default_url()
    options = _lib.ClientOptions(
        struct_size=ctypes.sizeof(_lib.ClientOptions),
        max_retries=whole("max_retries", max_retries),
        timeout_us=timeout_us(timeout),
        resume_session=whole("session", session, U64_MAX),
        client_name=text("name", name) if name is not None else None,
        token_file=text("token_file", token_file) if token_file is not None else None,
        ca_file=text("ca_file", ca_file) if ca_file is not None else None,
        cert_file=text("cert_file", cert_file) if cert_file is not None else None,
        cert_key_file=text("cert_key_file", cert_key_file) if cert_key_file is not None else None,
    )
    url_text, wait_us = text("url", url), timeout_us(connect_timeout)

    def open_client() -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        check(lib.attn_client_open(url_text, ctypes.byref(options), wait_us, ctypes.byref(handle)))
        return handle

    handle = interruptible(open_client, lib.attn_client_close)
    return Client(handle, url)


def _connect_cluster(url: str, **options: Any) -> Any:
    try:
        from attnd_cluster import connect as connect_cluster
    except ImportError as e:
        raise InvalidArgumentError(
            f"{url} needs the package attnd-cluster ({e}): pip install clients/cluster"
        ) from None
    return connect_cluster(url, **options)


def _no_room(e: OutOfMemoryError) -> OutOfMemoryError:
    """Of KV memory for a pool: waiting does not help."""
    error = OutOfMemoryError(
        f"{e.message}; pools keep theirs while a session has them", e.retry_after
    )
    error._is_retryable = False
    return error


class Client(Closing, NotPicklable):
    """A connection and its session, made by connect(). Use it as a context manager or close() it.

    Every method may be called from any thread, several at once; the interpreter lock is free while
    they wait. Ctrl-C ends every call that waits, also of its pools and sequences; what was asked for
    may still be done. After os.fork() the child may close() what it inherited, and connect() anew.
    """

    def __init__(self, handle: ctypes.c_void_p, url: str):
        self._lib = _lib.library()
        self._handle = handle
        self._guard = Guard(f"client of {url}")
        self._lanes: set[Lane] = set()
        self._pools: set[Pool] = set()
        self.url = url
        self.info = self._read_info()

    def _read_info(self) -> ClientInfo:
        info = _lib.ClientInfo(struct_size=ctypes.sizeof(_lib.ClientInfo))
        check(self._lib.attn_client_info(self._handle, ctypes.byref(info)))
        return ClientInfo(
            protocol_version=info.protocol_version,
            session=info.session,
            lease=info.lease_us / 1e6,
            max_message_bytes=info.max_message_bytes,
            max_step_items=info.max_step_items,
            max_step_tokens=info.max_step_tokens,
            max_seq_tokens=info.max_seq_tokens,
            max_sequences=info.max_sequences,
            server_version=info.server_version.decode(),
            backend=info.backend.decode(),
            boot_id=info.boot_id,
        )

    def reopen(self, *, timeout: float | None = None) -> None:
        """A new session on this client, after SessionGoneError: the daemon was restarted.

        info has the new session. Pools and sequences of the old one are gone: create_pool() and
        open() make them anew.
        """
        us = timeout_us(timeout)

        def reopen() -> None:
            check(self._lib.attn_client_reopen(self._handle, us))
            self.info = self._read_info()

        interruptible(reopen, guard=self._guard)

    def create_pool(
        self,
        spec: PoolSpec,
        *,
        array_dtype: str | None = None,
        wire_dtype: str | None = None,
        timeout: float | None = None,
    ) -> Pool:
        """Makes a pool, or finds the one of this name if its spec is the same.

        One that has only another n_blocks is made anew, if nobody has it and no sequence is in it.

        array_dtype is of the arrays in steps, None: the spec's q_dtype. With "f32" and a q_dtype of
        "bf16" a worker computes in f32, and half the bytes travel and are cached: elements are
        rounded to the nearest bf16 on their way, by 2^-8 of themselves at most.

        wire_dtype is of q, k and v on their way, None: the spec's q_dtype. With "fp8_e4m3" and a
        q_dtype of "bf16" they travel as codes, in 0.52 of the bytes: an element is off by 2^-4 of
        itself at most (attn_pool_set_wire_dtype). Not over shm://, which raises UnsupportedError.

        Raises AlreadyExistsError (the name is taken by another spec), UnsupportedError (the backend
        cannot compute this geometry), OutOfMemoryError (KV memory), InvalidArgumentError.
        """
        c_spec, keep = to_c(spec)
        us = timeout_us(timeout)
        check_array_dtype(array_dtype, spec.q_dtype)
        wire = dtype_number(wire_dtype, "wire_dtype") if wire_dtype else 0

        def create() -> Pool:
            handle = ctypes.c_void_p()
            try:
                check(
                    self._lib.attn_pool_create(
                        self._handle, ctypes.byref(c_spec), us, ctypes.byref(handle)
                    )
                )
            except OutOfMemoryError as e:
                raise _no_room(e) from None
            pool = self._add(handle, array_dtype)
            try:
                check(self._lib.attn_pool_set_wire_dtype(handle, wire))
            except BaseException:
                pool.close()
                raise
            return pool

        pool = interruptible(create, Pool.close, self._guard)
        del keep
        return pool

    def open_lane(
        self,
        url: str | None = None,
        *,
        in_bytes: int = 0,
        out_bytes: int = 0,
        wait: float | None = None,
    ) -> Lane:
        """A lane to the daemon, for layers without messages; close it before the client.

        url        gpu://PATH; None: where the daemon says
        in_bytes, out_bytes  of one layer's q, k and v, and of its output, at most; 0: 16 MiB
        wait       seconds that a layer waits for the daemon; None: the client's timeout
        The GPU is the one that is current on this thread. Raises UnsupportedError, which says what
        is missing (the same host, the same GPU, MPS), ConnectionLostError, OverQuotaError.
        """
        return open_lane(self, url, in_bytes, out_bytes, wait)

    def pool(self, name: str, *, timeout: float | None = None) -> Pool:
        """Finds a pool by name. Raises NotFoundError."""
        name_text, us = text("name", name), timeout_us(timeout)

        def describe() -> Pool:
            handle = ctypes.c_void_p()
            check(self._lib.attn_pool_describe(self._handle, name_text, us, ctypes.byref(handle)))
            return self._add(handle)

        return interruptible(describe, Pool.close, self._guard)

    def _add(self, handle: ctypes.c_void_p, array_dtype: str | None = None) -> Pool:
        pool = Pool(self, handle, array_dtype)
        self._pools.add(pool)
        return pool

    def pin_memory(self) -> None:
        """Page-locks the memory of messages, for copies of a GPU (attn_client_pin).

        Over shm:// what is shared with the daemon, over sockets buffers of large messages; through
        the GPU that is current on this thread. Raises UnsupportedError, which says what is missing.
        """
        with self._guard:
            check(self._lib.attn_client_pin(self._handle))

    def ping(self, *, timeout: float | None = None) -> float:
        """Seconds of one round trip, which also renews the session's lease."""
        us = timeout_us(timeout)

        def ping() -> float:
            ns = ctypes.c_uint64()
            check(self._lib.attn_client_ping(self._handle, us, ctypes.byref(ns)))
            return ns.value / 1e9

        return interruptible(ping, guard=self._guard)

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The daemon's counters."""
        us = timeout_us(timeout)
        return self._read_json(
            lambda out: self._lib.attn_client_stats(self._handle, us, ctypes.byref(out))
        )

    def inspect(
        self, topic: str, after: int = 0, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """A list for operators, on a daemon's admin socket: sequences, sessions, pools, ...

        Begins behind `after`; where `next` is in it and not 0, the list goes on there. Topics are
        those of attn_client_inspect. Raises UnauthenticatedError, UnsupportedError (the topic).
        """
        name, behind, us = text("topic", topic), whole("after", after, U64_MAX), timeout_us(timeout)
        return self._read_json(
            lambda out: self._lib.attn_client_inspect(
                self._handle, name, behind, us, ctypes.byref(out)
            )
        )

    def kill_sequence(
        self, seq_id: int, tenant: str | None = None, *, timeout: float | None = None
    ) -> None:
        """For operators: frees a sequence, whoever has it; who did gets SequenceGoneError.

        tenant: whose it is, where there are tenants; None: the operator's own. Raises NotFoundError.
        """
        seq_id, us = whole("seq_id", seq_id, U64_MAX), timeout_us(timeout)
        whose = text("tenant", tenant) if tenant is not None else None
        interruptible(
            lambda: check(self._lib.attn_client_kill_seq(self._handle, whose, seq_id, us)),
            guard=self._guard,
        )

    def reload(self, *, timeout: float | None = None) -> dict[str, Any]:
        """For operators: has the daemon read its settings again; says how many changed."""
        us = timeout_us(timeout)
        return self._read_json(
            lambda out: self._lib.attn_client_reload(self._handle, us, ctypes.byref(out))
        )

    def _read_json(self, ask: Callable[[ctypes.c_void_p], int]) -> dict[str, Any]:
        import json

        def read() -> bytes:
            json_text = ctypes.c_void_p()
            check(ask(json_text))
            try:
                return ctypes.string_at(json_text)
            finally:
                self._lib.attn_free(json_text)

        read_json: dict[str, Any] = json.loads(interruptible(read, guard=self._guard))
        return read_json

    def drain(self, hold: float = 0, *, timeout: float | None = None) -> None:
        """Asks the daemon to take no new sessions and sequences and to end when its work is done.
        For `hold` seconds open sequences keep it up, so that they can move to other daemons. For
        operators."""
        us, hold_us = timeout_us(timeout), round(hold * 1e6)
        if not 0 <= hold_us <= 24 * 3600 * 10**6:
            raise ValueError(f"hold is {hold}, it must be 0 to 86,400 seconds")
        interruptible(
            lambda: check(self._lib.attn_client_drain(self._handle, hold_us, us)), guard=self._guard
        )

    def retire(self, seq: int, tenant: str = "", *, timeout: float | None = None) -> None:
        """Raises the epoch of a sequence, so that all handles of it are stale; its session gets
        another by adopting it. For operators."""
        us, name = timeout_us(timeout), tenant.encode()
        interruptible(
            lambda: check(self._lib.attn_client_retire_seq(self._handle, name, seq, us)),
            guard=self._guard,
        )

    def fence(self, *, since: float | None = None, timeout: float | None = None) -> None:
        """Lets a daemon with engine.fence serve appends for that long from since on, a
        time.monotonic() of this host; by default from now on. For operators."""
        us = timeout_us(timeout)
        since_ns = 0 if since is None else whole("since", int(since * 1e9), U64_MAX)
        interruptible(
            lambda: check(self._lib.attn_client_fence(self._handle, since_ns, us)),
            guard=self._guard,
        )

    def move(self, seq_id: int, to: Pool, *, timeout: float | None = None) -> Sequence:
        """As Sequence.move(), of a sequence of any session that this client's tenant has."""
        seq_id, us = whole("seq_id", seq_id, U64_MAX), timeout_us(timeout)

        def move() -> Sequence:
            new = _lib.Seq()
            with to._inside():
                check(
                    self._lib.attn_seq_move(
                        self._handle, seq_id, to._handle, us, ctypes.byref(new), None
                    )
                )
            return Sequence(to, new)

        return interruptible(move, guard=self._guard)

    def locate(self, seq_id: int, epoch: int = 0, *, timeout: float | None = None) -> Place:
        """Where a sequence is, or where it went from here, which is known for a lease's time; epoch:
        of the handle that is asked for, 0: whichever had the id last. Raises NotFoundError."""
        seq_id, us = whole("seq_id", seq_id, U64_MAX), timeout_us(timeout)
        epoch = whole("epoch", epoch, U32_MAX)

        def locate() -> Place:
            p = _lib.Place()
            check(self._lib.attn_seq_locate(self._handle, seq_id, epoch, us, ctypes.byref(p)))
            return Place(p.url.decode(), p.id, p.epoch)

        return interruptible(locate, guard=self._guard)

    def note(self, seq_id: int, *, timeout: float | None = None) -> bytes:
        """What Sequence.set_note() left, of a sequence of any session that this client's tenant has;
        b"": nothing. Raises NotFoundError."""
        seq_id, us = whole("seq_id", seq_id, U64_MAX), timeout_us(timeout)

        def note() -> bytes:
            buffer, n = ctypes.create_string_buffer(_lib.NOTE_BYTES), ctypes.c_uint32()
            check(
                self._lib.attn_seq_note_get(self._handle, seq_id, us, buffer, ctypes.byref(n))
            )
            return buffer.raw[: n.value]

        return interruptible(note, guard=self._guard)

    def counters(self) -> ClientCounters:
        """What this client did so far."""
        c = _lib.ClientCounters(struct_size=ctypes.sizeof(_lib.ClientCounters))
        with self._guard:
            check(self._lib.attn_client_counters(self._handle, ctypes.byref(c)))
        return ClientCounters(
            c.n_in_flight, c.n_sent, c.n_resent, c.n_retried, c.n_timed_out, c.n_stray
        )

    def fileno(self) -> int:
        """For event loops: readable when poll() has something to do (attnd.aio uses this)."""
        with self._guard:
            fd: int = self._lib.attn_client_fd(self._handle)
        return fd

    def poll(self, timeout: float = 0) -> int:
        """Completes steps whose answers have come; waits up to `timeout` seconds for the first.

        Returns how many were completed. While steps are in flight an event loop calls this when
        fileno() is readable, and at least every 20 ms for deadlines and reconnects.
        """
        if not waits_for_signals():
            return self.poll_once(timeout)
        until, wait = time.monotonic() + timeout, WaitTimes()
        while True:
            left = until - time.monotonic()
            n = self.poll_once(min(max(left, 0), next(wait)))
            if n > 0 or left <= 0:
                return n

    def poll_once(self, timeout: float = 0) -> int:
        """As poll(), in one call of the library, which Ctrl-C does not end."""
        n = ctypes.c_uint32()
        us = timeout_us(timeout) if timeout else 0
        with self._guard:
            check(self._lib.attn_client_poll(self._handle, us, ctypes.byref(n)))
        return n.value

    @property
    def is_closed(self) -> bool:
        return self._guard.is_closed

    def give_up(self) -> None:
        """For who knows that the daemon will not answer any more: calls, steps and layers of lanes that
        wait for it end with ConnectionLostError, and so do all that come later. Nothing after close()."""
        try:
            with self._guard:
                self._lib.attn_client_give_up(self._handle)
        except InvalidArgumentError:  # it is closed
            pass

    def close(self) -> None:
        """Disconnects; steps in flight end with ConnectionLostError. Safe to call again.

        Waits for calls of other threads, which end by their timeouts. A session without sequences
        ends, and lets its pools go. Sequences that are open wait in the daemon, to be adopted, until
        the lease ends; so does a session that was resumed.
        """
        for lane in list(self._lanes):
            lane.close()
        if not self._guard.close(lambda: self._lib.attn_client_close(self._handle)):
            return
        for pool in list(self._pools):
            pool.close()

    def __del__(self) -> None:
        guard = getattr(self, "_guard", None)
        if guard is not None and not guard.is_closed and not guard.is_inherited:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self)
            self.close()

    def __repr__(self) -> str:
        return f"<attnd.Client {self.url}{' closed' if self.is_closed else ''}>"
