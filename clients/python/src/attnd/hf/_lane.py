"""A worker's layers over lanes, one for each of its pools: planned once per forward pass, or chunk by
chunk where that is too large for one step, then one kernel per layer on the model's own stream, where
the daemon computes on the model's GPU. What a lane cannot do goes the way of all steps, and both may
alternate."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import (
    AttndError,
    ConnectionLostError,
    InvalidArgumentError,
    OverloadedError,
    TimedOutError,
    UnsupportedError,
)
from ..lane import Lane
from ..torch import bytes_at

if TYPE_CHECKING:
    from ..pool import Items, Pool
    from ._rows import Packed
    from ._worker import Worker

_log = logging.getLogger("attnd.hf")


class _PoolLane:
    """The lane of one pool's layers.

    order       these layers, as a pass calls for them
    plan        of the pass that is on its way
    n_enqueued  layers of that pass
    """

    def __init__(self, lane: Lane, pool: Pool, order: list[int], device: torch.device):
        self.lane, self.pool, self.order = lane, pool, order
        self.plan: Packed | None = None
        self.n_enqueued = len(order)
        self._out = bytes_at(lane.out_address, lane.out_bytes, device)

    @property
    def is_left(self) -> bool:
        """Whether the pass ended half way."""
        return self.n_enqueued < len(self.order)

    def is_next(self, layer: int, plan: Packed) -> bool:
        return self.plan is plan and self.is_left and self.order[self.n_enqueued] == layer

    def fits(self, qkv: list[torch.Tensor], dim: int) -> bool:
        """Whether a layer, whose output has dim elements a head, is in the lane's memory as a whole."""
        q = qkv[0]
        in_bytes = sum(x.numel() for x in qkv) * q.element_size()
        out_bytes = q.shape[0] * q.shape[1] * dim * q.element_size()
        return in_bytes + 192 <= self.lane.in_bytes and out_bytes + 64 <= self.lane.out_bytes

    def enqueue(self, qkv: list[torch.Tensor], dim: int) -> torch.Tensor:
        """The output, where the lane leaves it."""
        qkv = [x.contiguous() for x in qkv]
        q = qkv[0]
        n, heads = q.shape[:2]
        at = [x.data_ptr() for x in qkv]
        self.lane.enqueue(self.pool, n, *at, stream=_number(_stream_of(q)))
        size = n * heads * dim * q.element_size()
        return self._out[:size].view(q.dtype).view(n, heads, dim)  # type: ignore[no-any-return]

    def enqueue_into(self, out: torch.Tensor, qkv: list[torch.Tensor]) -> None:
        at = [x.data_ptr() for x in qkv] + [0] * (3 - len(qkv)) + [out.data_ptr()]
        self.lane.enqueue(self.pool, out.shape[0], *at, stream=_number(_stream_of(out)))


def _stream_of(x: torch.Tensor) -> Any:
    return torch.cuda.current_stream(x.device) if x.is_cuda else None


def _number(stream: Any) -> int:
    return stream.cuda_stream if stream is not None else 0


