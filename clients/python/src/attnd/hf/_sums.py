"""Sums of the bytes of a model's tensors, made where they are, at about the speed of memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ROW = 4096  # words of 8 bytes


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as int64, in their order."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    return flat.view(torch.int64)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The words as rows, and those left over."""
    words = _words(tensor)
    n = words.numel() // _ROW * _ROW
    return words[:n].view(-1, _ROW), words[n:]


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """One number of what they are and where."""
    at = torch.arange(1, 1 + words.numel(), device=words.device)
    mixed = (words ^ (at * -0x61C8864680B583EB)) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 32)).sum()


@torch.no_grad()
def sum_of(tensor: torch.Tensor) -> int:
    """Of one tensor; two have the same only if they have the same bytes, as far as 64 bits can tell.

    Does not see changes that leave the sums of all rows of 32 KiB, and of their columns, as they were.
    """
    rows, rest = _parts(tensor)
    if len(rows):
        rest = torch.cat([rows.sum(1), rows.sum(0), rest])
    return int(_mixed(rest).item())


@torch.no_grad()
def glance_at(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of all of them, each device's; the same as long as they are, read once.

    Does not see what moves words within rows of 32 KiB, or adds up to nothing there.
    """
    of_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        rows, rest = _parts(tensor)
        of_device.setdefault(tensor.device, []).extend((rows.sum(1), rest))
    return [int(_mixed(torch.cat(parts)).item()) for parts in of_device.values()]
