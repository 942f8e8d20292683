"""attnd for asyncio: the same names as the package's, with await.

    async with attnd.aio.connect("ipc:///run/attnd/attnd.sock") as client:
        pool = await client.create_pool(spec)
        async with await pool.open() as seq:
            result = await pool.step(0, [(seq, 0, 1)], q, k, v)

Each object here has the blocking one of the package below it, as `sync`. A method that is made by
_awaited() is the method of that object, with the same arguments, run in the loop's executor. Steps
use no thread: they are sent at once, and the event loop watches the client's descriptor. Several may
be in flight (asyncio.gather), so there is no step_start; lanes have no counterpart here.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from . import client as _sync
from . import pool as _pool
from ._handle import NotPicklable
from ._step import Item, Items, Prepared, Result
from .errors import AttndError, InvalidArgumentError, NoWeightsError
from .spec import PoolSpec

_MOST_SENT = 3  # weights of one step, as by attn_step()
_TICK = 0.02  # seconds: the library wants a poll this often while steps are in flight
_T = TypeVar("_T")
_R = TypeVar("_R")
if TYPE_CHECKING:  # in typing from Python 3.10 on
    from typing_extensions import Concatenate, ParamSpec

    _P = ParamSpec("_P")


async def _in_executor(call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, functools.partial(call, *args, **kwargs))


def _itself(_: Any, r: _T) -> _T:
    return r


def _awaited(
    method: Callable[Concatenate[Any, _P], _T], result: Callable[[Any, _T], _R]
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _R]]:
    """A coroutine method that runs a blocking one on self.sync, with its arguments and docstring.

    result(self, r) makes of r, which that one returned, what the coroutine returns.
    """

    @functools.wraps(method)
    async def awaited(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return result(self, await _in_executor(method, self.sync, *args, **kwargs))

    return awaited


def _pool_of(client: Client, sync: _pool.Pool) -> Pool:
    return Pool(client, sync)


def _sequence_of(pool: Pool, sync: _pool.Sequence) -> Sequence:
    return Sequence(pool, sync)


def _fork_of(seq: Sequence, sync: _pool.Sequence) -> Sequence:
    return Sequence(seq.pool, sync)


class _Closing(NotPicklable):
    """As the blocking object, entered with `async with`, it closes itself."""

    sync: Any  # narrowed by each class

    async def __aenter__(self: _T) -> _T:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await _in_executor(self.sync.__exit__, *exc)


class _Connecting:
    """What connect() returns: await it, or enter it with `async with`."""

    def __init__(self, url: str | None, options: dict[str, Any]):
        self._url = url
        self._options = options
        self._client: Client | None = None

    async def _connect(self) -> Client:
        return Client(await _in_executor(_sync.connect, self._url, **self._options))

    def __await__(self) -> Generator[Any, None, Client]:
        return self._connect().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._connect()
        return self._client

    async def __aexit__(self, *exc: object) -> None:
        assert self._client is not None
        await self._client.close()


def connect(url: str | None = None, **options: Any) -> _Connecting:
    """As attnd.connect(), to be awaited or entered with `async with`."""
    return _Connecting(url, options)


class Client(_Closing):
    """A connection of one event loop; `sync` is the attnd.Client below it."""

    sync: _sync.Client

    def __init__(self, sync: _sync.Client):
        self.sync = sync
        self.url = sync.url
        self._loop = asyncio.get_running_loop()
        self._n_in_flight = 0
        self._tick: asyncio.TimerHandle | None = None
        self._fd = sync.fileno()
        self._loop.add_reader(self._fd, self._poll)

    create_pool = _awaited(_sync.Client.create_pool, _pool_of)
    pool = _awaited(_sync.Client.pool, _pool_of)
    reopen = _awaited(_sync.Client.reopen, _itself)
    pin_memory = _awaited(_sync.Client.pin_memory, _itself)
    ping = _awaited(_sync.Client.ping, _itself)
    stats = _awaited(_sync.Client.stats, _itself)
    drain = _awaited(_sync.Client.drain, _itself)
    fence = _awaited(_sync.Client.fence, _itself)
    retire = _awaited(_sync.Client.retire, _itself)
    inspect = _awaited(_sync.Client.inspect, _itself)
    kill_sequence = _awaited(_sync.Client.kill_sequence, _itself)
    locate = _awaited(_sync.Client.locate, _itself)
    note = _awaited(_sync.Client.note, _itself)
    reload = _awaited(_sync.Client.reload, _itself)

    async def move(self, seq_id: int, to: Pool, *, timeout: float | None = None) -> Sequence:
        """As attnd.Client.move()."""
        return Sequence(to, await _in_executor(self.sync.move, seq_id, to.sync, timeout=timeout))

    @property
    def info(self) -> _sync.ClientInfo:
        return self.sync.info

    def counters(self) -> _sync.ClientCounters:
        return self.sync.counters()

    def give_up(self) -> None:
        self.sync.give_up()

    @property
    def is_closed(self) -> bool:
        return self.sync.is_closed

    async def close(self) -> None:
        """Disconnects; steps in flight end with ConnectionLostError. Safe to call again."""
        if self.is_closed:
            return
        self._loop.remove_reader(self._fd)
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        await _in_executor(self.sync.close)

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # ---- the loop's side of steps in flight

    def _poll(self) -> None:
        if not self.is_closed:
            self.sync.poll()

    def _on_tick(self) -> None:
        self._tick = None
        self._poll()
        self._arm()

    def _arm(self) -> None:
        if self._tick is None and self._n_in_flight > 0 and not self.is_closed:
            self._tick = self._loop.call_later(_TICK, self._on_tick)

    def _started(self) -> None:
        self._n_in_flight += 1
        self._arm()

    def _ended(self) -> None:
        self._n_in_flight -= 1


class Sequence(_Closing):
    """As attnd.Sequence."""

    sync: _pool.Sequence

    def __init__(self, pool: Pool, sync: _pool.Sequence):
        self.pool = pool
        self.sync = sync

    @property
    def id(self) -> int:
        return self.sync.id

    @property
    def epoch(self) -> int:
        return self.sync.epoch

    @property
    def layer_len(self) -> tuple[int, ...]:
        return self.sync.layer_len

    @property
    def n_cached(self) -> int:
        return self.sync.n_cached

    @property
    def is_closed(self) -> bool:
        return self.sync.is_closed

    fork = _awaited(_pool.Sequence.fork, _fork_of)
    set_tokens = _awaited(_pool.Sequence.set_tokens, _itself)
    set_note = _awaited(_pool.Sequence.set_note, _itself)
    retain = _awaited(_pool.Sequence.retain, _itself)
    export = _awaited(_pool.Sequence.export, _itself)
    truncate = _awaited(_pool.Sequence.truncate, _itself)
    commit = _awaited(_pool.Sequence.commit, _itself)
    adopt = _awaited(_pool.Sequence.adopt, _itself)
    close = _awaited(_pool.Sequence.close, _itself)

    async def move(self, to: Pool, *, timeout: float | None = None) -> Sequence:
        """As attnd.Sequence.move()."""
        return Sequence(to, await _in_executor(self.sync.move, to.sync, timeout=timeout))

    def __repr__(self) -> str:
        return f"<attnd.aio.Sequence {self.id} epoch {self.epoch}>"


class Calls(NotPicklable):
    """As attnd.Calls: requests are added at once, run() is awaited."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.sync = pool.sync.calls()

    def __len__(self) -> int:
        return len(self.sync)

    def open(
        self, seq_id: int | None = None, *, tokens: Iterable[int] = (), adapter: int = 0
    ) -> None:
        self.sync.open(seq_id, tokens=tokens, adapter=adapter)

    def adopt(self, seq_id: int) -> None:
        self.sync.adopt(seq_id)

    def fork(self, seq: Sequence, new_id: int | None = None, n_tokens: int | None = None) -> None:
        self.sync.fork(seq.sync, new_id, n_tokens)

    def set_tokens(self, seq: Sequence, pos: int, tokens: Iterable[int]) -> None:
        self.sync.set_tokens(seq.sync, pos, tokens)

    def truncate(self, seq: Sequence, n_tokens: int) -> None:
        self.sync.truncate(seq.sync, n_tokens)

    def commit(self, seq: Sequence, nodes: Iterable[int]) -> None:
        self.sync.commit(seq.sync, nodes)

    def close(self, seq: Sequence) -> None:
        self.sync.close(seq.sync)

    def probe(self, tokens: Iterable[int], *, adapter: int = 0) -> None:
        self.sync.probe(tokens, adapter=adapter)

    async def run(self, *, timeout: float | None = None) -> list[Any]:
        """As attnd.Calls.run(); one that was truncated or committed is an equal one."""
        results = await _in_executor(self.sync.run, timeout=timeout)
        return [
            Sequence(self.pool, r) if isinstance(r, _pool.Sequence) else r for r in results
        ]


