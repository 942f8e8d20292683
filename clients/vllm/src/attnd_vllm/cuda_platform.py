"""The platform class on NVIDIA's GPUs."""

from typing import Any

from vllm.platforms.cuda import CudaPlatform

from .platform import AttndPlatform

_OWN_PAGES_BYTES = 1 << 30  # of vLLM's, at most, where nobody says how much


class AttndCudaPlatform(AttndPlatform, CudaPlatform):
    attnd_worker = "attnd_vllm.cuda_worker.AttndCudaWorker"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        super().apply_config_platform_defaults(vllm_config)
        cache = vllm_config.cache_config
        if cache.kv_cache_memory_bytes is None:  # it isn't measured: --num-gpu-blocks-override decides
            cache.kv_cache_memory_bytes = _OWN_PAGES_BYTES
