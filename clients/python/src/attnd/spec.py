"""What a pool is made from."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _lib
from ._handle import text, whole
from ._tensor import DTYPES, NAMES


class LayerSpec(NamedTuple):
    """How one layer attends. All defaults: plain causal attention.

    scale          multiplies q.k; 0: 1 / sqrt(head_dim_k)
    window_tokens  0: unlimited; else the query at position p sees keys (p - window_tokens, p]
    sink_tokens    with a window: this many first tokens stay visible
    soft_cap       0: none; else, 1e-6 to 1000, scores s become soft_cap * tanh(s / soft_cap)
    is_full        not causal: a query sees every token up to the end of its item
    sink_logits    [num_q_heads] floats: exp of each is added to its head's softmax denominator
    alibi_slopes   [num_q_heads] floats: slope * (key position - query position) is added to scores
    branches       dilated attention: (segment_tokens, rate) of each branch; see docs/protocol/step-kinds.md
    """

    scale: float = 0.0
    window_tokens: int = 0
    sink_tokens: int = 0
    soft_cap: float = 0.0
    is_full: bool = False
    sink_logits: Sequence[float] | None = None
    alibi_slopes: Sequence[float] | None = None
    branches: Sequence[tuple[int, int]] = ()


class PoolSpec(NamedTuple):
    """One KV geometry. Clients that name the same pool with the same spec share it.

    name                the pool's, unique in the daemon
    num_layers          layers with a cache of their own
    num_q_heads, num_kv_heads   query heads; a multiple of the key and value heads
    head_dim_k, head_dim_v      elements of a head of q and k, and of v (0: as head_dim_k)
    block_tokens        tokens of a block; 0: 16
    n_blocks            blocks the pool takes; 0: all that is left of the daemon's KV memory
    q_dtype             "f32", "f16" or "bf16": elements of q, k, v and out
    kv_dtype            elements as cached; None: as q_dtype
    is_batch_invariant  results do not depend on what else is computed at the same time
    split               how sequences lie on the daemon's cards, if it has several: "whole", each on
                        one; "heads" or "tokens", each on all, by kv heads or by parts of blocks;
                        "auto": whole, if n_blocks fit a card
    layers              () all plain, one LayerSpec for all, or num_layers of them
    model, rope         what the cached bytes mean; two clients must agree to share a pool
    is_v_in_k           V is the first head_dim_v elements of K, as in latent attention (MLA): steps
                        have no v, the cache stores K alone
    q_nope_dim, out_dim  with is_v_in_k: steps carry heads before and after their projections, which
                        the daemon computes with Pool.weights(): a head's q has q_nope_dim elements
                        and then those with positions (head_dim_k - head_dim_v), its out out_dim; 0:
                        q and out are as the cache has them
    """

    name: str
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int = 0
    block_tokens: int = 0
    n_blocks: int = 0
    q_dtype: str = "f32"
    kv_dtype: str | None = None
    is_batch_invariant: bool = False
    split: str = "auto"
    layers: Sequence[LayerSpec] = ()
    model: str = ""
    rope: str = ""
    is_v_in_k: bool = False
    q_nope_dim: int = 0
    out_dim: int = 0

    @property
    def q_row(self) -> int:
        """Elements of a head's q in a step."""
        return self.q_nope_dim + self.head_dim_k - self.head_dim_v if self.q_nope_dim else self.head_dim_k

    @property
    def out_row(self) -> int:
        """Elements of a head's out."""
        return self.out_dim or self.head_dim_v or self.head_dim_k


SPLITS = ("auto", "whole", "heads", "tokens")


def _split(name: str) -> int:
    if name not in SPLITS:
        raise ValueError(f"split is {name!r}, expected one of {', '.join(SPLITS)}")
    return SPLITS.index(name)


def check_array_dtype(array_dtype: str | None, q_dtype: str) -> None:
    if array_dtype not in (None, q_dtype) and (array_dtype, q_dtype) != ("f32", "bf16"):
        raise ValueError(
            f"array_dtype is {array_dtype!r} and q_dtype {q_dtype!r}: arrays have the q_dtype, or"
            " are f32 with a q_dtype of bf16"
        )


