"""Steps of one token of one sequence in shards: what each daemon is sent is made once, and only what
changes from step to step is written into it. The worker's own time is most of what such a step loses
against one daemon's (docs/benchmarks/two-daemons.md).

decode() does such a step, or gives None. Then shard_steps.py does it from its beginning,
whatever went wrong: an append names its position, so twice is as once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import attnd
import numpy as np
from attnd._step import Items, Prepared
from attnd._tensor import BF16, F16, F32, address_of

from .hosts import Host
from .pool import ClusterItems, ClusterPool
from .shard_steps import layer_spec, merging, reaches
from .shards import LongSequence, Shard

_WATCH_SECONDS = 2e-3


def n_cores(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> float:
    """That this process may use: its affinity, and the quotas of its cgroup and those above it."""
    n = float(len(os.sched_getaffinity(0)))
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return n
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top, names = root / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        own = top / path.lstrip("/")  # a container may have it as top
        for folder in (own, *own.parents):
            if folder != top and top not in folder.parents:
                break
            try:
                text = " ".join((folder / name).read_text() for name in names)
                quota, period = (int(x) for x in text.split())
            except (OSError, ValueError):  # "max": none
                continue
            if quota > 0 and period > 0:
                n = min(n, quota / period)
    return n


_HAS_SPARE_CORES = n_cores() > 4
_spinner = threading.Lock()  # held by the thread that looks without a pause
_BITS = {F32: np.float32, F16: np.float16, BF16: np.uint16}


class _Part(NamedTuple):
    """A shard, and the step that is sent to it."""

    shard: Shard
    version: int  # of the shard
    host: Host
    pool: attnd.Pool
    step: Prepared


class Decoder:
    """Of one sequence, while its shards are what they are. For one step at a time.

    parts       one for each shard, the last shard's first
    outs, lses  [shards, 1, heads, dim], [shards, 1, heads]: where the daemons' answers come
    """

    def __init__(self, seq: LongSequence, shards: list[Shard]):
        spec = seq.pool.spec
        self._kind = seq.pool._dtype
        heads, dim = spec.num_q_heads, spec.head_dim_v or spec.head_dim_k
        self.outs = np.empty((len(shards), 1, heads, spec.out_row), _BITS[self._kind])
        self.lses = np.empty((len(shards), 1, heads), np.float32)
        kv_heads = spec.num_kv_heads
        self._shapes = (1, heads, spec.q_row), (1, kv_heads, spec.head_dim_k), (1, kv_heads, dim)
        self.parts: list[_Part] = []
        pasts = [s.base for s in shards[1:]] + [0]
        for shard, past, out, lse in reversed(list(zip(shards, pasts, self.outs, self.lses))):
            with shard._lock:
                version, host, inner = shard._version, shard._host, shard._inner
            n_keys = max(0, past - shard.base)
            pool = seq.pool.at(host, lambda pool: pool)
            step = Prepared(
                pool,
                0,
                Items([(inner, 0, 1)]),
                None,
                None,
                None,
                out,
                lse,
                None,
                is_full=n_keys > 0,
                parts=[(shard.base, n_keys)],
            )
            self.parts.append(_Part(shard, version, host, pool, step))

    def is_of(self, shards: list[Shard]) -> bool:
        """Whether they are the sequence's shards, where they were."""
        return len(shards) == len(self.parts) and all(
            p.shard is shard and p.version == shard._version and not p.host.is_gone
            for p, shard in zip(reversed(self.parts), shards)
        )

    def merging(self, q: Any, out: Any, lse: Any) -> tuple[Any, Any, Callable[[], None]]:
        """out and lse as a step takes them, made where they are to be, and what merges to them."""
        out = np.empty(self.outs.shape[1:], q.dtype) if out is None else out
        lse = np.empty(self.lses.shape[1:], np.float32) if lse is True else lse
        lse = None if lse is False else lse
        return out, lse, merging(self._kind, self.outs, self.lses, out, lse)

    def send(
        self,
        layer: int,
        pos: int,
        arrays: tuple[Any, Any, Any],
        timeout: float | None,
        out_sent: list[tuple[Host, attnd.Step]],
    ) -> None:
        """To all shards. Raises AttndError, and TypeError or ValueError for arrays that do not fit."""
        at = [
            0 if x is None else address_of(x, name, self._kind, shape)[0]
            for x, name, shape in zip(arrays, "qkv", self._shapes)
        ]
        for p in self.parts:
            p.step.again(layer, pos - p.shard.base, at, timeout)
            out_sent.append((p.host, p.pool._start(p.step)))
            at[1:] = [0, 0]  # the last shard, which is the first here, has them


