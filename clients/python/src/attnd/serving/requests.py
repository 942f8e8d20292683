"""This worker's requests in attnd: a pool, and one sequence for each request that has tokens there.

Knows no engine: a request is a name, a step's rows say which tokens of which request the model
computes now. What attnd turns out not to have, because its daemon began anew or a pool that others
use, too, is full, is given back as rows that failed: the engine computes those tokens again.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Optional

import attnd

_log = logging.getLogger("attnd.serving")
_WARN_S = 60.0  # between two warnings
FULL_WAIT_S = 600.0  # for blocks or sequences that other engines have
_RETRY_S = 0.01
_OPEN_WAIT_S = 0.2  # for a sequence, before the engine does without
_NO_SEQUENCE = (attnd.OverloadedError, attnd.OverQuotaError)  # of what opens one
_LOST = (attnd.NotFoundError.status, attnd.StaleEpochError.status)


class Opened(NamedTuple):
    """A request that begins: its first tokens, as far as the cache has been found to have them.

    number    of its sequence, by which another engine can take it over; None: any
    is_there  a sequence of that number has the n_shared tokens, and is taken over
    """

    request: str
    tokens: Sequence[int]  # of what is shared, and one more; empty: nothing is
    n_shared: int
    adapter: int
    number: Optional[int] = None
    is_there: bool = False


class Told(NamedTuple):
    """All ids so far of a request whose blocks may be shared.

    is_exact  ids are known to attnd before their tokens are computed, instead of with their block:
              they have those that this step computes
    """

    request: str
    tokens: Sequence[int]
    is_exact: bool = False


class Row(NamedTuple):
    """One request's tokens of a step: n tokens from pos on, which are rows [start, start + n) of it.

    The engine can be told that a row failed if it has computed tokens of the request before.

    is_sampled  the engine takes a token from the row's output
    """

    request: str
    pos: int
    n: int
    start: int
    is_sampled: bool

    @property
    def may_fail(self) -> bool:
        return self.pos > 0


class _Asked(NamedTuple):
    """What is asked of the daemon: adds itself to the calls of a message, and takes what it is given.

    instead  asked in its place where the number of a new sequence is taken
    opens    the request that gets a new sequence by it
    """

    add: Callable[[attnd.Calls], None]
    take: Optional[Callable[[Any], None]] = None
    instead: Optional[_Asked] = None
    opens: Optional[str] = None


class Held:
    """A request's sequence: its length, and of how many tokens attnd knows the ids.

    ids  those to be known before the next step; None: they are told by blocks
    """

    __slots__ = ("seq", "n_tokens", "n_told", "ids", "is_behind")

    def __init__(self, seq: attnd.Sequence, n_tokens: int = 0, n_told: int = 0):
        self.seq, self.n_tokens, self.n_told = seq, n_tokens, n_told
        self.ids: Sequence[int] | None = None
        self.is_behind = False  # the engine counts on more tokens than there are, unknowingly


class Requests:
    """The requests of one worker.

    make_pool   finds or makes the pool on a client whose session is new
    n_reserved  blocks of the pool that are set aside for this worker; 0: none, it takes what is free
    is_alone    no other worker computes parts of the same layers: rows can fail unseen by others
    gives_up    requests may be given up for others, as the engine can compute any of them again
    failed      request -> tokens that attnd still has of it, for the engine to be told

    Raises OutOfBlocksError: others have reserved or use them, also after a lease, by which what a
    worker has reserved that died is given back.
    """

    def __init__(
        self,
        client: attnd.Client,
        make_pool: Callable[[attnd.Client], attnd.Pool],
        n_reserved: int = 0,
        is_alone: bool = True,
        gives_up: bool = True,
    ):
        self.client, self._make_pool, self._n_reserved = client, make_pool, n_reserved
        self.is_alone, self.gives_up = is_alone, gives_up
        self.pool = self._ready_pool()
        self.held: dict[str, Held] = {}
        self.failed: dict[str, int] = {}
        self.n_restarts = 0
        self._opened: dict[str, Opened] = {}  # those that have begun, to be opened without tokens
        self._warned = self._said_lost = -_WARN_S

    def _ready_pool(self) -> attnd.Pool:
        pool = self._make_pool(self.client)
        until = time.monotonic() + 2 * self.client.info.lease
        while self._n_reserved > 0:
            try:
                pool.reserve(self._n_reserved)
                break
            except attnd.OutOfBlocksError:
                if time.monotonic() > until:
                    raise
                time.sleep(_RETRY_S)
        return pool

    # ---- between steps

    def begin(
        self, ended: Iterable[str], opened: Iterable[Opened], told: Iterable[Told]
    ) -> None:
        """What happened since the last step, in one message: ends, beginnings, and ids. A request for
        which the daemon has no sequence has none: its row fails, or opens one."""
        asked: list[_Asked] = []
        for t in told:  # first: of those that end, too, so that others find their blocks
            self._tell(asked, t)
        for name in ended:
            self._end(asked, name)
            self._opened.pop(name, None)
        for o in opened:
            self._end(asked, o.request)
            self._opened[o.request] = o._replace(tokens=(), n_shared=0, is_there=False)
            asked.append(self._opening(o))
        self._run(asked)
        for t in told:
            if t.is_exact and t.request in self.held:
                self.held[t.request].ids = t.tokens

    def _opening(self, o: Opened) -> _Asked:
        number = o.number
        if o.is_there and number is not None:
            return _Asked(lambda calls: calls.adopt(number), lambda seq: self._take_over(o, seq))
        return _Asked(
            lambda calls: calls.open(number, tokens=o.tokens, adapter=o.adapter),
            lambda seq: self._take(o, seq),
            None if number is None else self._opening(o._replace(number=None)),
            o.request,
        )

    def _tell(self, asked: list[_Asked], t: Told) -> None:
        h, size = self.held.get(t.request), self.pool.spec.block_tokens
        if h is None or t.is_exact:
            return
        first, past = h.n_told, min(len(t.tokens), h.n_tokens) // size * size
        if past > first:
            ids = t.tokens[first:past]
            asked.append(_Asked(lambda calls: calls.set_tokens(h.seq, first, ids)))
            h.n_told = past

    def _end(self, asked: list[_Asked], name: str) -> None:
        h = self.held.pop(name, None)
        if h is not None:
            asked.append(_Asked(lambda calls: calls.close(h.seq)))

    def _take(self, o: Opened, seq: attnd.Sequence) -> None:
        """A new sequence; where less was found than the engine counts on, the row will fail."""
        n = min(seq.n_cached, o.n_shared)
        h = self.held[o.request] = Held(seq, n, n)
        h.is_behind = n < o.n_shared

    def _take_over(self, o: Opened, seq: attnd.Sequence) -> None:
        """Another engine's sequence; where it is not what it was found to be, the row will fail."""
        if set(seq.layer_len) == {o.n_shared}:
            self.held[o.request] = Held(seq, o.n_shared, o.n_shared)
        else:
            self.end(seq)

    def _run(self, asked: list[_Asked]) -> dict[str, attnd.AttndError]:
        """Carries out what is asked, in few messages; what the daemon is too busy for is asked again.

        Where a sequence or the session is gone, or another's, later rows make up for it. Gives the
        requests for which there is no sequence (cache.max_sequences, or the tenant's quota), and why.
        """
        began = time.monotonic()
        without: dict[str, attnd.AttndError] = {}
        while asked:
            calls = self.pool.calls()
            for one in asked:
                one.add(calls)
            try:
                results = calls.run()
            except attnd.NotFoundError:
                self.restart()
                return {}
            again = []
            for one, result in zip(asked, results):
                if isinstance(result, (attnd.NotFoundError, attnd.StaleEpochError)):
                    continue
                if isinstance(result, attnd.AlreadyExistsError) and one.instead is not None:
                    again.append(one.instead)
                elif isinstance(result, attnd.AttndError):
                    no_sequence = one.opens is not None and isinstance(result, _NO_SEQUENCE)
                    waited = time.monotonic() - began
                    if no_sequence and waited > _OPEN_WAIT_S:
                        without[one.opens] = result
                    elif not (no_sequence or result.is_retryable) or waited > FULL_WAIT_S:
                        raise result
                    else:
                        again.append(one)
                elif one.take is not None:
                    one.take(result)
            asked = again
            if again:
                time.sleep(_RETRY_S)
        return without

    # ---- a step

    def step(self, rows: list[Row]) -> Step:
        return Step(self, self._ready(rows))

    def _ready(self, rows: list[Row]) -> list[Row]:
        """Makes the sequences of a step ready; returns the rows that can be computed.

        Raises RuntimeError for a position that leaves a gap: nothing is ever computed over tokens
        that are not there.
        """
        until = time.monotonic() + FULL_WAIT_S
        while True:
            kept, asked = self._kept(rows)
            n_restarts = self.n_restarts
            without = self._run(asked)
            if not without:
                self._run(self._told_exactly(kept))
            if self.n_restarts != n_restarts:
                continue  # all that rows read is gone
            if not without:
                break
            rows = self._without_sequences(kept, without, until)
        for r in kept:
            if r.request not in self.held:
                raise RuntimeError(f"request {r.request}: attnd has neither its pool nor a new one")
        for r in kept:
            self.held[r.request].is_behind = False
        return kept

    def _kept(self, rows: list[Row]) -> tuple[list[Row], list[_Asked]]:
        """The rows whose tokens can follow on what is there, and what is asked for them; others fail."""
        asked: list[_Asked] = []
        kept = []
        for r in rows:
            h = self.held.get(r.request)
            if h is None and r.pos == 0:
                new = Opened(r.request, (), 0, 0)
                asked.append(self._opening(self._opened.get(r.request, new)))
            elif h is None or (r.pos > h.n_tokens and h.is_behind):
                self.fail(r)
                continue
            elif r.pos > h.n_tokens:
                raise RuntimeError(
                    f"request {r.request}: position {r.pos}, attnd has {h.n_tokens} tokens"
                )
            elif r.pos < h.n_tokens:  # drafts that were rejected, or tokens computed again
                asked.append(_Asked(lambda calls, h=h, r=r: calls.truncate(h.seq, r.pos)))
                h.n_tokens, h.n_told = r.pos, min(h.n_told, r.pos)
            kept.append(r)
        return kept, asked

    def _told_exactly(self, rows: list[Row]) -> list[_Asked]:
        asked = []
        for r in rows:
            h = self.held.get(r.request)
            if h is not None and h.ids is not None and len(h.ids) > h.n_told:
                first, ids = h.n_told, h.ids[h.n_told :]
                asked.append(_Asked(lambda c, h=h, at=first, ids=ids: c.set_tokens(h.seq, at, ids)))
                h.n_told = len(h.ids)
        return asked

    def fail(self, row: Row) -> None:
        """The row is not computed: the engine has to go back to what attnd has."""
        h = self.held.get(row.request)
        if row.may_fail:
            self.failed[row.request] = 0 if h is None else min(h.n_tokens, row.pos - 1)
        elif h is not None:
            h.is_behind = True

    def _without_blocks(self, rows: list[Row], e: attnd.OutOfBlocksError) -> list[Row]:
        """The rows to try again, after the first layer had no blocks for some.

        Those that can fail do. Where none can, a request of this worker is given up for them, or
        else others have the blocks, and it waits.
        """
        status = e.result.item_status if e.result is not None else [e.status] * len(rows)
        short = [r for r, st in zip(rows, status) if st == e.status]
        for r in short:
            if r.may_fail:
                self.fail(r)
        left = [r for r in rows if r.request not in self.failed]
        if len(left) == len(rows) and not self._give_up_one(rows):
            time.sleep(_RETRY_S)
        return [r for r in left if r.request not in self.failed]

    def _without_sequences(
        self, rows: list[Row], without: dict[str, attnd.AttndError], until: float
    ) -> list[Row]:
        """The rows to try again, after some that begin with their request got no sequence.

        Those that are not sampled are left out, and fail later. For the others a request of this
        worker is given up. Where none can be, others have the sequences: it gives back those of the
        step, which have no tokens yet, so that no two wait for each other, and waits.

        Raises OverloadedError or OverQuotaError where an engine that gives none up has waited until
        then, with requests that others may wait for.
        """
        self._warn(without)
        left = [
            r for r in rows if r.request not in without or r.is_sampled or not self.is_alone
        ]
        wanted = [r for r in left if r.request in without]
        if wanted and not self._give_up_one(left):
            for r in left:
                if r.pos == 0 and r.request in self.held:
                    self.end(self.held.pop(r.request).seq)
            if self.held and time.monotonic() > until:
                raise without[wanted[0].request]
            time.sleep(random.uniform(_RETRY_S, 2 * _OPEN_WAIT_S))
        return [r for r in left if r.request not in self.failed]

    def _warn(self, without: dict[str, attnd.AttndError]) -> None:
        now = time.monotonic()
        if now - self._warned > _WARN_S:
            self._warned = now
            why = next(iter(without.values()))
            _log.warning("%d requests wait for a sequence: %s", len(without), why)

    def _without_lost(self, rows: list[Row], e: attnd.AttndError) -> list[Row]:
        """The rows to try again, after attnd turned out not to have the sequences of some any more
        (an operator has ended one, a damaged block was dropped, a card was lost).

        They fail; one that begins with its request is computed in a new sequence. Raises
        RuntimeError for one that can't be computed and can't fail.
        """
        self._drop_lost(rows, e)
        return self._ready(rows)

    def _drop_lost(self, rows: list[Row], e: attnd.AttndError) -> list[Row]:
        """The rows of a layer whose sequences attnd has lost, which are given up. A layer that failed as a
        whole does not say which: those that are still there are closed."""
        status = e.result.item_status if e.result is not None else [e.status] * len(rows)
        lost = [r for r, st in zip(rows, status) if st in _LOST]
        now = time.monotonic()
        if now - self._said_lost > _WARN_S:
            self._said_lost = now
            _log.warning("attnd has lost %d of %d sequences of a step: %s", len(lost), len(rows), e)
        for r in lost:
            h = self.held.pop(r.request, None)
            if h is not None:
                self.end(h.seq)
        return lost

    def _give_up_one(self, rows: list[Row]) -> bool:
        """Frees the blocks and the sequence of a request, which will be computed from its start: of
        the step's, else of one whose next row will fail."""
        if not self.gives_up:
            return False
        in_step = {r.request for r in rows}
        failed = [name for name in self.failed if name in self.held]
        for name in [r.request for r in rows if r.may_fail] + failed:
            self.failed[name] = 0
            self.end(self.held.pop(name).seq)
            return True
        for name in self.held:
            if name not in in_step:
                self.end(self.held.pop(name).seq)
                return True
        return False

    def end(self, seq: attnd.Sequence) -> None:
        """Closes a sequence that may be gone, or another's."""
        try:
            seq.close()
        except (attnd.NotFoundError, attnd.StaleEpochError):
            pass

    # ---- a daemon that began anew

    def restart(self) -> None:
        """The session is gone, and all sequences with it: a new one, and the pool in it."""
        self.held.clear()
        self.client.reopen()
        self.pool = self._ready_pool()
        self.n_restarts += 1

    def take_failed(self) -> dict[str, int]:
        failed, self.failed = self.failed, {}
        return failed

    def close(self) -> None:
        """Closes all sequences and the client."""
        self.end_all([h.seq for h in self.held.values()])
        self.held.clear()
        self.client.close()

    def end_all(self, seqs: Iterable[attnd.Sequence]) -> None:
        """Closes sequences of an engine that ends; those that can't be end with their session."""
        calls = self.pool.calls()
        for seq in seqs:
            calls.close(seq)
        try:
            calls.run(timeout=5)
        except attnd.AttndError:
            pass


