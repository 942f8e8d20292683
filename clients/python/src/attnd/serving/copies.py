"""Steps of tensors on a GPU that no lane takes. Small ones go through page-locked buffers; of large ones
q, k and v are copied straight into the message, the output out of its answer."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, List, Tuple

import torch

from .._step import InPlace, Items
from ..errors import AttndError, UnsupportedError

if TYPE_CHECKING:
    from .._step import Result, Step
    from ..pool import Pool

Part = Tuple[Items, List[torch.Tensor], torch.Tensor]  # of a layer: q, k, v (or q and k, or q alone), and the output

_log = logging.getLogger("attnd.serving")

DTYPE_OF = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
IN_FLIGHT = 2  # steps: while the daemon has one, the next is copied
_SMALL_BYTES = 1 << 20  # of q, k and v: the host copies them sooner than Python calls back
HALVES_BYTES = 1 << 20  # of q, k and v: as much or more goes over sockets in two steps


class Staging:
    """Page-locked memory of one client's steps; buffers are a thread's own."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._is_pinned = False

    def run(self, pool: Pool, layer: int, parts: list[Part]) -> Iterator[tuple[Result, int]]:
        """Steps of one layer, in their order, on the current stream. Yields each one's result, and the
        nanoseconds of copying q, k and v, with the wait for the model to have made them.

        Raises what Pool.step() raises.
        """
        if is_small(parts):
            yield from self.steps(pool, layer, parts)
            return
        if not self._is_pinned:
            self._is_pinned = True
            try:
                with torch.cuda.device(parts[0][2].device):
                    pool.client.pin_memory()
            except UnsupportedError as e:
                _log.info("copies from and to the GPU are slower: %s", e)
        yield from run_in_place(pool, layer, parts)

    def _buffer(self, name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
        buffers = self._of_thread.__dict__
        buffer = buffers.get(name)
        if buffer is None or buffer.numel() < n or buffer.dtype != dtype:
            buffer = buffers[name] = torch.empty(n, dtype=dtype, pin_memory=True)
        return buffer[:n]

    def steps(self, pool: Pool, layer: int, parts: list[Part]) -> Iterator[tuple[Result, int]]:
        """Of each part one copy to the host, the step, one copy back, on the current stream: a part is
        copied while the one before it is on its way. Yields each step's result, and the nanoseconds
        before it, with the wait for the model to have made q, k and v.

        The wait before the first step also covers the copies back of the layer before, which may
        still read the buffers.
        """
        try:
            yield from self._steps(pool, layer, parts)
        except BaseException:
            self._of_thread.__dict__.clear()  # one that was interrupted may be written yet
            raise

    def _steps(self, pool: Pool, layer: int, parts: list[Part]) -> Iterator[tuple[Result, int]]:
        start = time.monotonic_ns()
        stream = torch.cuda.current_stream(parts[0][2].device)
        staged: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        for n, (_, qkv, out) in enumerate(parts):
            packed = torch.cat([x.reshape(-1) for x in qkv])
            here = self._buffer(f"in {n}", packed.numel(), out.dtype)
            here.copy_(packed, non_blocking=True)
            pieces = torch.split(here, [x.numel() for x in qkv])
            host = [x.view(y.shape) for x, y in zip(pieces, qkv)]
            host_out = self._buffer(f"out {n}", out.numel(), out.dtype).view(out.shape)
            staged.append((host, host_out, stream.record_event()))
        if len(parts) == 1:
            [(items, _, out)], [(host, host_out, copied)] = parts, staged
            copied.synchronize()
            copy_ns = time.monotonic_ns() - start
            result = pool.step(layer, items, *host, out=host_out)
            out.copy_(host_out, non_blocking=True)
            yield result, copy_ns
            return
        begun: collections.deque[tuple[Step, int, Part, torch.Tensor]] = collections.deque()
        with _to_their_end(begun):
            for part, (host, host_out, copied) in zip(parts, staged):
                copied.synchronize()
                copy_ns = time.monotonic_ns() - start
                step = pool.step_start(layer, part[0], *host, out=host_out)
                begun.append((step, copy_ns, part, host_out))
                start = time.monotonic_ns()
            while begun:
                step, copy_ns, (_, _, out), host_out = begun.popleft()
                result = step.wait()
                out.copy_(host_out, non_blocking=True)
                yield result, copy_ns


@contextlib.contextmanager
def _to_their_end(in_flight: Iterable[tuple[Any, ...]]) -> Iterator[None]:
    """What comes behind a step that failed is waited for; its outputs are nobody's."""
    try:
        yield
    except AttndError:
        for step, *_ in in_flight:
            with contextlib.suppress(AttndError):
                step.wait()
        raise


def is_small(parts: list[Part]) -> bool:
    sizes = [sum(x.nbytes for x in qkv) for _, qkv, _ in parts]
    return len(parts) <= IN_FLIGHT and max(sizes) <= _SMALL_BYTES


def _at(address: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The host memory there as a tensor."""
    n_bytes = shape.numel() * dtype.itemsize
    memory = (ctypes.c_char * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Copies:
    """fill and take of one step in place.

    copy_ns  copying q, k and v, with the wait for the model to have made them
    """

    def __init__(self, pool: Pool, qkv: list[torch.Tensor], out: torch.Tensor):
        self.copy_ns = 0
        self._qkv, self._out = qkv, out
        self._dtype = DTYPE_OF[pool.spec.q_dtype]
        self._stream = torch.cuda.current_stream(out.device) if out.is_cuda else None

    def _copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """What is copied is there when this returns; on any thread."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def fill(self, *addresses: int | None) -> None:
        start = time.monotonic_ns()
        self._copy((_at(a, x.shape, self._dtype), x) for a, x in zip(addresses, self._qkv) if a)
        self.copy_ns += time.monotonic_ns() - start

    def take(self, address: int) -> None:
        self._copy([(self._out, _at(address, self._out.shape, self._dtype))])


def run_in_place(pool: Pool, layer: int, parts: Iterable[Part]) -> Iterator[tuple[Result, int]]:
    """Steps of one layer, in their order. Yields each one's result, without the time of copying q, k
    and v, and that."""
    in_flight: collections.deque[tuple[Step, Copies]] = collections.deque()

    def wait() -> tuple[Result, int]:
        step, copies = in_flight.popleft()
        result = step.wait()
        return result._replace(total_ns=result.total_ns - copies.copy_ns), copies.copy_ns

    with _to_their_end(in_flight):
        for items, qkv, out in parts:
            if len(in_flight) == IN_FLIGHT:
                yield wait()
            copies = Copies(pool, qkv, out)
            prepared = InPlace(layer, items, len(qkv) > 1, copies.fill, copies.take)
            in_flight.append((pool._start(prepared), copies))
        while in_flight:
            yield wait()
