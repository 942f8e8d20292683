"""Layers whose queries visit what an indexer chooses (DeepSeek-V3.2 and models made like it).

The indexer is the model's: it scores every column against keys of its own and gives the k best of each
query. Its keys are kept here, on the model's device; the steps of attention carry the k best.

It names columns of the batch, padding included, and where a query sees fewer than k also hidden ones.
"""

from __future__ import annotations

from typing import Any

import torch

from ._handed import refuse

KIND = "indexed_attention"


def is_indexed(config: Any) -> bool:
    """Whether layers of a model with this text config have an indexer."""
    return KIND in (getattr(config, "layer_types", None) or ())


class IndexerKeys:
    """Of the layers of one batch: [batch, columns, dim]."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}

    def update(self, layer: int, keys: torch.Tensor, column: int) -> torch.Tensor:
        """With new ones from a column on; what a pass that failed or was taken back has left is dropped."""
        old = self._of.get(layer)
        has = 0 if old is None else old.shape[1]
        if has < column:
            raise refuse(f"layer {layer}: its indexer has keys of {has} columns of {column}")
        self._of[layer] = keys if old is None else torch.cat((old[:, :column], keys), dim=1)
        return self._of[layer]

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] was."""
        for layer, keys in self._of.items():
            self._of[layer] = keys[torch.tensor(rows, device=keys.device)]

    def copy(self) -> IndexerKeys:
        other = IndexerKeys()
        other._of = dict(self._of)  # tensors that nobody changes
        return other


def positions(indices: torch.Tensor, column: int, pads: list[int]) -> torch.Tensor:
    """Chosen columns [batch, new, k] of queries from `column` on, as positions in their sequences; -1
    for those that are padding, or hidden."""
    pad = torch.tensor(pads, device=indices.device).view(-1, 1, 1)
    query = torch.arange(column, column + indices.shape[1], device=indices.device).view(1, -1, 1)
    seen = (indices >= pad) & (indices <= query)
    return torch.where(seen, indices - pad, -1).to(torch.int32)