def dtype_number(name: str, field_name: str) -> int:
    if name not in DTYPES:
        raise ValueError(f"{field_name} is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _floats(values: Sequence[float] | None, num_q_heads: int, name: str, keep: list[Any]) -> Any:
    if values is None:
        return None
    if len(values) != num_q_heads:
        raise ValueError(f"{name} has {len(values)} elements, num_q_heads is {num_q_heads}")
    array = (ctypes.c_float * num_q_heads)(*[float(x) for x in values])
    keep.append(array)
    return ctypes.cast(array, ctypes.POINTER(ctypes.c_float))


def _branches(branches: Sequence[tuple[int, int]], keep: list[Any]) -> Any:
    array = (_lib.Branch * len(branches))(
        *[_lib.Branch(whole("segment_tokens", s), whole("rate", r)) for s, r in branches]
    )
    keep.append(array)
    return ctypes.cast(array, ctypes.POINTER(_lib.Branch)) if branches else None


def to_c(spec: PoolSpec) -> tuple[_lib.PoolSpec, list[Any]]:
    """The C struct, and what its pointers need to stay alive."""
    keep: list[Any] = []
    layers = (_lib.Layer * len(spec.layers))()
    for c, layer in zip(layers, spec.layers):
        c.scale = layer.scale
        c.window_tokens = whole("window_tokens", layer.window_tokens)
        c.sink_tokens = whole("sink_tokens", layer.sink_tokens)
        c.soft_cap = layer.soft_cap
        c.is_full = layer.is_full
        c.sink_logits = _floats(layer.sink_logits, spec.num_q_heads, "sink_logits", keep)
        c.alibi_slopes = _floats(layer.alibi_slopes, spec.num_q_heads, "alibi_slopes", keep)
        c.n_branches = len(layer.branches)
        c.branches = _branches(layer.branches, keep)
    keep.append(layers)
    c_spec = _lib.PoolSpec(
        struct_size=ctypes.sizeof(_lib.PoolSpec),
        layer_struct_size=ctypes.sizeof(_lib.Layer),
        name=text("name", spec.name),
        num_layers=whole("num_layers", spec.num_layers),
        num_q_heads=whole("num_q_heads", spec.num_q_heads),
        num_kv_heads=whole("num_kv_heads", spec.num_kv_heads),
        head_dim_k=whole("head_dim_k", spec.head_dim_k),
        head_dim_v=whole("head_dim_v", spec.head_dim_v),
        block_tokens=whole("block_tokens", spec.block_tokens),
        n_blocks=whole("n_blocks", spec.n_blocks),
        q_dtype=dtype_number(spec.q_dtype, "q_dtype"),
        kv_dtype=dtype_number(spec.kv_dtype, "kv_dtype") if spec.kv_dtype else 0,
        is_batch_invariant=spec.is_batch_invariant,
        split=_split(spec.split),
        n_layers=len(spec.layers),
        layers=ctypes.cast(layers, ctypes.POINTER(_lib.Layer)) if spec.layers else None,
        model=text("model", spec.model),
        rope=text("rope", spec.rope),
        is_v_in_k=spec.is_v_in_k,
        q_nope_dim=whole("q_nope_dim", spec.q_nope_dim),
        out_dim=whole("out_dim", spec.out_dim),
    )
    return c_spec, keep


def from_c(c: _lib.PoolSpec) -> PoolSpec:
    def floats(p: Any) -> tuple[float, ...] | None:
        return tuple(p[: c.num_q_heads]) if p else None

    return PoolSpec(
        name=c.name.decode(),
        num_layers=c.num_layers,
        num_q_heads=c.num_q_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim_k=c.head_dim_k,
        head_dim_v=c.head_dim_v,
        block_tokens=c.block_tokens,
        n_blocks=c.n_blocks,
        q_dtype=NAMES[c.q_dtype],
        kv_dtype=NAMES[c.kv_dtype],
        is_batch_invariant=bool(c.is_batch_invariant),
        split=SPLITS[c.split],
        layers=tuple(
            LayerSpec(
                scale=layer.scale,
                window_tokens=layer.window_tokens,
                sink_tokens=layer.sink_tokens,
                soft_cap=layer.soft_cap,
                is_full=bool(layer.is_full),
                sink_logits=floats(layer.sink_logits),
                alibi_slopes=floats(layer.alibi_slopes),
                branches=tuple(
                    (b.segment_tokens, b.rate)
                    for b in (layer.branches[: layer.n_branches] if layer.n_branches else ())
                ),
            )
            for layer in (c.layers[: c.n_layers] if c.n_layers else ())
        ),
        model=c.model.decode(),
        rope=c.rope.decode(),
        is_v_in_k=bool(c.is_v_in_k),
        q_nope_dim=c.q_nope_dim,
        out_dim=c.out_dim,
    )