class Step:
    """The rows of a step that are computed, layer by layer, in order.

    rows     those that are left: fewer after a layer that some had no room for. A list of its own
             whenever they change
    items    theirs
    is_lost  attnd has lost, between two layers, a row that can't fail: all layers are to be computed
             again, after again()
    """

    def __init__(self, requests: Requests, rows: list[Row]):
        self._requests, self.rows = requests, rows
        self._begun = rows
        self.items: attnd.Items | None = None
        self.is_lost = False

    def again(self) -> None:
        """Begins anew, with the rows that it began with and that have not failed. With several workers
        all do, if one has lost a row."""
        left = [r for r in self._begun if r.request not in self._requests.failed]
        self.rows, self.items, self.is_lost = self._requests._ready(left), None, False

    def layer(self, at: int, compute: Callable[[Step], None]) -> bool:
        """Has compute(self) run layer `at` for the rows that are left. False: none are.

        compute raises what Pool.step() raises; it may be called again for fewer rows.
        """
        if self.items is None:
            self._first(compute)
        elif self.rows:
            self._next(compute)
        if self.rows and at == self._requests.pool.spec.num_layers - 1:
            for r in self.rows:
                self._requests.held[r.request].n_tokens = r.pos + r.n
        return bool(self.rows)

    def _first(self, compute: Callable[[Step], None]) -> None:
        """The layer whose appends take the blocks of all layers."""
        requests, until = self._requests, time.monotonic() + FULL_WAIT_S
        while True:
            held = requests.held
            self.items = requests.pool.items(
                [(held[r.request].seq, r.pos, r.n) for r in self.rows]
            )
            if not self.rows:
                return
            try:
                return compute(self)
            except (attnd.SessionGoneError, attnd.PoolGoneError):
                requests.restart()
                self.rows = requests._ready(self.rows)
            except (attnd.NotFoundError, attnd.StaleEpochError) as e:
                self.rows = requests._without_lost(self.rows, e)
                if time.monotonic() > until:
                    raise
            except attnd.OutOfBlocksError as e:
                self.rows = requests._without_blocks(self.rows, e)
                if time.monotonic() > until:
                    raise

    def _next(self, compute: Callable[[Step], None]) -> None:
        """A layer behind the first: what is lost between two has to be computed again."""
        requests = self._requests
        while self.rows:
            try:
                return compute(self)
            except (attnd.SessionGoneError, attnd.PoolGoneError):
                requests.restart()
                self._lose(self.rows)
            except (attnd.NotFoundError, attnd.StaleEpochError) as e:
                self._lose(requests._drop_lost(self.rows, e))

    def _lose(self, lost: list[Row]) -> None:
        for r in lost:
            self._requests.fail(r)
            self.is_lost |= not r.may_fail
        held = self._requests.held
        self.rows = [r for r in self.rows if r not in lost]
        self.items = self._requests.pool.items(
            [(held[r.request].seq, r.pos, r.n) for r in self.rows]
        )
