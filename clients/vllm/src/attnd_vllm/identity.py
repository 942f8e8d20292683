"""What a request's K and V depend on besides token ids: blocks are shared only where it is equal."""

from __future__ import annotations

import hashlib
import os
from typing import Any

_PIECE = 1 << 22  # bytes of a file that are read at once


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
