"""Attention over a lane as a PyTorch operator: works eagerly, under torch.compile, and in a CUDA
graph, where one capture is replayed for every decode step.

    attention = attnd.torch.Attention(lane, pool)
    attention.plan(items)                       # once per step, before its layers or a replay
    for layer in layers:
        out = attention(q, k, v)                # [T, num_q_heads, head_dim_v], on the current stream
        attention(q, k, v, out=o, layer=2)      # written to o, and only if layer 2 is the next one
    ...
    attention.check()                           # after the stream was waited for

The operator is torch.ops.attnd.attend(q, k, v, out!, layer, number): it writes `out` and nothing else
that PyTorch knows of. What it appends is in the daemon.

A prompt of more tokens than the lane holds goes in pieces, and can't be captured.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch

from .lane import Lane
from .pool import Pool

__all__ = ["Attention"]

_bound: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NEXT = -1  # whatever layer the plan has next
_ALIGN = 16  # bytes, of tensors and strides that a lane reads

_library = torch.library.Library("attnd", "DEF")
_library.define(
    "attend(Tensor q, Tensor k, Tensor? v, Tensor(a!) out, int layer, int number) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    out: torch.Tensor,
    layer: int,
    number: int,
) -> None:
    attention = _bound.get(number)
    if attention is None:
        raise ValueError(f"attnd::attend: number is {number}, no such Attention is there any more")
    attention.enqueue(q, k, v, out, None if layer == _NEXT else layer)


_library.impl("attend", _attend, "CPU")
_library.impl("attend", _attend, "CUDA")


@torch.library.register_fake("attnd::attend", lib=_library)
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: Optional[torch.Tensor],
    out: torch.Tensor,
    layer: int,
    number: int,
) -> None:
    torch._check(out.dim() == 3, lambda: f"out has {out.dim()} dimensions, expected 3")
    torch._check(
        out.shape[:2] == q.shape[:2] and (v is None or out.shape[2] == v.shape[2]),
        lambda: f"out is {tuple(out.shape)}: not q's tokens and heads, and v's dimension",
    )


# it appends, too: not to be dropped where nobody reads its output
torch.fx.node.has_side_effect(torch.ops.attnd.attend.default)


class _DeviceBytes:
    """Memory that is there, for torch.as_tensor."""

    def __init__(self, address: int, n_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def bytes_at(address: int, n_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the device that somebody else has, as bytes."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceBytes(address, n_bytes), device=device)


def _by_tokens(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x, or a copy, [tokens, heads, dim], in which a token's heads follow each other; and the bytes from
    a token to the next, 0 where they follow each other, too."""
    if x.data_ptr() % _ALIGN == 0:
        if x.is_contiguous():
            return x, 0
        size, (_, heads, dim) = x.element_size(), x.shape
        stride = x.stride(0) * size
        is_whole = x.stride(2) == 1 and (heads == 1 or x.stride(1) == dim)
        if is_whole and stride >= heads * dim * size and stride % _ALIGN == 0:
            return x, stride
    return x.clone(memory_format=torch.contiguous_format), 0


def check_tensors(
    expected: Iterable[tuple[str, Optional[torch.Tensor], tuple[int, ...]]],
    dtype: torch.dtype,
    is_there: Callable[[torch.Tensor], bool],
    place: str,
) -> None:
    """Raises ValueError for the first of (name, tensor, shape) that is another. is_there: it is at `place`."""
    for name, x, shape in expected:
        if x is None or x.shape != shape or x.dtype != dtype or not is_there(x):
            what = "missing" if x is None else f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{name} is {what}, expected {dtype} {shape} on {place}")


class Attention:
    """Appends k and v and attends, layer after layer of a lane's plan.

    lane, pool  the caller's, open as long as this is used
    """

    def __init__(self, lane: Lane, pool: Pool):
        self.lane = lane
        self.pool = pool
        self._dtype = DTYPES[pool.spec.q_dtype]
        self._number = next(_numbers)
        _bound[self._number] = self
        self._order: list[int] = []  # the latest plan's layers
        self._n_enqueued = 0  # of them, not counting those of replayed graphs

    def plan(self, items: Any, *, layers: Any = None, **kwargs: Any) -> None:
        """Lane.plan() of this pool, once the layers of the plan before it are enqueued or replayed."""
        order = list(range(self.pool.spec.num_layers) if layers is None else layers)
        self.lane.plan(self.pool, items, layers=order, **kwargs)
        self._order, self._n_enqueued = order, 0

    def check(self) -> None:
        """Lane.check()."""
        self.lane.check()

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        layer: int | None = None,
    ) -> torch.Tensor:
        """q [T, num_q_heads, head_dim_k or spec.q_row], k and v [T, num_kv_heads, head_dim] of the next layer.

        v      None in a pool whose V is in K
        out    [T, num_q_heads, head_dim_v or out_dim], contiguous: written, and returned; None: a new one
        layer  which layer of the pool this is; None: whatever is next

        Raises ValueError for other shapes, dtypes or devices, and for a layer that is not the next
        one of the plan; what Lane.enqueue() does.
        """
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], self.pool.spec.out_row))
        torch.ops.attnd.attend(q, k, v, out, _NEXT if layer is None else layer, self._number)
        return out

    def enqueue(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        out: torch.Tensor,
        layer: int | None = None,
    ) -> None:
        """What the operator does, for callers that are inside of one of their own."""
        spec, n = self.pool.spec, q.shape[0]
        kv_heads = spec.num_kv_heads
        if (v is None) != spec.is_v_in_k:
            raise ValueError(f"v is {'missing' if v is None else 'given, the pool has it in k'}")
        expected = [
            ("q", q, (n, spec.num_q_heads, spec.q_row)),
            ("k", k, (n, kv_heads, spec.head_dim_k)),
            ("v", v, (n, kv_heads, spec.head_dim_v)),
            ("out", out, (n, spec.num_q_heads, spec.out_row)),
        ]
        if v is None:
            del expected[2]
        place = "the host" if self.lane.is_host else "the lane's GPU"
        check_tensors(expected, self._dtype, lambda x: x.is_cuda != self.lane.is_host, place)
        if not out.is_contiguous():
            raise ValueError(f"out has strides {out.stride()}: expected it to be contiguous")
        is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_captured:  # a graph's layers are those of plans to come
            self._expect(layer)
        (q, q_stride), (k, k_stride) = _by_tokens(q), _by_tokens(k)
        v, v_stride = (None, 0) if v is None else _by_tokens(v)
        stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
        self.lane.enqueue(
            self.pool,
            n,
            q.data_ptr(),
            k.data_ptr(),
            0 if v is None else v.data_ptr(),
            out.data_ptr(),
            stream=stream,
            strides=(q_stride, k_stride, v_stride),
        )
        self._n_enqueued += not is_captured

    def _expect(self, layer: int | None) -> None:
        if layer is None:
            return
        left = self._order[self._n_enqueued :]
        if not left or left[0] != layer:
            raise ValueError(
                f"layer is {layer}, the plan's next one is {left[0] if left else 'none'}"
            )
