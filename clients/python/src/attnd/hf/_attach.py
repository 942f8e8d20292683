"""attach(): what a model needs of attention, the pool made of that, and its attention switched."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import transformers

from .. import client as _client
from ..spec import PoolSpec
from ._calls import Probe, Seen
from ._handed import refuse
from ._switch import Switch
from ._worker import Worker

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def _check_config(config: Any) -> None:
    """Refuses what can be seen in a config; the rest shows in the calls."""
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("encoder-decoder models")
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise refuse(f"layer type {kind!r}; it knows {' and '.join(_LAYER_TYPES)}")
    if getattr(text, "layer_types", None) is None and getattr(text, "attention_chunk_size", None):
        raise refuse("chunked attention (attention_chunk_size)")
    if getattr(text, "num_kv_shared_layers", None):
        raise refuse("layers that share keys and values (num_kv_shared_layers)")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        raise refuse("bidirectional attention")


def _pool_spec(model: Any, seen: dict[int, Seen], options: dict[str, Any]) -> PoolSpec:
    n_layers = len(seen)
    if sorted(seen) != list(range(n_layers)) or n_layers == 0:
        raise refuse(f"layers {sorted(seen)} attend; they must be 0, 1, ...")
    geometry = seen[0].geometry
    for layer, s in sorted(seen.items()):
        for what, value in s.geometry.items():
            if value != geometry[what]:
                raise refuse(
                    f"layer {layer} has {what} {value}, layer 0 has {geometry[what]}: a pool has one"
                )
    if geometry["dtype"] not in _DTYPES:
        raise refuse(f"dtype {geometry['dtype']}")
    layers = tuple(seen[i].spec() for i in range(n_layers))
    config = model.config
    spec = PoolSpec(
        name=options.pop("name") or "",
        num_layers=n_layers,
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
    digest = hashlib.sha256(repr(spec._replace(n_blocks=0)).encode()).hexdigest()[:12]
    return spec._replace(name=f"{config.model_type}-{digest}")


def attach(
    model: Any,
    client: _client.Client | str,
    *,
    name: str | None = None,
    n_blocks: int = 0,
    block_tokens: int = 0,
    kv_dtype: str | None = None,
    is_batch_invariant: bool = False,
) -> Worker:
    """Makes a pool for a causal language model and has the model attend through it.

    model   a transformers model in eval mode, in f32, f16 or bf16, on the CPU or one GPU
    client  an attnd.Client, or a url to connect to
    name    the pool's; None: made of the model's type and geometry
    others  as in PoolSpec; n_blocks 0 takes what is left of the daemon's KV memory

    Raises UnsupportedError for a model that needs what attnd cannot do, naming it, and what
    Client.create_pool() raises.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise refuse(f"transformers {transformers.__version__}: it needs 5 or newer")
    if model.training:
        raise refuse("a model in training mode: call model.eval()")
    _check_config(model.config)
    switch = Switch(model)
    owned: _client.Client | None = None
    try:
        probe = Probe()
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(input_ids=token, past_key_values=probe, use_cache=True)
        options = {
            "name": name,
            "n_blocks": n_blocks,
            "block_tokens": block_tokens,
            "kv_dtype": kv_dtype,
            "is_batch_invariant": is_batch_invariant,
        }
        spec = _pool_spec(model, probe.seen, options)
        if isinstance(client, str):
            client = owned = _client.connect(client)
        pool = client.create_pool(spec)
        return Worker(model, client, pool, owned is not None, switch, probe.seen)
    except BaseException:
        switch.back()
        if owned is not None:
            owned.close()
        raise
