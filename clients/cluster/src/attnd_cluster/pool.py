"""A pool of every daemon of a cluster, and steps of sequences wherever they are.

A step goes to each daemon that has some of its sequences, to all of them at once; rows that lie
together travel from and to the caller's arrays, others are copied. Items whose sequence was moved or
lost are repeated where it is then: an append names its position, so twice is as once.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Generator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import attnd
from attnd._handle import Closing, NotPicklable
from attnd._tensor import DTYPES, F32, empty
from attnd.pool import address_of_weights

from .hosts import Dtypes, Host, HostGone, beside
from .place import Candidate, home_of, homes, is_behind, order
from .sequence import ClusterSequence, random_id

if TYPE_CHECKING:
    from .shards import LongSequence
    from .calls import ClusterCalls
    from .client import ClusterClient

log = logging.getLogger("attnd.cluster")
_T = TypeVar("_T")
_PROBED = 4  # daemons that are asked what they have of a prompt at once
_PROBE_SECONDS = 0.5
_PAUSE_SECONDS = 0.05
_LEAST_SECONDS = 1e-3  # that a step has left, which has taken its time already
_ATTEMPTS = 5
_ELSEWHERE = (
    attnd.ConnectionLostError,
    attnd.TimedOutError,
    attnd.DrainingError,
    attnd.OverloadedError,
    attnd.OutOfMemoryError,
    attnd.OutOfBlocksError,
)
_FOUND_AGAIN = (
    attnd.NotFoundError.status,
    attnd.MovedError.status,
    attnd.StaleEpochError.status,
)
# or the fence ended while it waited, which is its deadline then
_FENCED = (attnd.FencedError.status, attnd.DeadlineError.status)


class _Part(NamedTuple):
    """The items of one daemon."""

    host: Host
    which: list[int]
    items: attnd.Items
    versions: list[int]  # of their sequences


class ClusterItems:
    """As attnd.Items; made by ClusterPool.items(). Where its sequences are is looked at with each step."""

    def __init__(self, items: Iterable[Any]):
        self.rows: list[tuple[Any, int, int]] = [(s, p, n) for s, p, n in items]
        self.n_items = len(self.rows)
        self.is_long = any(s.is_long for s, _, _ in self.rows)
        self.first: list[int] = []  # row of each item
        self.n_tokens = 0
        for _, _, n in self.rows:
            self.first.append(self.n_tokens)
            self.n_tokens += n
        self._parts: list[_Part] = []

    def parts(self) -> list[_Part]:
        versions = [s._version for s, _, _ in self.rows]  # of sequences that are on one daemon
        if self._parts and all(
            v == versions[i] for p in self._parts for i, v in zip(p.which, p.versions)
        ):
            return self._parts
        by_host: dict[Host, tuple[list[int], list[Any], list[int]]] = {}
        for i, (s, pos, n) in enumerate(self.rows):
            with s._lock:
                host, inner, version = s._host, s._inner, s._version
            which, items, of = by_host.setdefault(host, ([], [], []))
            which.append(i)
            items.append((inner, pos, n))
            of.append(version)
        self._parts = [
            _Part(host, which, attnd.Items(items), of)
            for host, (which, items, of) in by_host.items()
        ]
        return self._parts


class _Arrays:
    """What a step has a row of for each token, and the rows of some of its items.

    options  those of attnd.Pool.step() that are the same for all rows
    parts    attnd.Pool.step()'s, of each item
    """

    def __init__(
        self,
        out: Any,
        lse: Any,
        rows: dict[str, Any],
        options: dict[str, Any],
        parts: list[tuple[int, int]] | None = None,
    ):
        self.out, self.lse, self.rows, self.options, self.parts = out, lse, rows, options, parts

    def check(self, n: int) -> None:
        for name, x in {**self.rows, "out": self.out, "lse": self.lse}.items():
            shape = (len(x),) if isinstance(x, list) else tuple(getattr(x, "shape", ()))
            if shape and shape[0] != n:
                raise ValueError(f"{name} has {shape[0]} rows, the step has {n} tokens")

    def of(self, items: ClusterItems, which: list[int]) -> tuple[_Arrays, Any]:
        """Those rows, and which they are: a slice of these arrays, or a list, of copies."""
        spans = [(items.first[i], items.first[i] + items.rows[i][2]) for i in which]
        rows: Any
        if all(a[1] == b[0] for a, b in zip(spans, spans[1:])):
            rows = slice(spans[0][0], spans[-1][1])
        else:
            rows = [r for a, b in spans for r in range(a, b)]

        def of(x: Any) -> Any:
            if isinstance(x, list) and isinstance(rows, list):
                return [x[r] for r in rows]
            return None if x is None else x[rows]

        mine = {name: of(x) for name, x in self.rows.items()}
        parts = self.parts and [self.parts[i] for i in which]
        return _Arrays(of(self.out), of(self.lse), mine, self.options, parts), rows

    def take(self, part: _Arrays, rows: Any) -> None:
        if isinstance(rows, list):
            for mine, its in ((self.out, part.out), (self.lse, part.lse)):
                if mine is not None:
                    mine[rows] = its


SHARDS = b"attnd-shards\n"  # how the note of a first shard begins: the others follow, as JSON
Rounds = Generator[None, None, "attnd.AttndError | None"]
_Started = tuple["_Part", "_Arrays", Any, Any]


def together(*rounds: Rounds) -> list[attnd.AttndError | None]:
    """What each comes to. All have sent what they send before one of them waits."""
    results: list[attnd.AttndError | None] = [None] * len(rounds)
    going = dict(enumerate(rounds))
    while going:
        for i, r in list(going.items()):
            try:
                next(r)
            except StopIteration as end:
                results[i] = end.value
                del going[i]
    return results


class ClusterPool(Closing, NotPicklable):
    """As attnd.Pool. Made by ClusterClient.create_pool() and pool()."""

    def __init__(
        self,
        client: ClusterClient,
        spec: attnd.PoolSpec,
        asked: attnd.PoolSpec,
        dtypes: Dtypes = Dtypes(),
    ):
        self.client = client
        self.spec = spec  # as a daemon has it
        self._asked = asked
        self._dtypes = dtypes
        self._dtype = DTYPES[dtypes.array_dtype or spec.q_dtype]

    def at(
        self, host: Host, what: Callable[[attnd.Pool], _T], seconds: float | None = None
    ) -> _T:
        """what(pool) of this pool there, as Host.call(). Raises AttndError."""
        return host.ask(self._asked, self._dtypes, what, seconds)

    # ---- placement

    def candidates(
        self, tokens: list[int], adapter: int, avoided: Collection[str] = (), n_tokens: int = 0
    ) -> list[tuple[Candidate, Host]]:
        """The daemons that are asked, with their answers, the best first, the avoided ones last: the
        prompt's homes, or the emptiest where it has none or those are behind. n_tokens: that are to
        come, if more than are known. Raises AlreadyExistsError where all that answer have another
        pool of this name."""
        client, name, per_block = self.client, self.spec.name, self.spec.block_tokens
        members = {m.name: m for m in client.serving()}
        with client.lock:
            backlog = {n: client.backlog.of(n) for n in members}

        def emptiness(n: str) -> tuple[bool, float, float, str]:
            pool = (members[n].pools or {}).get(name)
            free = 1.0 if pool is None else pool.n_free_blocks / max(1, pool.n_blocks)
            return n in avoided, backlog[n], -free, n

        def probe(host: Host) -> attnd.Probe:
            return self.at(
                host,
                lambda pool: pool.probe(tokens, adapter=adapter, timeout=_PROBE_SECONDS),
                2 * _PROBE_SECONDS,  # which has to be connected first
            )

        def ask(names: list[str]) -> None:
            """All at once."""
            left[:] = [n for n in left if n not in names]
            answers = {}
            for n in names:
                hosts[n] = client.host(members[n])
                answers[n] = beside(functools.partial(probe, hosts[n]))
            for n, answer in answers.items():
                try:
                    has = answer.result()
                except attnd.AlreadyExistsError as e:  # a pool of that name, of other bytes or weights
                    log.warning("%s takes no sequences of pool %s: %s", n, name, e)
                    others.append(attnd.AlreadyExistsError(f"{n}: {e.message}"))
                    continue
                except attnd.AttndError as e:
                    log.debug("%s is not asked: %s", n, e)
                    continue
                asked.append(
                    Candidate(
                        n,
                        has.cached_tokens,
                        has.n_blocks,
                        has.n_free_blocks,
                        members[n].queue_seconds,
                        backlog[n],
                    )
                )

        n_tokens = max(n_tokens, len(tokens))
        left, hosts = sorted(members, key=emptiness), dict[str, Host]()
        asked: list[Candidate] = []
        others: list[attnd.AlreadyExistsError] = []
        wanted = [n for n in left if n not in avoided]
        first = homes(wanted, tokens, adapter, per_block, _PROBED)
        ask(left[:_PROBED] if not first or len(left) <= _PROBED else first)
        if left and is_behind(asked, n_tokens, per_block):
            ask(left[:_PROBED])
        if others and not asked:
            raise others[0]
        best = order(asked, n_tokens, per_block)
        return [(c, hosts[c.name]) for c in sorted(best, key=lambda c: c.name in avoided)]

    def place(
        self,
        seq_id: int | None,
        tokens: list[int],
        adapter: int,
        timeout: float | None,
        avoided: Collection[str] = (),
        n_tokens: int = 0,
    ) -> tuple[Host, attnd.Sequence]:
        """A new sequence on one of the daemons, as candidates() has them; waits for one where there
        is none. Raises the last one's AttndError."""
        failed: attnd.AttndError | None = None
        until = time.monotonic() + (self.client.timeout if timeout is None else timeout)
        while True:
            for candidate, host in self.candidates(tokens, adapter, avoided, n_tokens):
                id = random_id(host.name) if seq_id is None else seq_id
                try:
                    inner = self.at(
                        host,
                        # id is bound: this may go on when the host is gone
                        lambda pool, id=id: pool.open(  # type: ignore[misc]
                            id, tokens=tokens, adapter=adapter, timeout=timeout
                        ),
                    )
                except _ELSEWHERE as e:
                    failed = e
                    continue
                with self.client.lock:
                    n = max(n_tokens, len(tokens))
                    self.client.backlog.give(host.name, max(1, n - inner.n_cached), n)
                return host, inner
            if self.client.is_closed or time.monotonic() >= until:
                break
            if failed is not None and not isinstance(failed, HostGone):
                break
            failed = None  # those that were asked are gone, or none answered: others may come
            if self.client.serving():
                time.sleep(_PAUSE_SECONDS)
            self.client.members.wait(_PROBE_SECONDS, lambda now: bool(now))
        raise failed or attnd.ConnectionLostError(
            f"{self.client.url}: no member takes sequences: {self.client.members.why or 'none answers'}"
        )

    def open(
        self,
        seq_id: int | None = None,
        *,
        tokens: Iterable[int] = (),
        adapter: int = 0,
        shard_tokens: int | None = None,
        timeout: float | None = None,
    ) -> ClusterSequence | LongSequence:
        """As attnd.Pool.open(), on one of the daemons. With shard_tokens, a multiple of block_tokens,
        the sequence may be longer than a daemon has room for: another shard begins, on another
        daemon if there is one, each time that many tokens are in the last one, or its daemon has no
        blocks left for it. Its arrays in steps are numpy's. In layers with branches shard_tokens is
        a multiple of their segments."""
        ids = list(getattr(tokens, "tolist", lambda: tokens)())
        if shard_tokens is not None:
            if seq_id is not None:
                raise attnd.InvalidArgumentError("seq_id: each shard has an id of its own")
            from .shards import LongSequence

            return LongSequence(self, ids, adapter, shard_tokens).begin(timeout)
        host, inner = self.place(seq_id, ids, adapter, timeout)
        return ClusterSequence(self, host, inner, ids, adapter)

    def probe(
        self, tokens: Iterable[int] = (), *, adapter: int = 0, timeout: float | None = None
    ) -> attnd.Probe:
        """Of the daemon that open() with these tokens would take."""
        ids = list(getattr(tokens, "tolist", lambda: tokens)())
        found = self.candidates(ids, adapter)
        if not found:
            raise attnd.ConnectionLostError(f"{self.client.url}: no member takes sequences")
        best = found[0][0]
        return attnd.Probe(best.cached_tokens, 0, best.n_blocks, best.n_free_blocks, 0)

    def adopt(
        self, seq_id: int, *, timeout: float | None = None
    ) -> ClusterSequence | LongSequence:
        """Takes over a sequence wherever it is: where its id says that it began, then all others. Its
        `note` is what its worker left. The id of a sequence's first shard stands for all of them."""
        found = self.adopt_one(seq_id, timeout)
        if not found.note.startswith(SHARDS):
            return found
        from .shards import LongSequence

        try:
            shards = LongSequence.of_note(self, found)
        except (ValueError, KeyError, TypeError):  # a worker's own note begins so
            return found
        return shards.take(None, timeout)

    def adopt_one(self, seq_id: int, timeout: float | None) -> ClusterSequence:
        client = self.client
        members = client.members.all()
        failed: attnd.AttndError = attnd.SequenceGoneError(f"no member has sequence {seq_id}")
        for name in sorted(members, key=lambda n: home_of(n) != seq_id >> 48):
            host = client.host(members[name])
            try:
                inner = self.at(host, lambda pool: pool.adopt(seq_id, timeout=timeout))
                return ClusterSequence(self, host, inner, note=self._note_of(host, seq_id))
            except (attnd.NotFoundError, HostGone):
                continue
            except (attnd.ConnectionLostError, attnd.TimedOutError) as e:
                failed = e
        raise failed

    @staticmethod
    def _note_of(host: Host, seq_id: int) -> bytes | None:
        """None: it does not say."""
        try:
            return host.call(lambda: host.client().note(seq_id))
        except attnd.UnsupportedError:  # an older daemon
            return None

    def adopt_shards(
        self,
        shards: Iterable[tuple[int, int]],
        shard_tokens: int,
        *,
        tokens: Iterable[int] = (),
        adapter: int = 0,
        timeout: float | None = None,
    ) -> LongSequence:
        """Takes over a sequence in shards from another worker: its LongSequence.shard_ids and
        shard_tokens, as it told them last, and the token ids. What it did not tell is not found: the
        sequence then ends where the shards do (layer_len). Shards that are gone are computed anew
        (ShardLostError where they can't be: what was adopted stays, for another try)."""
        from .shards import LongSequence

        ids = list(getattr(tokens, "tolist", lambda: tokens)())
        return LongSequence(self, ids, adapter, shard_tokens).take(list(shards), timeout)

    def calls(self) -> ClusterCalls:
        from .calls import ClusterCalls

        return ClusterCalls(self)

    def reserve(self, n_blocks: int, *, timeout: float | None = None) -> int:
        raise attnd.UnsupportedError("reservations are of one daemon: connect to it itself")

    def weights(self, layer: int, weights: Any) -> None:
        """As attnd.Pool.weights(), for every daemon, also those that come later: each is sent them when
        a step finds none there. All clients of the pool, on whichever daemon, give the same: spec.model
        stands for them."""
        address_of_weights(self.spec, weights)
        if not 0 <= layer < self.spec.num_layers:
            raise attnd.InvalidArgumentError(
                f"layer is {layer}, the pool has {self.spec.num_layers} layers"
            )
        self.client.hosts.give_weights(self.spec.name, layer, weights)

    # ---- steps

    def items(self, items: Iterable[Any]) -> ClusterItems:
        return ClusterItems(items)

    def step(
        self,
        layer: int,
        items: ClusterItems | Iterable[Any],
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
    ) -> attnd.Result:
        """As attnd.Pool.step(). Ends with a host's membership, if it is lost, not by the time-out.

        Of the options sequences in shards take none but out and lse.
        """
        if not isinstance(items, ClusterItems):
            items = ClusterItems(items)
        until = time.monotonic() + (self.client.timeout if timeout is None else timeout)
        if items.is_long:
            from .shard_decode import decode

            for name, x in (
                ("parents", parents),
                ("is_full", is_full),
                ("indices", indices),
                ("choose_blocks", choose_blocks),
                ("parts", parts),
            ):
                if x is not None and x is not False and x != 0:
                    raise attnd.UnsupportedError(f"{name}: steps of sequences in shards have none")
            done = decode(self, layer, items, q, k, v, out, lse, timeout)
            if done is not None:
                return done
        spec, n = self.spec, items.n_tokens
        is_given = out is not None or (lse is not None and lse is not False and lse is not True)
        if q is not None and out is None:
            out = empty(q, (n, spec.num_q_heads, spec.out_row), self._dtype)
        if lse is True:
            lse = empty(q, (n, spec.num_q_heads), F32)
        parents = None if parents is None else [int(p) for p in parents]
        arrays = _Arrays(
            out,
            None if lse is False else lse,
            {"q": q, "k": k, "v": v, "parents": parents, "indices": indices},
            {"is_full": is_full, "index_tokens": index_tokens, "choose_blocks": choose_blocks},
            None if parts is None else list(parts),
        )
        arrays.check(n)
        statuses = [0] * items.n_items
        totals = [0, 0, 0, 0]
        failed: attnd.AttndError | None
        if items.is_long:
            from .shard_steps import run_long

            left = max(until - time.monotonic(), _LEAST_SECONDS)
            failed = run_long(self, layer, items, arrays, left, statuses, totals)
        else:
            failed = self._run(layer, items, arrays, timeout, statuses, totals, is_given)
        result = attnd.Result(out, arrays.lse, tuple(statuses), *totals)
        if failed is not None:
            if any(s == 0 for s in statuses):
                failed.result = result
            raise failed
        return result

    def _run(
        self,
        layer: int,
        items: ClusterItems,
        arrays: _Arrays,
        timeout: float | None,
        statuses: list[int],
        totals: list[int],
        is_given: bool,
    ) -> attnd.AttndError | None:
        """Writes outputs and statuses; what is left wrong."""
        return together(
            self._rounds(layer, items, arrays, timeout, statuses, totals, is_given)
        )[0]

    def _rounds(
        self,
        layer: int,
        items: ClusterItems,
        arrays: _Arrays,
        timeout: float | None,
        statuses: list[int],
        totals: list[int],
        is_given: bool,
    ) -> Rounds:
        """As _run(), for together()."""
        until = time.monotonic() + (self.client.timeout if timeout is None else timeout)
        left, mine, of, rows = list(range(items.n_items)), items, arrays, None
        n_found_again = 0
        while True:
            failed: attnd.AttndError | None = None
            again: list[int] = []
            lost: list[tuple[int, int]] = []  # to be found again, their versions then
            started = self._start(layer, mine, of, timeout)
            yield
            for part, error, its in self._wait(started, of, totals, is_given):
                for j, version, status in zip(part.which, part.versions, its):
                    i = left[j]
                    statuses[i] = status
                    seq, pos, n = items.rows[i]
                    if status == 0:
                        if not arrays.options.get("is_full"):
                            is_tree = arrays.rows.get("parents") is not None
                            seq._acknowledged(layer, pos, n, is_tree)
                    elif isinstance(error, HostGone) or status in _FOUND_AGAIN:
                        again.append(i)
                        lost.append((i, version))
                    elif status in _FENCED and time.monotonic() < until:
                        again.append(i)  # its agent renews the fence, or it will be gone
                    else:
                        failed = failed or error
            arrays.take(of, rows)
            if failed is not None or not again:
                return failed
            n_found_again += bool(lost)
            if n_found_again == _ATTEMPTS:
                return attnd.SequenceGoneError("sequences went each time that they were found")
            yield  # others have their answers before this one looks for its sequences
            if len(lost) < len(again):
                time.sleep(_PAUSE_SECONDS)
            for i, version in lost:
                try:
                    is_stale = statuses[i] == attnd.StaleEpochError.status
                    items.rows[i][0]._recover(version, is_stale)
                except attnd.AttndError as e:
                    failed = failed or e
            if failed is not None:
                return failed
            left = sorted(again)
            mine = ClusterItems(items.rows[i] for i in left)
            of, rows = arrays.of(items, left)

    def _start(
        self, layer: int, items: ClusterItems, arrays: _Arrays, timeout: float | None
    ) -> list[_Started]:
        """Sends each daemon its part."""
        parts = items.parts()
        started: list[_Started] = []
        for part in parts:
            mine, rows = (arrays, None) if len(parts) == 1 else arrays.of(items, part.which)
            step: Any
            try:
                pool = part.host._pools.get(self.spec.name) or self.at(part.host, lambda p: p)
                step = pool.step_start(
                    layer,
                    part.items,
                    out=mine.out,
                    lse=False if mine.lse is None else mine.lse,
                    parts=mine.parts,
                    timeout=timeout,
                    **mine.rows,
                    **mine.options,
                )
            except attnd.AttndError as e:
                step = e
            started.append((part, mine, rows, step))
        return started

    def _wait(
        self, started: list[_Started], arrays: _Arrays, totals: list[int], is_given: bool
    ) -> list[tuple[_Part, attnd.AttndError | None, list[int]]]:
        """Each daemon's part, with its error and its items' statuses."""
        done = []
        for part, mine, rows, step in started:
            error: attnd.AttndError | None = None
            its = [0] * len(part.which)
            try:
                if isinstance(step, attnd.AttndError):
                    raise step
                result = part.host.wait(step)
                self._count(totals, result)
                arrays.take(mine, rows)
            except attnd.AttndError as e:
                error = e
                if part.host.is_gone and not isinstance(e, HostGone):
                    error = HostGone(f"{part.host.name} is no member any more: {e.message}")
                if isinstance(error, HostGone) and is_given:
                    part.host.is_released.wait()  # its late answer is not to be written to them
                if isinstance(step, attnd.Step) and step.is_done and e.result is not None:
                    its = list(e.result.item_status)
                    self._count(totals, e.result)
                    arrays.take(mine, rows)
                else:
                    its = [e.status or attnd.InternalError.status] * len(part.which)
                if isinstance(e, (attnd.SessionGoneError, attnd.PoolGoneError)):
                    self._begin_anew(part.host)
            done.append((part, error, its))
        return done

    def _begin_anew(self, host: Host) -> None:
        try:
            host.call(host.begin_anew)
        except attnd.AttndError as e:
            log.warning("%s: %s", host.name, e)

    @staticmethod
    def _count(totals: list[int], r: attnd.Result) -> None:
        totals[:] = [
            max(totals[0], r.queue_ns),
            max(totals[1], r.device_ns),
            max(totals[2], r.total_ns),
            max(totals[3], r.n_sends),
        ]

    # ---- the end

    def close(self, *, timeout: float | None = None) -> None:
        """Lets the pool go on every daemon, if no other handle of this client has it."""
        self._close(timeout)

    def _close(self, timeout: float | None = None, releases: bool = True) -> bool:
        if not self.client.is_closed:
            self.client.forget_pool(self)
        return True

    def __repr__(self) -> str:
        return f"<attnd_cluster.ClusterPool {self.spec.name!r}>"
