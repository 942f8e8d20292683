"""The pools of a model: their specs from what the layers asked for, and finding or making them, large
enough.

Layers of one geometry are in one pool; most models have no other. A pool keeps its size and its memory
as long as any session has it, so that workers share what is there; one that nobody has is made anew by
who wants it larger.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any, NamedTuple

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
_MAX_HEAD_DIM = 512  # the daemon's
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class LayersSpec(NamedTuple):
    """A pool's spec, of no size yet, the model's layers that are in it, and what the daemon projects
    their heads with: nothing, or of each layer."""

    spec: PoolSpec
    layers: list[int]
    weights: list[torch.Tensor]


def pool_specs(model: Any, seen: dict[int, Seen], *, name: str, **options: Any) -> list[LayersSpec]:
    """What the layers asked for as pools."""
    order = sorted(seen)  # the pool's layers are those that attend
    if not order:
        raise refuse("a model no layer of which attends through its cache")
    if order != list(range(len(order))) and not States(model.config.get_text_config()).layers:
        raise refuse(f"layers {order} attend, and what the others do is not known")
    alike: dict[tuple[Any, ...], list[int]] = {}
    for layer in order:
        _check_geometry(layer, seen[layer].geometry)
        alike.setdefault(tuple(seen[layer].geometry.values()), []).append(layer)
    numbered = [f"{name}.{i}" for i in range(len(alike))]
    names = numbered if name and len(alike) > 1 else [name] * len(alike)
    made = []
    for n, layers in zip(names, alike.values()):
        weights = [_on_host(w) for i in layers if (w := seen[i].weights) is not None]
        spec = _spec(model.config, {i: seen[i] for i in layers}, weights, name=n, **options)
        made.append(LayersSpec(spec, layers, weights))
    return made


def _on_host(weights: torch.Tensor) -> torch.Tensor:
    """Those of a model on a GPU are copied once."""
    return weights.detach().cpu().contiguous()


def _digest_of(weights: list[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for layer in weights:
        digest.update(layer.view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_geometry(layer: int, geometry: dict[str, Any]) -> None:
    if geometry["dtype"] not in DTYPES:
        raise refuse(f"dtype {geometry['dtype']}")
    for what in ("head_dim of k", "head_dim of v"):
        n = geometry[what]
        if geometry["V in K"]:  # absorb() has looked
            continue
        if n % 8 != 0 or n > _MAX_HEAD_DIM:
            raise refuse(f"layer {layer} has {what} {n}: a multiple of 8, at most {_MAX_HEAD_DIM}")


def _spec(
    config: Any,
    seen: dict[int, Seen],
    weights: list[torch.Tensor],
    *,
    name: str,
    q_dtype: str | None,
    **options: Any,
) -> PoolSpec:
    """Of layers that have one geometry. Weights are part of what names the model: a pool has those of
    one, and nobody else is asked for its own. They come first, as refusals show 80 bytes of it."""
    layers = tuple(s.spec() for s in seen.values())
    geometry = next(iter(seen.values())).geometry
    model = getattr(config, "_name_or_path", "") or config.model_type
    spec = PoolSpec(
        name=name,
        num_layers=len(layers),
        num_q_heads=geometry["query heads"],
        num_kv_heads=geometry["KV heads"],
        head_dim_k=geometry["head_dim of k"],
        head_dim_v=geometry["head_dim of v"],
        q_dtype=q_dtype or DTYPES[geometry["dtype"]],
        layers=layers[:1] if all(layer == layers[0] for layer in layers) else layers,
        model=f"{_digest_of(weights)} {model}" if weights else model,
        is_v_in_k=geometry["V in K"],
        q_nope_dim=geometry.get("head_dim of q", 0),
        out_dim=geometry.get("head_dim of out", 0),
        **options,
    )
    if spec.name:
        return spec
    digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
    return spec._replace(name=f"{config.model_type}-{digest}")


class _PoolMaker:
    """Finds or makes a pool of a spec; again after the daemon was restarted.

    n_blocks  at least; 0: as many as there are, or the default size
    is_named  the name is the user's: no other is made up
    """

    def __init__(
        self,
        client: Client,
        spec: PoolSpec,
        n_blocks: int,
        is_named: bool,
        array_dtype: str | None,
        wire_dtype: str | None,
    ):
        self._client = client
        self._spec = spec
        self._dtypes = {"array_dtype": array_dtype, "wire_dtype": wire_dtype}
        self._n_blocks = n_blocks
        self._is_named = is_named

    def make(self) -> Pool:
        spec = self._spec
        pool = self._find_or_make(spec)
        if pool is None and self._is_named:
            raise AlreadyExistsError(
                f"pool {spec.name!r} has fewer than {self._n_blocks} blocks and is in use: take fewer"
                " n_blocks or another name"
            )
        if pool is None:
            pool = self._find_or_make(spec._replace(name=f"{spec.name}-{self._n_blocks}"))
        assert pool is not None  # the number in its name is its size
        return pool

    def _find_or_make(self, spec: PoolSpec) -> Pool | None:
        """None: there is one that is too small, and in use."""
        with contextlib.ExitStack() as found:  # held until its handle is made
            have = self._size_of(spec.name, found)
            if have is not None and have >= self._n_blocks:
                return self._create(spec)  # checks that it is the same but for its size
        if self._n_blocks == 0:
            return self._make_default(spec)
        try:
            return self._create(spec._replace(n_blocks=self._n_blocks))
        except AlreadyExistsError:
            if have is None:
                raise
            return None

    def _create(self, spec: PoolSpec) -> Pool:
        return self._client.create_pool(spec, **self._dtypes)

    def _make_default(self, spec: PoolSpec) -> Pool:
        """The default size, or half of it as often as memory for it is missing."""
        block_tokens = spec.block_tokens or BLOCK_TOKENS
        n_tokens = _DEFAULT_TOKENS
        while True:
            try:
                return self._create(spec._replace(n_blocks=n_tokens // block_tokens))
            except OutOfMemoryError:
                if n_tokens // 2 < max(_LEAST_TOKENS, block_tokens):
                    raise
                n_tokens //= 2

    def _size_of(self, name: str, found: contextlib.ExitStack) -> int | None:
        try:
            return found.enter_context(self._client.pool(name)).spec.n_blocks
        except SessionGoneError:
            raise
        except NotFoundError:
            return None


class Pools:
    """A model's pools, there as a whole or not at all.

    all     in the order in which layers first use them
    places  of each layer: which pool, and which layer of it
    """

    def __init__(
        self,
        client: Client,
        specs: list[LayersSpec],
        n_blocks: int,
        is_named: bool,
        array_dtype: str | None,
        wire_dtype: str | None,
    ):
        self.places = {
            layer: (i_pool, i_layer)
            for i_pool, (_, layers, _) in enumerate(specs)
            for i_layer, layer in enumerate(layers)
        }
        self._makers = [
            _PoolMaker(client, spec, n_blocks, is_named, array_dtype, wire_dtype)
            for spec, _, _ in specs
        ]
        self._weights = [weights for _, _, weights in specs]
        self.all = self._make()

    def _make(self) -> list[Pool]:
        pools: list[Pool] = []
        try:
            for maker, weights in zip(self._makers, self._weights):
                pools.append(maker.make())
                for layer, of_layer in enumerate(weights):
                    pools[-1].weights(layer, of_layer)
        except BaseException:
            for pool in pools:
                pool.close()
            raise
        return pools

    def remake(self) -> None:
        """After the daemon was restarted."""
        old, self.all = self.all, self._make()
        for pool in old:
            pool.close()

    def longest(self, columns: dict[int, int]) -> list[int]:
        """The most columns that a layer of each pool has."""
        most = [0] * len(self.all)
        for layer, (i_pool, _) in self.places.items():
            most[i_pool] = max(most[i_pool], columns[layer])
        return most

    def close(self) -> None:
        """Lets go of them. A daemon that does not answer is asked once."""
        is_heard = True
        for pool in self.all:
            is_heard = pool._close(releases=is_heard)
