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

As attnd.torch.Attention of one daemon. Lanes are opened to the daemons that the sequences are on; each
has a stream of its own, so that all compute at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import attnd
import torch
from attnd._handle import Closing, NotPicklable

from .hosts import Host
from .pool import _ATTEMPTS, _FOUND_AGAIN, _PAUSE_SECONDS, ClusterPool
from .shard_steps import layer_spec
from .shards import LongSequence

__all__ = ["Attention"]

_Way = tuple[Host, bool]  # of a lane: where to, and whether its layers append
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class _Row(NamedTuple):
    """What one daemon has of an item."""

    seq: Any  # on that daemon
    version: int
    inner: attnd.Sequence
    pos: int
    n: int
    first: int  # the item's row


class _Layout:
    """Which lane has which rows, and where its answers come: of plans that differ in positions alone.

    outs, lses  [rows of all lanes and one more, heads, dim], [..., heads]: one lane's behind another's, and
                a row of nothing
    parts       [most parts of a row, tokens]: of each row, which rows of outs are merged
    """

    def __init__(self, rows: dict[_Way, list[int]], n: int, spec: attnd.PoolSpec, device: Any):
        n_rows = sum(map(len, rows.values()))
        heads, dim = spec.num_q_heads, spec.head_dim_v or spec.head_dim_k
        self.rows, self.n = rows, n
        self.outs = torch.zeros((n_rows + 1, heads, dim), dtype=_DTYPES[spec.q_dtype], device=device)
        self.lses = torch.full((n_rows + 1, heads), float("-inf"), device=device)
        found: list[list[int]] = [[] for _ in range(n)]
        self.spans: dict[_Way, slice] = {}
        self.taken: dict[_Way, torch.Tensor | None] = {}  # None: all, as they come
        at = 0
        for way, mine in rows.items():
            self.spans[way] = slice(at, at + len(mine))
            is_all = mine == list(range(n))
            self.taken[way] = None if is_all else torch.tensor(mine, device=device)
            for row in mine:
                found[row].append(at)
                at += 1
        most = max(map(len, found))
        padded = [x + [n_rows] * (most - len(x)) for x in found]
        self.parts = torch.tensor(padded, device=device).T.contiguous()

    def merge(self, out: torch.Tensor) -> None:
        weights = torch.softmax(self.lses[self.parts], dim=0)
        out.copy_((weights[..., None] * self.outs[self.parts].float()).sum(dim=0))