class Layers:
    """A worker's lanes, all of them opened by the first pass that can use them.

    wanted  True: lanes or an error; False: never; None: where the model is on the daemon's GPU, has one
            pool and no layers that only attend: with those, lanes have not been tried on a GPU
    """

    def __init__(self, worker: Worker, wanted: bool | None):
        self._worker = worker
        self._wanted = wanted
        self.is_refused = wanted is False or (wanted is None and len(worker.pools.all) > 1)
        self._lanes: list[_PoolLane] = []  # of each pool
        self._order = [worker.pools.places[layer] for layer in sorted(worker.seen)]
        self._stream: Any = None  # where layers were enqueued that may not be finished
        self._n_recorded: int | None = None  # layers of a pass that is being captured
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None  # whose passes go over the lanes

    @property
    def is_used(self) -> bool:
        return bool(self._lanes)

    @property
    def lane(self) -> Lane | None:
        """The first pool's; another one where lanes were opened anew."""
        return self._lanes[0].lane if self._lanes else None

    def _open(self, device: torch.device) -> bool:
        if self._lanes or self.is_refused:
            return not self.is_refused
        if self._wanted is None and device.type != "cuda":
            self.is_refused = True
            return False
        lanes: list[Lane] = []
        try:
            with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
                for _ in self._worker.pools.all:
                    lanes.append(self._worker.client.open_lane())
        except AttndError as e:
            for lane in lanes:
                lane.close()
            if self._wanted:
                raise
            _log.info("no lane, layers go through the host: %s", e)
            self.is_refused = True
            return False
        if lanes[0].is_host != (device.type == "cpu"):
            _log.info("no lane: the daemon computes on the CPU, the model is on %s", device)
            for lane in lanes:
                lane.close()
            self.is_refused = True
            return False
        for i, (lane, pool) in enumerate(zip(lanes, self._worker.pools.all)):
            order = [layer for i_pool, layer in self._order if i_pool == i]
            self._lanes.append(_PoolLane(lane, pool, order, device))
        return True

    def _begin(self, i_pool: int, plan: Packed) -> bool:
        """Plans a pool's layers of a pass. False: they go the other way."""
        own = self._lanes[i_pool]
        try:
            if not self._tell(own, plan.chunks[0].items[i_pool], own.order):
                return False
        except InvalidArgumentError:  # later layers lag, as in drafts that the first ones make
            return False
        own.plan, own.n_enqueued = plan, 0
        return True

    def _tell(
        self, own: _PoolLane, items: Items, layers: list[int], is_append: bool = True
    ) -> bool:
        """The daemon plans layers. False: the lanes are closed."""
        is_left = own.is_left
        if is_left:
            self.wait()
        try:
            try:
                own.lane.plan(
                    own.pool, items, layers=layers, is_append=is_append, is_restart=is_left
                )
            except OverloadedError:  # the host is far ahead of the device
                self.wait()
                own.lane.plan(own.pool, items, layers=layers, is_append=is_append)
        except ConnectionLostError:
            self.close()  # a step finds out what became of the session
            return False
        except UnsupportedError as e:  # sequences on other cards than the first
            if self._wanted:
                raise
            _log.info("no lane, layers go through the host: %s", e)
            self.close()
            self.is_refused = True
            return False
        own.n_enqueued = len(own.order)
        return True

    def attend(
        self, i_pool: int, layer: int, plan: Packed, qkv: list[torch.Tensor], head_dim_v: int
    ) -> torch.Tensor | None:
        """The output of a pool's layer, there until the pool's next one; None: not over the lane.
        qkv is q alone where the others are in the cache, and without v where that is in k."""
        with self._lock:
            if not self._is_ours():
                return None
            out = self._attend(i_pool, layer, plan, qkv, head_dim_v)
            if out is None:
                self.wait()  # a step is to find what came before it done
            return out

    def _is_ours(self) -> bool:
        """Outputs are there until the next layers: one thread uses the lanes, as long as it lives."""
        now = threading.current_thread()
        if self._thread is None or not self._thread.is_alive():
            self._thread = now
        return self._thread is now

    def _attend(
        self, i_pool: int, layer: int, plan: Packed, qkv: list[torch.Tensor], head_dim_v: int
    ) -> torch.Tensor | None:
        if self._n_recorded is not None:
            return self._record(i_pool, layer, qkv, head_dim_v)
        if len(qkv) == 1 and self._wanted is None:
            self.refuse("layers of this model share keys and values")
        if self.is_refused:
            return None
        stream = _stream_of(qkv[0])
        if stream != self._stream:
            self.wait()
        if not self._open(qkv[0].device):
            return None
        own = self._lanes[i_pool]
        if len(qkv) == 1 or len(plan.chunks) != 1 or not own.fits(qkv, head_dim_v):
            return self._attend_chunks(i_pool, layer, plan, qkv, head_dim_v, stream)
        if layer == own.order[0]:
            if not self._begin(i_pool, plan):
                return None
        elif not own.is_next(layer, plan):
            return None  # what is planned is given up by the next pass
        self._stream = stream
        try:
            out = own.enqueue(qkv, head_dim_v)
        except (ConnectionLostError, TimedOutError):
            self.close()
            return None
        own.n_enqueued += 1
        return out

    def _attend_chunks(
        self,
        i_pool: int,
        layer: int,
        plan: Packed,
        qkv: list[torch.Tensor],
        head_dim_v: int,
        stream: Any,
    ) -> torch.Tensor | None:
        """A layer with a plan of its own: one that only attends; of a prompt, a plan for each of its
        chunks, which the library cuts further where the lane's memory is too small."""
        own = self._lanes[i_pool]
        qkv = [x.contiguous() for x in qkv]
        q = qkv[0]
        out = q.new_empty(q.shape[0], q.shape[1], head_dim_v)
        for chunk in plan.chunks:
            items = chunk.items[i_pool]
            if not self._tell(own, items, [layer], is_append=len(qkv) > 1):
                return None
            self._stream = stream
            rows = slice(chunk.first, chunk.first + items.n_tokens)
            try:
                own.enqueue_into(out[rows], [x[rows] for x in qkv])
            except (ConnectionLostError, TimedOutError):
                self.close()
                return None
        return out

    # ---- captured passes

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """The layers of one pass are captured: nothing is planned, and nothing runs."""
        with self._lock:
            self.wait()
            self._n_recorded = 0
            try:
                yield
            finally:
                self._n_recorded = None

    def check_recorded(self) -> None:
        """At the end of a pass that is captured."""
        if self._n_recorded != len(self._order):
            raise UnsupportedError(
                f"attnd.hf: a captured pass called for attention {self._n_recorded} times, expected"
                f" {len(self._order)}"
            )

    def _record(
        self, i_pool: int, layer: int, qkv: list[torch.Tensor], head_dim_v: int
    ) -> torch.Tensor:
        n = self._n_recorded
        assert n is not None
        if len(qkv) == 1:
            raise UnsupportedError(
                "attnd.hf: graphs=True, and layers of this model share keys and values"
            )
        if n == len(self._order) or self._order[n] != (i_pool, layer):
            raise UnsupportedError(
                f"attnd.hf: a captured pass has layer {layer} of pool {i_pool} out of its order"
            )
        self._n_recorded = n + 1
        return self._lanes[i_pool].enqueue(qkv, head_dim_v)

    def replay(self, plan: Packed, run: Callable[[], Any]) -> Any:
        """run(), which enqueues all layers of a pass; None: it has to go another way."""
        with self._lock:
            if not self._lanes or len(plan.chunks) != 1 or not self._is_ours():
                return None
            stream = torch.cuda.current_stream() if not self._lanes[0].lane.is_host else None
            if stream != self._stream:
                self.wait()
            for i, own in enumerate(self._lanes):
                if not self._tell(own, plan.chunks[0].items[i], own.order):
                    return None
            self._stream = stream
            return run()

    def refuse(self, why: str) -> None:
        """Never over a lane from now on."""
        with self._lock:
            if self._wanted and not self.is_refused:
                raise UnsupportedError(f"attnd.hf: lane=True, and {why}")
            self.is_refused = True
            self.close()

    def wait(self) -> None:
        """Until what was enqueued is finished: what comes by other ways is to find it done."""
        with self._lock:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.synchronize()

    def check(self) -> None:
        """Waits, and raises what failed."""
        with self._lock:
            self.wait()
            for own in self._lanes:
                own.lane.check()

    def close(self) -> None:
        """New lanes are opened when they are needed again."""
        with self._lock:
            self.wait()
            lanes, self._lanes = self._lanes, []
            for own in lanes:
                own.lane.close()
