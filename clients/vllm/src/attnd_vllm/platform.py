"""vLLM's platform with attnd in it: sets what the rest of the package needs, and refuses by name
what would be computed wrongly."""

from __future__ import annotations

from typing import Any

from . import settings, versions

_LATENT_VERSIONS = ("0.32.0",)  # whose MLAAttention latent.py was written for
_ROTARY = "+rotary_embedding", "-rotary_embedding"


def _refuse(what: str, instead: str = "") -> None:
    raise ValueError(f"attnd-vllm does not support {what}{f': {instead}' if instead else ''}")


def check_config(c: Any, device_type: str = "cpu") -> None:
    """Raises ValueError, naming the option, for a configuration that attnd can't serve."""
    parallel, model = c.parallel_config, c.model_config
    n_ranks = getattr(parallel, "tensor_parallel_size", 1)
    settings.endpoint(0, n_ranks)
    if device_type == "cpu" and getattr(c, "use_v2_model_runner", False):
        _refuse("model runner V2 on CPUs", "VLLM_USE_V2_MODEL_RUNNER=0 selects V1")
    for name in "pipeline_parallel_size", "decode_context_parallel_size":
        if getattr(parallel, name, 1) > 1:
            _refuse(f"{name} {getattr(parallel, name)}")
    if c.speculative_config is not None and c.speculative_config.method != "ngram":
        _refuse(f"speculative method {c.speculative_config.method!r}", "ngram is supported")
    if c.cache_config.cache_dtype != "auto":
        _refuse(f"kv_cache_dtype {c.cache_config.cache_dtype!r}")
    if c.kv_transfer_config is not None and c.kv_transfer_config.kv_connector not in (
        None,
        "AttndConnector",
    ):
        _refuse(f"the KV connector {c.kv_transfer_config.kv_connector!r} beside its own")
    if getattr(c.model_config, "enable_sleep_mode", False):
        _refuse("sleep mode")
    if model is None:
        return
    if c.cache_config.num_gpu_blocks_override is None:
        _refuse(
            "a cache whose size is not given",
            "--num-gpu-blocks-override is the number of blocks of the pool",
        )
    if getattr(model, "use_mla", False):
        _check_latent(c, device_type)
    if getattr(model, "is_hybrid", False):
        _refuse("models with states beside their K and V (Mamba and the like)")
    if getattr(model, "is_encoder_decoder", False):
        _refuse("encoder-decoder models")
    if model.runner_type != "generate":
        _refuse(f"runner {model.runner_type!r}")


def _check_latent(c: Any, device_type: str) -> None:
    """A model with latent attention."""
    if device_type != "cpu":
        _refuse("latent attention (MLA) on GPUs", "on CPUs it does")
    if versions.found() not in (*_LATENT_VERSIONS, None):
        _refuse(f"latent attention (MLA) with vLLM {versions.found()}", "it does with 0.32.0")
    if getattr(c, "lora_config", None) is not None:
        _refuse("LoRA with latent attention (MLA)", "vLLM absorbs kv_b_proj without its adapters")
    text = c.model_config.hf_text_config
    if getattr(text, "index_topk", None) is not None or getattr(text, "model_type", "") == "deepseek_v4":
        _refuse("sparse latent attention (an indexer)")


class AttndPlatform:
    """Part of a platform class, before vLLM's own."""

    attnd_worker: str
    device_type: str

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        from vllm.config import KVTransferConfig  # which asks for the platform as it is imported

        check_config(vllm_config, cls.device_type)
        cache = vllm_config.cache_config
        cache.enable_prefix_caching = False  # attnd's takes its place
        if not cache.user_specified_block_size:
            cache.block_size = 32
            cache.user_specified_block_size = True
        if not (settings.is_async() and cls.device_type == "cuda"):
            vllm_config.scheduler_config.async_scheduling = False
        vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = True
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="AttndConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        )
        vllm_config.parallel_config.worker_cls = cls.attnd_worker
        super().apply_config_platform_defaults(vllm_config)  # type: ignore[misc]

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """With latent attention: vLLM's own on CPUs has blocks of 16 tokens and no chunks of prompts, attnd's
        has both as they are asked for; and the layer rotates a part of each query, which vLLM's kernel
        takes for a whole one."""
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        asked = cache.block_size, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        super().check_and_update_config(vllm_config)  # type: ignore[misc]
        if getattr(vllm_config.model_config, "use_mla", False):
            cache.block_size, scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = asked
            ops = vllm_config.compilation_config.custom_ops
            ops[:] = [op for op in ops if op not in _ROTARY] + [_ROTARY[1]]

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_sparse:
            _refuse("sparse attention")
        if attn_selector_config.use_mla:
            return "attnd_vllm.latent.AttndLatentBackend"
        return "attnd_vllm.backend.AttndBackend"
