"""What layers besides attention keep from call to call: the recurrent and convolution states of hybrid
models. They stay on the model's device, in transformers' own cache layers.

A pass that fails midway has changed some of the states already. Repeating it would change them twice,
so that such a cache is refused from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import cache_utils

from ._handed import refuse

# transformers 5.0 keeps these in caches of the models' own
_Linear: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
KINDS = ("linear_attention", "conv", "hybrid") if _Linear is not None else ()


class States:
    """The layers of transformers' own cache for a hybrid model, those that attend left unused.

    layers  [] for a model that is not hybrid
    """

    def __init__(self, config: Any):
        kinds = getattr(config, "layer_types", None) or ()
        self.layers: list[Any] = []
        self._running: set[int] = set()
        if any(kind in KINDS for kind in kinds):
            self.layers = cache_utils.DynamicCache(config=config).layers

    def of(self, layer: int) -> Any:
        """The cache's layer that has the states of this one; None: it has none."""
        found = self.layers[layer] if layer < len(self.layers) else None
        return found if _Linear is not None and isinstance(found, _Linear) else None

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        for layer in self.layers:
            if isinstance(layer, _Linear) and layer.device is not None:
                layer.reorder_cache(torch.tensor(rows, device=layer.device))

    def begin(self, module: Any) -> None:
        """Before the forward of a module."""
        if not self.layers:
            return
        if self._running & {id(module)}:
            raise refuse("a cache with recurrent states, over which an earlier pass failed midway")
        self._running.add(id(module))

    def end(self, module: Any) -> None:
        """After its forward, if nothing was raised."""
        self._running.discard(id(module))
