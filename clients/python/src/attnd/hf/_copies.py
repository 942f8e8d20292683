"""Steps of tensors on a GPU that no lane takes: q, k and v are copied into the message, the output out of
its answer, on the stream that is current."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, List, Tuple

import torch

from .._step import InPlace, Items
from ..errors import AttndError

if TYPE_CHECKING:
    from .._step import Result, Step
    from ..pool import Pool

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
Part = Tuple[Items, List[torch.Tensor], torch.Tensor]  # of a layer: q, k, v (or q alone), and the output

# of an output: so much is copied by the CPU sooner than the GPU is waited for, which may have to be
# another process's before it is this one's
STAGED_BYTES = 1 << 20
IN_FLIGHT = 2  # steps: while the daemon has one, the next is copied


def _at(address: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The host memory there as a tensor."""
    n_bytes = shape.numel() * dtype.itemsize
    memory = (ctypes.c_char * n_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Copies:
    """fill and take of one step.

    copy_ns  copying q, k and v, with the wait for the model to have made them
    """

    def __init__(self, pool: Pool, qkv: list[torch.Tensor], out: torch.Tensor):
        self.copy_ns = 0
        self._qkv, self._out = qkv, out
        self._dtype = DTYPES[pool.spec.q_dtype]
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
        answer = _at(address, self._out.shape, self._dtype)
        if self._stream is None or self._out.nbytes > STAGED_BYTES:
            self._copy([(self._out, answer)])
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            staged = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
            self._out.copy_(staged.copy_(answer), non_blocking=True)


def run_steps(
    pool: Pool, layer: int, parts: Iterable[Part]
) -> Iterator[tuple[Result, int]]:
    """Steps of one layer, in their order. Yields each one's result and copy_ns."""
    in_flight: collections.deque[tuple[Step, Copies]] = collections.deque()

    def wait() -> tuple[Result, int]:
        step, copies = in_flight.popleft()
        return step.wait(), copies.copy_ns

    try:
        for items, qkv, out in parts:
            if len(in_flight) == IN_FLIGHT:
                yield wait()
            copies = Copies(pool, qkv, out)
            prepared = InPlace(layer, items, len(qkv) == 3, copies.fill, copies.take)
            in_flight.append((pool._start(prepared), copies))
        while in_flight:
            yield wait()
    except AttndError:
        for step, _ in in_flight:  # what comes behind a step that failed
            with contextlib.suppress(AttndError):
                step.wait()
        raise
