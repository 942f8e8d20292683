"""A worker's layers over a lane: planned once per forward pass, or chunk by chunk where that is too
large for one step, then one kernel per layer on the model's own stream, where the daemon computes on
the model's GPU. What a lane cannot do goes the way of all steps, and both may alternate."""

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
    from ..pool import Items
    from ._rows import Packed
    from ._worker import Worker

_log = logging.getLogger("attnd.hf")


class Layers:
    """A worker's lane, opened by the first pass that can use one.

    wanted  True: a lane or an error; False: never; None: where the model is on the daemon's GPU

    A plan is of one pool: there is none for a model of several.
    """

    def __init__(self, worker: Worker, wanted: bool | None):
        self._worker = worker
        self._wanted = wanted
        self.is_refused = wanted is False or len(worker.pools.all) > 1
        self._lane: Lane | None = None
        self._out: Any = None  # where the lane leaves outputs
        self._order = [worker.pools.places[layer][1] for layer in sorted(worker.seen)]
        self._plan: Packed | None = None  # of the pass that is on its way
        self._n_enqueued = len(self._order)  # of its layers
        self._stream: Any = None  # where layers were enqueued that may not be finished
        self._n_recorded: int | None = None  # layers of a pass that is being captured
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None  # whose passes go over the lane

    @property
    def is_used(self) -> bool:
        return self._lane is not None

    @property
    def lane(self) -> Lane | None:
        return self._lane

    def _open(self, device: torch.device) -> Lane | None:
        if self._lane is not None or self.is_refused:
            return self._lane
        if self._wanted is None and device.type != "cuda":
            self.is_refused = True
            return None
        try:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    lane = self._worker.client.open_lane()
            else:
                lane = self._worker.client.open_lane()
        except AttndError as e:
            if self._wanted:
                raise
            _log.info("no lane, layers go through the host: %s", e)
            self.is_refused = True
            return None
        if lane.is_host != (device.type == "cpu"):
            _log.info("no lane: the daemon computes on the CPU, the model is on %s", device)
            lane.close()
            self.is_refused = True
            return None
        self._lane = lane
        self._out = bytes_at(lane.out_address, lane.out_bytes, device)
        return lane

    def _fits(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
        """Whether a layer is in the lane's memory as a whole."""
        lane, size = self._lane, q.element_size()
        assert lane is not None
        in_bytes = (q.numel() + k.numel() + v.numel()) * size
        out_bytes = q.shape[0] * q.shape[1] * v.shape[2] * size
        return in_bytes + 192 <= lane.in_bytes and out_bytes + 64 <= lane.out_bytes

    def _begin(self, plan: Packed) -> bool:
        """Plans a pass. False: it goes the other way."""
        assert self._lane is not None
        try:
            if not self._tell(self._lane, plan.chunks[0].items[0], self._order):
                return False
        except InvalidArgumentError:  # later layers lag, as in drafts that the first ones make
            return False
        self._plan, self._n_enqueued = plan, 0
        return True

    def _tell(self, lane: Lane, items: Items, layers: list[int]) -> bool:
        """The daemon plans layers. False: the lane is closed."""
        is_left = self._n_enqueued < len(self._order)  # a pass ended half way
        if is_left:
            self.wait()
        try:
            lane.plan(self._worker.pool, items, layers=layers, is_restart=is_left)
        except OverloadedError:  # the host is far ahead of the device
            self.wait()
            lane.plan(self._worker.pool, items, layers=layers)
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
        self._n_enqueued = len(self._order)
        return True

    def attend(
        self, layer: int, plan: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | None:
        """The output of a pool's layer, there until the next layer; None: not over the lane."""
        with self._lock:
            if not self._is_ours():
                return None
            out = self._attend(layer, plan, q, k, v)
            if out is None:
                self.wait()  # a step is to find what came before it done
            return out

    def _is_ours(self) -> bool:
        """An output is there until the next layer: one thread uses the lane, as long as it lives."""
        now = threading.current_thread()
        if self._thread is None or not self._thread.is_alive():
            self._thread = now
        return self._thread is now

    def _attend(
        self, layer: int, plan: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | None:
        if self._n_recorded is not None:
            return self._record(layer, q, k, v)
        if self.is_refused:
            return None
        stream = torch.cuda.current_stream(q.device) if q.is_cuda else None
        if stream != self._stream:
            self.wait()
        if self._open(q.device) is None:
            return None
        if len(plan.chunks) != 1 or not self._fits(q, k, v):
            return self._attend_chunks(layer, plan, q, k, v, stream)
        if layer == self._order[0]:
            if not self._begin(plan):
                return None
        elif self._plan is not plan or self._order[self._n_enqueued % len(self._order)] != layer:
            return None  # what is planned is given up by the next pass
        self._stream = stream
        try:
            out = self._enqueue(q, k, v)
        except (ConnectionLostError, TimedOutError):
            self.close()
            return None
        self._n_enqueued += 1
        return out

    def _attend_chunks(
        self, layer: int, plan: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stream: Any
    ) -> torch.Tensor | None:
        """A layer of a prompt, a plan for each of its chunks, which the library cuts further where the
        lane's memory is too small."""
        lane = self._lane
        assert lane is not None
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        number = stream.cuda_stream if stream is not None else 0
        for chunk in plan.chunks:
            items = chunk.items[0]
            if not self._tell(lane, items, [layer]):
                return None
            self._stream = stream
            rows = slice(chunk.first, chunk.first + items.n_tokens)
            at = [x[rows].data_ptr() for x in (q, k, v, out)]
            try:
                lane.enqueue(
                    self._worker.pool, items.n_tokens, at[0], at[1], at[2], at[3], stream=number
                )
            except (ConnectionLostError, TimedOutError):
                self.close()
                return None
        return out

    def _enqueue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lane = self._lane
        assert lane is not None
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        n, heads, dim = q.shape[0], q.shape[1], v.shape[2]
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        lane.enqueue(self._worker.pool, n, q.data_ptr(), k.data_ptr(), v.data_ptr(), stream=stream)
        size = n * heads * dim * q.element_size()
        return self._out[:size].view(q.dtype).view(n, heads, dim)  # type: ignore[no-any-return]

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
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        n = self._n_recorded
        assert n is not None
        if n == len(self._order) or self._order[n] != layer:
            raise UnsupportedError(f"attnd.hf: a captured pass has layer {layer} out of its order")
        self._n_recorded = n + 1
        return self._enqueue(q, k, v)

    def replay(self, plan: Packed, run: Callable[[], Any]) -> Any:
        """run(), which enqueues all layers of a pass; None: it has to go another way."""
        with self._lock:
            if self._lane is None or len(plan.chunks) != 1 or not self._is_ours():
                return None
            stream = torch.cuda.current_stream() if not self._lane.is_host else None
            if stream != self._stream:
                self.wait()
            if not self._tell(self._lane, plan.chunks[0].items[0], self._order):
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
            if self._lane is not None:
                self._lane.check()

    def close(self) -> None:
        """A new lane is opened when one is needed again."""
        with self._lock:
            self.wait()
            lane, self._lane, self._out, self._plan = self._lane, None, None, None
            self._n_enqueued = len(self._order)
            if lane is not None:
                lane.close()
