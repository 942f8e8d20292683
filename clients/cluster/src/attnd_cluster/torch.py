"""Attention over lanes to several daemons of this host, for a worker whose q, k and v are on a GPU: a
sequence lies on one daemon, or in shards on several, and what each gives is merged on the device.

    pool = client.create_pool(spec)              # attnd.connect("cluster+...")
    seq = pool.open(shard_tokens=524288)         # its prompt by pool.step()
    attention = attnd_cluster.torch.Attention(pool)
    attention.plan([(seq, pos, 1)])              # once per step, before its layers or a replay
    for layer in layers:
        out = attention(q, k, v)                 # [T, num_q_heads, head_dim_v], on the current stream
    ...
    attention.check()                            # after the stream was waited for

Whatever fails, the next plan begins all lanes anew: it waits for what is enqueued, and closes lanes that
it has no rows for. What was planned since the last check() that raised nothing is then planned again.

As attnd.torch.Attention of one daemon. Lanes are opened to the daemons that the sequences are on; each
has a stream of its own, so that all compute at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import attnd
import torch
from attnd._handle import Closing, NotPicklable
from attnd.torch import check_tensors

from .hosts import Host
from .lane_layout import Layout, Row, Way
from .pool import _ATTEMPTS, _FOUND_AGAIN, _PAUSE_SECONDS, ClusterPool
from .shard_steps import layer_spec
from .shards import LongSequence

__all__ = ["Attention"]


class Attention(Closing, NotPicklable):
    """Appends k and v and attends, layer after layer of a plan. One thread at a time.

    pool      the caller's, open as long as this is used
    in_bytes, out_bytes  of each lane, as attnd.Client.open_lane()
    layout    another number when the rows lie on other daemons, in more shards, or a lane was opened
              again: a CUDA graph that was captured before is not to be replayed then
    """

    def __init__(self, pool: ClusterPool, *, in_bytes: int = 0, out_bytes: int = 0):
        self.pool = pool
        self.layout = 0
        self.is_closed = False
        self._bytes = {"in_bytes": in_bytes, "out_bytes": out_bytes}
        self._lanes: dict[Way, attnd.Lane] = {}
        self._pools: dict[Way, attnd.Pool] = {}  # of the lane's latest plan
        self._streams: dict[Way, torch.cuda.Stream] = {}
        self._device = torch.device("cpu")  # the lanes'
        self._layout: Layout | None = None
        # since check(): by sequence and layers, (pos, n) of the latest plan
        self._planned: dict[tuple[Any, tuple[int, ...]], tuple[int, int]] = {}
        self._asked: set[Way] = set()  # lanes of these plans, and of the latest one
        self._is_failed = False  # what is planned is to be forgotten

    def plan(
        self,
        items: Iterable[Any],
        *,
        layers: Iterable[int] | None = None,
        is_restart: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Lane.plan() at every daemon that has a part of these sequences, once the layers of the plan
        before it are enqueued or replayed.

        items   (sequence, pos, n_tokens) as in ClusterPool.step(); those in more than one shard have one
                token, which is in the last shard or begins another one
        is_restart  layers planned and not enqueued are forgotten; waits for those that are enqueued
        Sequences that were moved or whose host is lost are found again, as by step(). Raises what check()
        does, of layers before; UnsupportedError: a layer with windows, ALiBi, sink logits or branches, and
        a sequence in more than one shard; ValueError: no items; what Client.open_lane() does.
        """
        rows = [(seq, pos, n) for seq, pos, n in items]
        if not rows:
            raise ValueError("items is empty")
        order = list(range(self.pool.spec.num_layers) if layers is None else layers)
        if is_restart:
            self._fail()
        if any(isinstance(seq, LongSequence) and not seq.has_room(pos) for seq, pos, _ in rows):
            self._finish()  # a shard begins where the one before it is known to be full
        until = time.monotonic() + (self.pool.client.timeout if timeout is None else timeout)
        for attempt in range(_ATTEMPTS):
            ways = self._ways(rows, order, timeout)
            failed = self._send(ways, order, timeout)
            if failed is None:
                break
            self._finish()
            way, error = failed
            is_late = time.monotonic() >= until and not way[0].is_gone
            if attempt + 1 == _ATTEMPTS or is_late:
                raise error
            self._find(way, ways[way], error, until)
        n = sum(n for _, _, n in rows)
        found = {way: [r.first + i for r in mine for i in range(r.n)] for way, mine in ways.items()}
        if self._layout is None or (found, n) != (self._layout.rows, self._layout.n):
            self._layout = Layout(found, n, self.pool.spec, self._device)
            self.layout += 1
        self._asked = set(ways) | (self._asked if self._planned else set())
        for (_, appends), mine in ways.items():
            for r in mine if appends else ():
                self._planned[r.seq, tuple(order)] = r.pos, r.n
        self._is_failed = False

    def _ways(
        self, items: list[tuple[Any, int, int]], order: list[int], timeout: float | None
    ) -> dict[Way, list[Row]]:
        found: dict[Way, list[Row]] = {}

        def add(seq: Any, appends: bool, pos: int, n: int, first: int) -> None:
            with seq._lock:
                row = Row(seq, seq._version, seq._inner, pos, n, first)
                found.setdefault((seq._host, appends), []).append(row)

        first = 0
        for seq, pos, n in items:
            if not isinstance(seq, LongSequence):
                add(seq, True, pos, n, first)
                first += n
                continue
            spans = seq.spans(order[0], pos, n, True, timeout)
            with seq._lock:
                shards, i = list(seq.shards), seq.index_of(pos)
            if len(spans) > 1 or i + 1 < len(shards) or (i > 0 and n > 1):
                raise ValueError(
                    f"pos {pos}, n_tokens {n} of a sequence in {len(shards)} shards: lanes take one token of"
                    " its last shard; prompts go through ClusterPool.step()"
                )
            if i > 0:
                self._check_layers(order)
            add(shards[i], True, pos - shards[i].base, n, first)
            for shard, following in zip(shards, shards[1:]):
                # its last token's place: from there all of it is seen
                add(shard, False, following.base - shard.base - 1, 1, first)
            first += n
        return found

    def _check_layers(self, order: list[int]) -> None:
        for layer in order:
            spec = layer_spec(self.pool, layer)
            for name in ("window_tokens", "alibi_slopes", "sink_logits", "branches", "is_full"):
                if getattr(spec, name):
                    raise attnd.UnsupportedError(
                        f"layer {layer} has {name}: lanes of sequences in shards have none"
                    )

    def _lane(self, way: Way) -> attnd.Lane:
        lane = self._lanes.get(way)
        if lane is None:  # on this thread, whose GPU it is
            client = way[0].client()
            lane = client.open_lane(**self._bytes)
            if not lane.is_host:
                self._device = torch.device("cuda", torch.cuda.current_device())
                self._streams[way] = torch.cuda.Stream()
            client._lanes.discard(lane)  # whose end would unmap it under layers and replays
            self._lanes[way] = lane
        return lane

    def _send(
        self, ways: dict[Way, list[Row]], order: list[int], timeout: float | None
    ) -> tuple[Way, attnd.AttndError] | None:
        """To all, or where it failed and why. What is sent counts as failed until plan() ends."""
        is_restart, self._is_failed = self._is_failed, True
        if is_restart:
            self._synchronize()
            for way in self._lanes.keys() - ways.keys():
                self._forget(way)
        for way, rows in ways.items():
            host, appends = way
            try:
                inner = host._pools.get(self.pool.spec.name) or self.pool.at(host, lambda pool: pool)
                self._lane(way).plan(
                    inner,
                    [(r.inner, r.pos, r.n) for r in rows],
                    layers=order,
                    is_append=appends,
                    lse=True,
                    is_restart=is_restart,
                    timeout=timeout,
                )
                self._pools[way] = inner
            except attnd.AttndError as e:
                return way, e
        return None

    def _find(self, way: Way, rows: list[Row], error: attnd.AttndError, until: float) -> None:
        """After it failed there: what it takes for another try. Raises the error where nothing does."""
        host, is_anew = way[0], isinstance(error, (attnd.SessionGoneError, attnd.PoolGoneError))
        if host.is_gone or isinstance(error, attnd.ConnectionLostError):
            self._forget_host(host)
            while not (host.is_gone or is_anew):
                try:
                    host.call(lambda: host.client().ping())  # which the host's end ends, too
                    return
                except attnd.SessionGoneError:
                    is_anew = True
                except attnd.AttndError:
                    if time.monotonic() >= until:
                        raise error from None
                    time.sleep(_PAUSE_SECONDS)
        elif not is_anew and error.status not in _FOUND_AGAIN:
            raise error
        if is_anew and not host.is_gone:  # the daemon was restarted without its cache
            self._forget_host(host)
            self.pool._begin_anew(host)
        if host.is_gone or is_anew:
            gone = [(r, False) for r in rows]
        else:
            looked = [(r, self._is_stale(host, r.inner)) for r in rows]
            gone = [(r, is_stale) for r, is_stale in looked if is_stale is not None]
        if not gone:  # then the lane is
            self._forget_host(host)
        for r, is_stale in gone:
            r.seq._recover(r.version, is_stale)

    @staticmethod
    def _is_stale(host: Host, inner: attnd.Sequence) -> bool | None:
        """Of one whose neighbours' plan was refused: None, it is there as ever; True, somebody has
        adopted it; False, it is gone."""
        try:
            at = host.call(lambda: host.client().locate(inner.id))
        except attnd.NotFoundError:
            return False
        except attnd.AttndError:  # the next try says what it is
            return None
        if at.url != "":
            return False
        return None if at.epoch == inner.epoch else True

    def _synchronize(self) -> None:
        if self._streams:  # replays are on any stream
            torch.cuda.synchronize(self._device)

    def _finish(self) -> None:
        """Waits for the layers of plans before, and looks at them."""
        if self._planned:
            self._synchronize()
            self.check()

    def _forget_host(self, host: Host) -> None:
        self._synchronize()
        for appends in (True, False):
            self._forget((host, appends))

    def _forget(self, way: Way) -> None:
        """Closes a lane whose layers are finished."""
        lane = self._lanes.pop(way, None)
        self._streams.pop(way, None)
        self._pools.pop(way, None)
        self._asked.discard(way)
        if lane is not None:
            self._layout = None  # another lane lies elsewhere
            lane.close()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, num_q_heads, head_dim_k or spec.q_row], k and v [T, num_kv_heads, head_dim] of the plan's
        next layer.

        v    None in a pool whose V is in K
        out  [T, num_q_heads, head_dim_v or out_dim]: written, and returned; None: a new one

        Raises ValueError for other shapes, dtypes or devices, and without a plan, or after one or a layer
        failed; what Lane.enqueue() does; HostGone.
        """
        if self._is_failed:
            raise ValueError("the plan or a layer of it failed: plan() it anew")
        layout = self._layout
        if layout is None:
            raise ValueError("no plan was made")
        spec = self.pool.spec
        out_shape = (layout.n, *layout.outs.shape[1:])
        if out is None:
            out = layout.outs.new_empty(out_shape)
        expected = [
            ("q", q, (layout.n, spec.num_q_heads, spec.q_row)),
            ("k", k, (layout.n, spec.num_kv_heads, spec.head_dim_k)),
            ("v", v, (layout.n, spec.num_kv_heads, spec.head_dim_v or spec.head_dim_k)),
            ("out", out, out_shape),
        ]
        if v is None and spec.is_v_in_k:
            del expected[2]
        device = layout.outs.device
        check_tensors(expected, layout.outs.dtype, lambda x: x.device == device, str(device))
        current = torch.cuda.current_stream(q.device) if q.is_cuda else None
        try:
            for way in layout.rows:
                with torch.cuda.stream(self._behind(way, current)):
                    self._enqueue(way, layout, q, k, v)
            for way in layout.rows:
                if current is not None:
                    current.wait_stream(self._streams[way])
            layout.merge(out)
        except BaseException:  # some lanes may have the layer, others not
            self._fail()
            raise
        return out

    def _behind(self, way: Way, current: Any) -> Any:
        """The lane's stream, behind what the current one has; None on CPUs."""
        if current is None:
            return None
        self._streams[way].wait_stream(current)
        return self._streams[way]

    def _enqueue(self, way: Way, layout: Layout, q: Any, k: Any, v: Any) -> None:
        (host, appends), taken, span = way, layout.taken[way], layout.spans[way]
        pool = self._pools[way]
        given = [q, k, v] if appends else [q, None, None]
        mine = [
            None if x is None else (x if taken is None else x.index_select(0, taken)).contiguous()
            for x in given
        ]
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        try:
            with pool._inside():  # the host's end waits for who is
                self._lanes[way].enqueue(
                    pool,
                    span.stop - span.start,
                    *(0 if x is None else x.data_ptr() for x in mine),
                    out=layout.outs[span].data_ptr(),
                    lse=layout.lses[span].data_ptr(),
                    stream=stream,
                )
        except attnd.InvalidArgumentError:
            if host.is_gone:  # it was closed meanwhile
                raise host._refuse() from None
            raise

    def check(self) -> None:
        """Raises the first failure of layers since the last check(); never waits: layers that are not
        finished count as done. What it raises for is planned anew, at the same positions, all since
        then: twice is as once."""
        try:
            for way in self._asked:
                self._lanes[way].check()
        except attnd.AttndError:
            self._fail()
            raise
        for (seq, layers), (pos, n) in self._planned.items():
            for layer in layers:
                seq._acknowledged(layer, pos, n, False)
        self._planned = {}

    def _fail(self) -> None:
        self._is_failed, self._planned = True, {}

    def close(self) -> None:
        """Enqueued layers are to be finished. Safe to call again."""
        self.is_closed = True
        for way in list(self._lanes):
            self._forget(way)

    def __repr__(self) -> str:
        return f"<attnd_cluster.torch.Attention of {self.pool.spec.name!r}, {len(self._lanes)} lanes>"
