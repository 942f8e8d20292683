"""What a model's K and V mean: engines share them only where this is equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_PIECE = 1 << 22  # elements that are summed at once
# Of a model's config, what says where it was read from, and by what.
_NO_PART = frozenset(("_name_or_path", "transformers_version"))


def _words(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as integers."""
    flat = t.detach().contiguous().reshape(-1)
    widths = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(widths.get(flat.element_size(), torch.uint8))


def _sum(t: torch.Tensor) -> tuple[int, int]:
    """Two sums, modulo 2^64, of all elements by their places: a change of any one changes both.

    On the tensor's device, at the speed of its memory.
    """
    words, at = _words(t), 0
    sums = [0, 0]
    while at < words.numel():
        w = words[at : at + _PIECE].to(torch.int64)
        place = torch.arange(at, at + w.numel(), device=w.device, dtype=torch.int64)
        place = place * 0x5851F42D4C957F2D + 0x14057B7EF767814F
        mixed = (w + 1) * (place | 1)
        sums[0] += int(mixed.sum())
        sums[1] += int((mixed ^ (mixed >> 29)).mul_(0x2545F4914F6CDD1D).sum())
        at += w.numel()
    return sums[0] & (1 << 64) - 1, sums[1] & (1 << 64) - 1


def digest_of_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of named parameters and buffers: names, types, shapes and every element."""
    h = hashlib.sha256()
    for name, t in tensors:
        h.update(f"{name}\0{t.dtype}\0{tuple(t.shape)}\0{_sum(t)}\n".encode())
    return h.hexdigest()


def model_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """All that a model computes with; buffers that are no part of its state are among them."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def model_name(weights: str, dtype: Any, quantization: Any, config: Mapping[str, Any]) -> str:
    """A text for PoolSpec.model. weights is digest_of_weights(), config the HuggingFace model's."""
    means = {k: v for k, v in config.items() if k not in _NO_PART}
    return f"{weights} {dtype} {quantization} {json.dumps(means, sort_keys=True, default=str)}"