class _Watch:
    """Looks for answers without a pause for a while: a thread that sleeps through the half of a
    millisecond of a long step takes 0.2 ms more for what it does then, its core having been idle.
    One thread at a time: others would take the cores of those that work."""

    def __init__(self) -> None:
        self._until: float | None = None  # None: nothing was waited for
        self._looks = False

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._end()

    def _end(self) -> None:
        if self._looks:
            self._looks = False
            _spinner.release()

    def wait(self, host: Host, step: attnd.Step) -> attnd.Result:
        """As Host.wait()."""
        if self._until is None:
            self._until = time.monotonic() + _WATCH_SECONDS
            self._looks = _HAS_SPARE_CORES and _spinner.acquire(blocking=False)
        poll = step._pool.client.poll_once
        try:
            while self._looks and not (step.is_done or host.is_gone):
                if time.monotonic() < self._until:
                    poll()
                else:
                    self._end()
        except attnd.AttndError:  # Host.wait() says why
            self._end()
        return host.wait(step)


def decode(
    pool: ClusterPool,
    layer: int,
    items: ClusterItems,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    timeout: float | None,
) -> attnd.Result | None:
    """The step of one token of a sequence in shards that all see it, of numpy's arrays; None: it has
    not done it. What can be done while the daemons compute is done then."""
    seq, pos, n = items.rows[0]
    if items.n_items != 1 or n != 1 or not isinstance(seq, LongSequence):
        return None
    if not isinstance(q, np.ndarray) or q.dtype != _BITS[pool._dtype]:
        return None
    if not all(x is None or isinstance(x, np.ndarray) for x in (k, v, out)):
        return None
    if out is not None and out.dtype != q.dtype:
        return None
    with seq._lock:
        shards, decoder = list(seq.shards), seq.decoder
        seq.decoder = None  # a step of another thread makes its own
        if not (seq._is_written and len(shards) > 1 and seq.has_room(pos)):
            return None
    spec = layer_spec(pool, layer)
    if not all(reaches(spec, pos, a.base, b.base) for a, b in zip(shards, shards[1:])):
        return None
    sent: list[tuple[Host, attnd.Step]] = []
    totals, is_done, merge = [0, 0, 0, 0], True, None
    with _Watch() as watch:
        try:
            if decoder is None or not decoder.is_of(shards):
                decoder = Decoder(seq, shards)
            if out is not None or not isinstance(lse, bool):
                out, lse, merge = decoder.merging(q, out, lse)  # before anything is sent: they may not fit
            decoder.send(layer, pos, (q, k, v), timeout, sent)
            if merge is None:
                out, lse, merge = decoder.merging(q, out, lse)
        except attnd.AttndError:
            is_done = False
        for host, step in sent:
            try:
                pool._count(totals, watch.wait(host, step))
            except attnd.AttndError:
                is_done = False
    if not is_done:
        return None  # and nobody looks at this decoder's arrays any more
    assert decoder is not None and merge is not None
    if k is not None or v is not None:
        shards[-1]._acknowledged(layer, pos - shards[-1].base, 1, False)
    merge()
    seq.decoder = decoder
    return attnd.Result(out, lse, (0,), *totals)
