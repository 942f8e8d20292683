"""Stands in for vLLM, as far as attnd-vllm imports it: the interfaces, written down anew, and so much
behind them that a scheduler, a worker and a model of two layers run. Nothing here is vLLM's.

install() puts it into sys.modules, and numpy in the place of torch where torch is not installed.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import sys
import types

import numpy as np


def install() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        from . import torch_of_numpy

        sys.modules["torch"] = torch_of_numpy
    for name, names in _MODULES.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            at = ".".join(parts[:i])
            if at not in sys.modules:
                sys.modules[at] = types.ModuleType(at)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[at])
        for k, v in names.items():
            setattr(sys.modules[name], k, v)


# ---- platforms, configuration


class CpuPlatform:
    device_type = "cpu"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config):
        vllm_config.are_defaults_applied = True

    @classmethod
    def check_and_update_config(cls, vllm_config):
        if getattr(vllm_config.model_config, "use_mla", False):  # as vLLM's own kernels for it need
            vllm_config.cache_config.block_size = 16
            vllm_config.scheduler_config.enable_chunked_prefill = False


class KVTransferConfig:
    def __init__(self, kv_connector, kv_role, kv_load_failure_policy="fail"):
        self.kv_connector, self.kv_role = kv_connector, kv_role
        self.kv_load_failure_policy = kv_load_failure_policy


def get_layers_from_vllm_config(vllm_config, kind, names):
    return {n: vllm_config.layers[n] for n in names if isinstance(vllm_config.layers[n], kind)}


tp = types.SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)

# ---- attention


def poison(*shape):
    return sys.modules["torch"].from_numpy(np.full(shape, np.nan, np.float32))


class Attention:
    def __init__(self, layer_name, impl):
        self.layer_name, self.impl = layer_name, impl

    def forward(self, q, k, v, metadata):
        out = poison(*q.shape)
        self.impl.forward(self, q, k, v, None, metadata, out)
        return out


class MLAAttention:
    """w_uk [heads, nope, rank] and w_uv [heads, rank, v] make keys and values of latents."""

    def __init__(self, layer_name, impl_cls, w_uk, w_uv, n_rotated, scale):
        self.layer_name, self.w_uk, self.w_uv = layer_name, w_uk, w_uv
        heads, self.nope, rank = w_uk.shape
        self.impl = impl_cls(
            num_heads=heads,
            head_size=rank + n_rotated,
            scale=scale,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=None,
            kv_cache_dtype="auto",
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            kv_lora_rank=rank,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=n_rotated,
            qk_head_dim=self.nope + n_rotated,
            v_head_dim=w_uv.shape[2],
            kv_b_proj=None,
            indexer=None,
        )

    def forward(self, q, latents, rotated, metadata):
        """q [tokens, heads, nope and rotated], latents [tokens, rank], rotated [tokens, 1, n_rotated]."""
        self.impl.do_kv_cache_update(latents, rotated, None, np.arange(len(latents)), "auto", 1.0)
        m = metadata
        assert m.num_actual_tokens == m.num_decode_tokens == len(q)
        assert m.num_decodes > 0 and m.num_prefills == 0 and m.decode is not None
        q_nope, q_rotated = q[..., : self.nope], q[..., self.nope :]
        torch = sys.modules["torch"]
        absorbed = torch.from_numpy(np.einsum("thn,hnr->thr", q_nope, self.w_uk).astype(np.float32))
        out, _ = self.impl.forward_mqa((absorbed, q_rotated), None, m, self)
        assert out.shape == absorbed.shape
        return torch.from_numpy(np.einsum("thr,hrv->thv", out, self.w_uv).astype(np.float32))


def extract_layer_index(name):
    (index,) = (int(p) for p in name.split(".") if p.isdecimal())
    return index


class AttentionCGSupport(enum.Enum):
    NEVER, UNIFORM_BATCH = range(2)


class AttentionType:
    DECODER, ENCODER, ENCODER_ONLY = "decoder", "encoder", "encoder_only"


class AttentionBackend:
    pass


class AttentionImpl:
    pass


class MLAAttentionImpl:
    pass


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


class AttentionBackendEnum(enum.Enum):
    CUSTOM = "custom"


registered = {}


def register_backend(which, path):
    registered[which] = path


# ---- KV connectors


class KVConnectorMetadata:
    pass


class KVConnectorHandshakeMetadata:
    pass


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self.vllm_config, self.role = vllm_config, role


class KVConnectorFactory:
    _registry = {}

    @classmethod
    def register_connector(cls, name, module, class_name):
        cls._registry[name] = module, class_name


# ---- the worker


def process_weights_after_loading(model, *args):
    model.is_processed = True


base_loader = types.SimpleNamespace(process_weights_after_loading=process_weights_after_loading)


class CPUWorker:
    """runs: called with a SchedulerOutput, where vLLM's runs its model."""

    def __init__(self, vllm_config, runner, model, runs):
        self.vllm_config, self._runner, self._model, self._runs = vllm_config, runner, model, runs

    def init_device(self):
        self.model_runner = self._runner

    def load_model(self):
        base_loader.process_weights_after_loading(self._model)

    def execute_model(self, scheduler_output):
        return self._runs(scheduler_output)

    def shutdown(self):
        pass


@dataclasses.dataclass(frozen=True)
class Spec:
    """Of a layer's K and V in vLLM's own pages."""

    block_size: int
    dtype: object
    num_head_slots: int = 2
    state_content_bytes: int = 64


_MODULES = {
    "vllm": {},
    "vllm.platforms": {
        "cpu_platform_plugin": lambda: "vllm.platforms.cpu.CpuPlatform",
        "cuda_platform_plugin": lambda: None,
    },
    "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
    "vllm.config": {
        "KVTransferConfig": KVTransferConfig,
        "get_layers_from_vllm_config": get_layers_from_vllm_config,
    },
    "vllm.model_executor.layers.attention": {"Attention": Attention, "MLAAttention": MLAAttention},
    "vllm.model_executor.models.utils": {"extract_layer_index": extract_layer_index},
    "vllm.model_executor.model_loader": {"base_loader": base_loader},
    "vllm.v1.attention.backend": {
        "AttentionBackend": AttentionBackend,
        "AttentionCGSupport": AttentionCGSupport,
        "AttentionImpl": AttentionImpl,
        "AttentionMetadataBuilder": AttentionMetadataBuilder,
        "AttentionType": AttentionType,
        "MLAAttentionImpl": MLAAttentionImpl,
    },
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": register_backend,
    },
    "vllm.distributed.kv_transfer.kv_connector.factory": {"KVConnectorFactory": KVConnectorFactory},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": KVConnectorBase_V1,
        "KVConnectorHandshakeMetadata": KVConnectorHandshakeMetadata,
        "KVConnectorMetadata": KVConnectorMetadata,
    },
    "vllm.distributed.parallel_state": {"get_tp_group": lambda: tp},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.v1.worker.cpu_worker": {"CPUWorker": CPUWorker},
    "vllm.v1.outputs": {
        n: type(n, (), {}) for n in ("AsyncModelRunnerOutput", "KVConnectorOutput", "ModelRunnerOutput")
    },
}
