"""Refuses by name what would be computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .live import shared

# of SGLang's server arguments: the value that attnd serves
_SERVED = {
    "device": ("cpu",),
    "tp_size": (1,),
    "pp_size": (1,),
    "dp_size": (1,),
    "enable_dp_attention": (False,),
    "attn_cp_size": (1,),
    "dcp_size": (1,),
    "speculative_algorithm": (None,),
    "kv_cache_dtype": ("auto",),
    "enable_lora": (None, False),
    "lora_paths": (None, [], {}),
    "disaggregation_mode": ("null",),
    "enable_hierarchical_cache": (False,),
    "enable_lmcache": (False,),
    "enable_flexkv": (False,),
    "enable_streaming_session": (False,),
    "enable_two_batch_overlap": (False,),
    "dllm_algorithm": (None,),
    "prefill_attention_backend": (None, "attnd"),
    "decode_attention_backend": (None, "attnd"),
}


def refuse(what: str, instead: str = "") -> None:
    raise ValueError(f"attnd-sglang does not support {what}{f': {instead}' if instead else ''}")


def check_args(args: Any) -> None:
    """Raises ValueError, naming the option, for server arguments that attnd can't serve."""
    for name, served in _SERVED.items():
        value = getattr(args, name, served[0])
        if value not in served:
            refuse(f"{name} {value!r}")
    if args.radix_cache_backend != "attnd":
        refuse("SGLang's own prefix cache", "--radix-cache-backend attnd goes with the backend")
    if args.disable_radix_cache:
        refuse("--disable-radix-cache")
    if args.max_total_tokens is None:
        refuse("a cache whose size is not given", "--max-total-tokens is that of the pool")
    if args.page_size is None or args.page_size < 8 or args.page_size % 8 != 0:
        refuse(f"page_size {args.page_size}", "--page-size is a block's: 16, 32 or 64")


def n_running(info: Any, runner: Any) -> int:
    """How many requests may run at a time: SGLang's own number, or as many as the daemon allows.
    Raises ValueError where more were asked for."""
    n = int(runner.max_running_requests)
    for setting, most in (
        ("engine.max_step_items", info.max_step_items),
        ("cache.max_sequences", info.max_sequences),
    ):
        if n <= most or most == 0:  # 0: a daemon that does not say
            continue
        if runner.server_args.max_running_requests is not None:
            raise ValueError(
                f"attnd-sglang: max_running_requests is {n}, more than the daemon's {setting},"
                f" which is {most}: change either"
            )
        n = most
    return n


def _check_latents(config: Any) -> None:
    text = config.hf_text_config
    if getattr(text, "index_topk", None) is not None:
        refuse("latent attention (MLA) with an indexer", f"index_topk is {text.index_topk}")
    for name, most in ("kv_lora_rank", 512), ("qk_rope_head_dim", 64):
        value = getattr(config, name)
        if value % 8 or not 0 < value <= most:
            refuse(f"{name} {value}", f"a multiple of 8, at most {most}")


def check_model(runner: Any, layers: list[Any]) -> None:
    """Raises ValueError for a model whose attention, layer by layer, is not attnd's."""
    if runner.use_mla_backend:
        _check_latents(runner.model_config)
    if runner.is_hybrid_swa:
        refuse("a pool of its own for sliding layers", "--disable-hybrid-swa-memory")
    if not layers:
        refuse("a model without attention layers")
    if [layer.layer_id for layer in layers] != list(range(len(layers))):
        refuse("a model in which not every layer has attention, or one layer has two")
    for layer in layers:
        where = f"(layer {layer.layer_id})"
        if layer.is_cross_attention or layer.attn_type.value != "decoder":
            refuse(f"attention that is not causal {where}")
        if layer.xai_temperature_len > 0:
            refuse(f"attention with a temperature by position {where}")
        if layer.use_irope:
            refuse(f"attention in chunks {where}")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            refuse(f"logits capped by {layer.logit_capping_method} {where}")
        for field in "tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim":
            if getattr(layer, field) != getattr(layers[0], field):
                refuse(
                    f"layers that are not alike: {field} {getattr(layer, field)} {where},"
                    f" {getattr(layers[0], field)} (layer 0)"
                )


def keep_weights(update: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Around SGLang's updates of weights, which return whether they did, and what to say."""
    if shared.live is None:
        return update(*args, **options)
    return False, "attnd-sglang: weights can't change, the cache has K and V of these"
