"""The pool of a model: its spec from what the layers asked for, and finding or making one large enough.

A pool keeps its size and its memory until the daemon ends, so that workers share what is there.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ..client import Client
from ..errors import AlreadyExistsError, NotFoundError, OutOfMemoryError, SessionGoneError
from ..pool import Pool
from ..spec import PoolSpec
from ._calls import Seen
from ._handed import refuse
from ._states import States

BLOCK_TOKENS = 16  # the daemon's, of a spec with block_tokens 0
_DEFAULT_TOKENS, _LEAST_TOKENS = 8192, 256
_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def pool_spec(model: Any, seen: dict[int, Seen], *, name: str, **options: Any) -> PoolSpec:
    """What the layers asked for as a pool, of no size yet."""
    order = sorted(seen)  # the pool's layers are those that attend
    if not order:
        raise refuse("a model no layer of which attends through its cache")
    if order != list(range(len(order))) and not States(model.config.get_text_config()).layers:
        raise refuse(f"layers {order} attend, and what the others do is not known")
    geometry = seen[order[0]].geometry
    for layer, s in sorted(seen.items()):
        for what, value in s.geometry.items():
            if value != geometry[what]:
                raise refuse(
                    f"layer {layer} has {what} {value}, layer {order[0]} has {geometry[what]}: a pool has one"
                )
    if geometry["dtype"] not in _DTYPES:
        raise refuse(f"dtype {geometry['dtype']}")
    layers = tuple(seen[i].spec() for i in order)
    config = model.config
    spec = PoolSpec(
        name=name,
        num_layers=len(order),
        num_q_heads=geometry["query heads"],
        num_kv_heads=geometry["KV heads"],
        head_dim_k=geometry["head_dim of k"],
        head_dim_v=geometry["head_dim of v"],
        q_dtype=_DTYPES[geometry["dtype"]],
        layers=layers[:1] if all(layer == layers[0] for layer in layers) else layers,
        model=getattr(config, "_name_or_path", "") or config.model_type,
        **options,
    )
    if spec.name:
        return spec
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
    return spec._replace(name=f"{config.model_type}-{digest}")


class PoolMaker:
    """Finds or makes a pool of a spec; again after the daemon was restarted.

    n_blocks  at least; 0: as many as there are, or the default size
    is_named  the name is the user's: no other is made up
    """

    def __init__(self, client: Client, spec: PoolSpec, n_blocks: int, is_named: bool):
        self._client = client
        self._spec = spec
        self._n_blocks = n_blocks
        self._is_named = is_named

    def make(self) -> Pool:
        spec = self._spec
        have = self._size_of(spec.name)
        if have is not None and have < self._n_blocks:
            if self._is_named:
                raise AlreadyExistsError(
                    f"pool {spec.name!r} has {have} blocks, {self._n_blocks} are asked for: pools keep"
                    f" their size until the daemon ends; take n_blocks={have} or another name"
                )
            spec = spec._replace(name=f"{spec.name}-{self._n_blocks}")
            have = self._size_of(spec.name)
        if have is not None:
            return self._client.create_pool(spec)  # checks that it is the same but for its size
        if self._n_blocks > 0:
            return self._client.create_pool(spec._replace(n_blocks=self._n_blocks))
        return self._make_default(spec)

    def _make_default(self, spec: PoolSpec) -> Pool:
        """The default size, or half of it as often as memory for it is missing."""
        block_tokens = spec.block_tokens or BLOCK_TOKENS
        n_tokens = _DEFAULT_TOKENS
        while True:
            try:
                return self._client.create_pool(spec._replace(n_blocks=n_tokens // block_tokens))
            except OutOfMemoryError:
                if n_tokens // 2 < max(_LEAST_TOKENS, block_tokens):
                    raise
                n_tokens //= 2

    def _size_of(self, name: str) -> int | None:
        try:
            with self._client.pool(name) as pool:
                return pool.spec.n_blocks
        except SessionGoneError:
            raise
        except NotFoundError:
            return None