class Attention(Closing, NotPicklable):
    """Appends k and v and attends, layer after layer of a plan. One thread at a time.

    pool      the caller's, open as long as this is used
    in_bytes, out_bytes  of each lane, as attnd.Client.open_lane()
    layout    another number when the rows lie on other daemons, or in more shards: a CUDA graph that was
              captured before is not to be replayed then
    """

    def __init__(self, pool: ClusterPool, *, in_bytes: int = 0, out_bytes: int = 0):
        self.pool = pool
        self.layout = 0
        self.is_closed = False
        self._bytes = {"in_bytes": in_bytes, "out_bytes": out_bytes}
        self._lanes: dict[_Way, attnd.Lane] = {}
        self._streams: dict[_Way, torch.cuda.Stream] = {}
        self._layout: _Layout | None = None
        self._planned: list[tuple[Any, int, int]] = []  # of the latest plan, which shard and where in it
        self._layers: list[int] = []
        self._is_failed = False  # what is planned is to be forgotten

    def plan(
        self, items: Iterable[Any], *, layers: Iterable[int] | None = None, timeout: float | None = None
    ) -> None:
        """Lane.plan() at every daemon that has a part of these sequences, once the layers of the plan
        before it are enqueued or replayed.

        items   (sequence, pos, n_tokens) as in ClusterPool.step(); those in more than one shard have one
                token, which is in the last shard or begins another one
        Sequences that were moved or whose host is lost are found again, as by step(). Raises what
        check() does, of layers before; UnsupportedError: a layer with windows, ALiBi, sink logits or
        branches, and a sequence in more than one shard; what Client.open_lane() does.
        """
        rows = [(seq, pos, n) for seq, pos, n in items]
        if self._planned:
            self.check()
        order = list(range(self.pool.spec.num_layers) if layers is None else layers)
        until = time.monotonic() + (self.pool.client.timeout if timeout is None else timeout)
        for attempt in range(_ATTEMPTS):
            ways = self._ways(rows, order, timeout)
            failed = self._send(ways, order, timeout)
            if failed is None:
                break
            way, error = failed
            if attempt + 1 == _ATTEMPTS or time.monotonic() >= until:
                raise error
            self._find(way, ways[way], error, until)
        n = sum(n for _, _, n in rows)
        found = {way: [r.first + i for r in mine for i in range(r.n)] for way, mine in ways.items()}
        if self._layout is None or (found, n) != (self._layout.rows, self._layout.n):
            lane = next(iter(self._lanes.values()))
            device = "cpu" if lane.is_host else torch.device("cuda", torch.cuda.current_device())
            self._layout = _Layout(found, n, self.pool.spec, device)
            self.layout += 1
        self._planned = [(r.seq, r.pos, r.n) for (_, appends), mine in ways.items() if appends for r in mine]
        self._layers = order

    def _ways(
        self, items: list[tuple[Any, int, int]], order: list[int], timeout: float | None
    ) -> dict[_Way, list[_Row]]:
        found: dict[_Way, list[_Row]] = {}

        def add(seq: Any, appends: bool, pos: int, n: int, first: int) -> None:
            with seq._lock:
                row = _Row(seq, seq._version, seq._inner, pos, n, first)
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

    def _lane(self, way: _Way) -> attnd.Lane:
        lane = self._lanes.get(way)
        if lane is None:  # on this thread, whose GPU it is
            lane = self._lanes[way] = way[0].client().open_lane(**self._bytes)
            if not lane.is_host:
                self._streams[way] = torch.cuda.Stream()
        return lane

    def _send(
        self, ways: dict[_Way, list[_Row]], order: list[int], timeout: float | None
    ) -> tuple[_Way, attnd.AttndError] | None:
        """To all, or where it failed and why."""
        is_restart, self._is_failed = self._is_failed, True
        if is_restart:
            for stream in self._streams.values():
                stream.synchronize()
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
            except attnd.AttndError as e:
                return way, e
        self._is_failed = False
        return None

    def _find(self, way: _Way, rows: list[_Row], error: attnd.AttndError, until: float) -> None:
        """After it failed there: what it takes for another try. Raises the error where nothing does."""
        host = way[0]
        if isinstance(error, attnd.ConnectionLostError):
            self._forget(way)
            while not host.is_gone and time.monotonic() < until:
                try:
                    host.call(lambda: host.client().ping())  # which the host's end ends, too
                    return
                except attnd.AttndError:
                    time.sleep(_PAUSE_SECONDS)
        elif error.status not in _FOUND_AGAIN:
            raise error
        for r in rows:
            r.seq._recover(r.version, error.status == attnd.StaleEpochError.status)

    def _forget(self, way: _Way) -> None:
        lane = self._lanes.pop(way, None)
        self._streams.pop(way, None)
        if lane is not None:
            lane.close()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, num_q_heads, head_dim_k], k and v [T, num_kv_heads, head_dim] of the plan's next layer.

        v    None in a pool whose V is in K
        out  [T, num_q_heads, head_dim_v]: written, and returned; None: a new one

        Raises ValueError for other shapes, dtypes or devices; what Lane.enqueue() does.
        """
        layout = self._layout
        if layout is None:
            raise ValueError("no plan was made")
        spec = self.pool.spec
        out_shape = (layout.n, *layout.outs.shape[1:])
        if out is None:
            out = layout.outs.new_empty(out_shape)
        for name, x, shape in (
            ("q", q, (layout.n, spec.num_q_heads, spec.head_dim_k)),
            ("k", k, (layout.n, spec.num_kv_heads, spec.head_dim_k)),
            ("v", v, (layout.n, spec.num_kv_heads, out_shape[2])),
            ("out", out, out_shape),
        ):
            if x is None and name == "v" and spec.is_v_in_k:
                continue
            if x is None or (x.shape, x.dtype, x.device) != (shape, layout.outs.dtype, layout.outs.device):
                is_what = "missing" if x is None else f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(
                    f"{name} is {is_what}, expected {layout.outs.dtype} {shape} on {layout.outs.device}"
                )
        current = torch.cuda.current_stream(q.device) if q.is_cuda else None
        try:
            for way in layout.rows:
                with torch.cuda.stream(self._behind(way, current)):
                    self._enqueue(way, layout, q, k, v)
        except attnd.AttndError:
            self._fail()
            raise
        for way in layout.rows:
            if current is not None:
                current.wait_stream(self._streams[way])
        layout.merge(out)
        return out

    def _behind(self, way: _Way, current: Any) -> Any:
        """The lane's stream, behind what the current one has; None on CPUs."""
        if current is None:
            return None
        self._streams[way].wait_stream(current)
        return self._streams[way]

    def _enqueue(self, way: _Way, layout: _Layout, q: Any, k: Any, v: Any) -> None:
        (host, appends), taken, span = way, layout.taken[way], layout.spans[way]
        given = [q, k, v] if appends else [q, None, None]
        mine = [
            None if x is None else (x if taken is None else x.index_select(0, taken)).contiguous()
            for x in given
        ]
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        self._lanes[way].enqueue(
            host._pools[self.pool.spec.name],
            span.stop - span.start,
            *(0 if x is None else x.data_ptr() for x in mine),
            out=layout.outs[span].data_ptr(),
            lse=layout.lses[span].data_ptr(),
            stream=stream,
        )

    def check(self) -> None:
        """Raises the first failure of the layers that are finished; never waits. What it raises for is
        planned anew, at the same positions: twice is as once."""
        try:
            for lane in self._lanes.values():
                lane.check()
        except attnd.AttndError:
            self._fail()
            raise
        for seq, pos, n in self._planned:
            for layer in self._layers:
                seq._acknowledged(layer, pos, n, False)
        self._planned = []

    def _fail(self) -> None:
        self._is_failed, self._planned = True, []

    def close(self) -> None:
        """Enqueued layers are to be finished. Safe to call again."""
        self.is_closed = True
        for way in list(self._lanes):
            self._forget(way)

    def __repr__(self) -> str:
        return f"<attnd_cluster.torch.Attention of {self.pool.spec.name!r}, {len(self._lanes)} lanes>"