class Pool(_Closing):
    """As attnd.Pool."""

    sync: _pool.Pool

    def __init__(self, client: Client, sync: _pool.Pool):
        self.client = client
        self.sync = sync

    @property
    def spec(self) -> PoolSpec:
        return self.sync.spec

    @property
    def n_free_blocks(self) -> int:
        return self.sync.n_free_blocks

    open = _awaited(_pool.Pool.open, _sequence_of)
    adopt = _awaited(_pool.Pool.adopt, _sequence_of)
    import_sequence = _awaited(_pool.Pool.import_sequence, _sequence_of)
    probe = _awaited(_pool.Pool.probe, _itself)
    reserve = _awaited(_pool.Pool.reserve, _itself)
    resize = _awaited(_pool.Pool.resize, _itself)
    close = _awaited(_pool.Pool.close, _itself)
    weights = _awaited(_pool.Pool.weights, _itself)

    def calls(self) -> Calls:
        """Several requests on sequences to be sent in one message: see Calls."""
        return Calls(self)

    def items(self, items: Iterable[Item | tuple[Sequence, int, int]]) -> Items:
        """Makes items ready once, to be given to step() for every layer."""
        return Items(items)  # type: ignore[arg-type]  # an id and an epoch are all it reads

    async def step(
        self,
        layer: int,
        items: Items | Iterable[Item | tuple[Sequence, int, int]],
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        parents: Iterable[int] | None = None,
        is_full: bool = False,
        indices: Any = None,
        index_tokens: int = 1,
        choose_blocks: int = 0,
        parts: Iterable[tuple[int, int]] | None = None,
        timeout: float | None = None,
    ) -> Result:
        """As attnd.Pool.step(). Cancelling the wait leaves the arrays borrowed until the step ends."""
        if not isinstance(items, Items):
            items = self.items(items)
        prepared = Prepared(
            self.sync,
            layer,
            items,
            q,
            k,
            v,
            out,
            lse,
            timeout,
            parents,
            is_full,
            indices,
            index_tokens,
            choose_blocks,
            parts,
        )
        for _ in range(_MOST_SENT):
            try:
                return await self._run(prepared)
            except NoWeightsError:
                if layer not in self.sync._weights:
                    raise
            await _in_executor(self.sync._send_weights, layer, timeout=timeout)
        return await self._run(prepared)

    async def _run(self, prepared: Prepared) -> Result:
        loop = asyncio.get_running_loop()
        if loop is not self.client._loop:
            raise InvalidArgumentError("the client belongs to another event loop")
        future: asyncio.Future[Result] = loop.create_future()

        def settle(outcome: Result | AttndError) -> None:
            self.client._ended()
            if future.cancelled():
                return
            if isinstance(outcome, AttndError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def done(r: Any) -> None:  # on whichever thread reads; r is gone when this returns
            try:
                outcome: Result | AttndError = prepared.finish(r)
            except AttndError as e:
                outcome = e
            loop.call_soon_threadsafe(settle, outcome)

        self.sync._step_start_cb(prepared, done)
        self.client._started()
        return await future

    def __repr__(self) -> str:
        return f"<attnd.aio.Pool {self.spec.name!r}>"
