"""A decode step that torch.compile() sees as a whole: no cache, no mask and no plan are in it, and a
layer's attention is one operator, which enqueues it on the lane.

_graphs.py makes one of a worker's steps, for attach(graphs=True, compiled=True).
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache as TransformersCache

if TYPE_CHECKING:
    from ._lane import Layers

NO_MASK = -1  # what a pass with this cache says for the first key's position: it needs no mask

_bound: weakref.WeakValueDictionary[int, Layers] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@torch.library.custom_op("attnd::layer", mutates_args=())
def _layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: int, layer: int
) -> torch.Tensor:
    """A layer of the pass that is planned: [batch, heads, 1, head_dim] to [batch, 1, heads, head_dim]."""
    q, k, v = (x[:, :, 0] for x in (q, k, v))
    return _bound[bound].attend_recorded(layer, q, k, v)[:, None]


@_layer.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: int, layer: int) -> torch.Tensor:
    return q.new_empty((q.shape[0], 1, q.shape[1], v.shape[3]))


class CompiledStep(TransformersCache):
    """In place of a cache, in one pass of one token per row."""

    def __init__(self, layers: Layers):
        super().__init__(layers=[])
        self.number = next(_numbers)
        _bound[self.number] = layers

    def update(self, key_states: Any, value_states: Any, *args: Any, **kw: Any) -> Any:
        return key_states, value_states

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return 1, NO_MASK

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def is_compileable(self) -> bool:
        return False

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return torch.ops.attnd.layer(q, k, v, self.number, module.layer_idx)
