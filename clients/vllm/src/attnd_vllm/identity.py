"""What K and V depend on besides token ids: blocks are shared only where all of it is equal."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import torch

_PIECE = 1 << 22  # elements that are summed at once


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


class Unknown(Exception):
    """It can't be told what K and V depend on: the request's blocks must not be shared."""


_digests: dict[str, tuple[tuple[Any, ...], bytes]] = {}  # of folders, by when and how large


def _digest_of_folder(path: str) -> bytes:
    """A digest of the files below a folder; kept until one of them changes."""
    files = sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names
    )
    if not files:
        raise Unknown(f"{path} has no files")
    stamps = tuple((f, s.st_mtime_ns, s.st_size) for f in files for s in [os.stat(f)])
    known = _digests.get(path)
    if known is None or known[0] != stamps:
        h = hashlib.sha256()
        for f in files:
            h.update(f"{os.path.relpath(f, path)}\0{os.stat(f).st_size}\0".encode())
            with open(f, "rb") as file:
                while piece := file.read(_PIECE):
                    h.update(piece)
        known = _digests[path] = stamps, h.digest()
    return known[1]


def adapter_of(request: Any) -> int:
    """A number for what the K and V of a vLLM request depend on besides tokens and model; 0: nothing.

    A LoRA by the content of its files, images and the like by their hashes and places, and vLLM's
    cache_salt. Raises Unknown: the request has no ids, or its LoRA no files here.
    """
    if getattr(request, "prompt_embeds", None) is not None:
        raise Unknown("the prompt is given as embeddings")
    parts: list[bytes] = []
    lora = request.lora_request
    if lora is not None:
        if not os.path.isdir(lora.lora_path):
            raise Unknown(f"LoRA {lora.lora_name!r} is no folder here")
        parts.append(b"lora" + _digest_of_folder(lora.lora_path))
    for f in request.mm_features or ():
        p = f.mm_position
        parts.append(f"mm {f.identifier} {p.offset} {p.length}".encode())
    if request.cache_salt:
        parts.append(b"salt " + request.cache_salt.encode())
    if not parts:
        return 0
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(h.digest()[:8], "little") or 1
