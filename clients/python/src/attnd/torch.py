"""Attention over a lane as a PyTorch operator: works eagerly, under torch.compile, and in a CUDA
graph, where one capture is replayed for every decode step.

    attention = attnd.torch.Attention(lane, pool)
    attention.plan(items)                  # once per step, before its layers or the graph's replay
    for layer in layers:
        out = attention(q, k, v)           # [T, num_q_heads, head_dim_v], on the current stream
    ...
    attention.check()                      # after the stream was waited for

A prompt of more tokens than the lane holds goes in pieces, and can't be captured.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from .lane import Lane
from .pool import Pool

__all__ = ["Attention"]

_bound: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def _out_of(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2]))


@torch.library.custom_op("attnd::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: int) -> torch.Tensor:
    """The next layer of the plan of an Attention; what it appends is in the daemon."""
    return _bound[bound]._enqueue(q.contiguous(), k.contiguous(), v.contiguous())


@_attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: int) -> torch.Tensor:
    return _out_of(q, v)


class Attention:
    """Appends k and v and attends, layer after layer of a lane's plan.

    lane, pool  the caller's, open as long as this is used
    """

    def __init__(self, lane: Lane, pool: Pool):
        self.lane = lane
        self.pool = pool
        self._dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[
            pool.spec.q_dtype
        ]
        self._number = next(_numbers)
        _bound[self._number] = self

    def plan(self, items: Any, **kwargs: Any) -> None:
        """Lane.plan() of this pool."""
        self.lane.plan(self.pool, items, **kwargs)

    def check(self) -> None:
        """Lane.check()."""
        self.lane.check()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, num_q_heads, head_dim_k], k and v [T, num_kv_heads, head_dim] of the next layer."""
        return torch.ops.attnd.attend(q, k, v, self._number)  # type: ignore[no-any-return]

    def _enqueue(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        spec = self.pool.spec
        n = q.shape[0]
        kv_heads = spec.num_kv_heads
        for name, x, shape in (
            ("q", q, (n, spec.num_q_heads, spec.head_dim_k)),
            ("k", k, (n, kv_heads, spec.head_dim_k)),
            ("v", v, (n, kv_heads, spec.head_dim_v)),
        ):
            if x.shape != shape or x.dtype != self._dtype or x.is_cuda == self.lane.is_host:
                place = "the host" if self.lane.is_host else "the lane's GPU"
                raise ValueError(
                    f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}, expected {self._dtype}"
                    f" {shape} on {place}"
                )
        out = _out_of(q, v)
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        self.lane.enqueue(
            self.pool, n, q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), stream=stream
        )
        return out
