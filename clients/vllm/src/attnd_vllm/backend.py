"""vLLM's attention backend over attnd: a layer is a step of the pool, vLLM keeps no K and V."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import attnd
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from attnd.serving.requests import Requests, Row, Step

from . import settings
from .worker import connect, model_name, shared

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class AttndBackend(AttentionBackend):
    forward_includes_kv_cache_update = True
    supported_dtypes = list(_DTYPES)
    supported_kv_cache_dtypes = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttndImpl]:
        return AttndImpl

    @staticmethod
    def get_builder_cls() -> type[AttndBuilder]:
        return AttndBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM's own pages: one element for each block and layer, as little as they may have."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)


def _layer_spec(impl: AttndImpl) -> attnd.LayerSpec:
    return attnd.LayerSpec(
        scale=impl.scale,
        window_tokens=impl.sliding_window or 0,
        soft_cap=impl.logits_soft_cap or 0.0,
        sink_logits=None if impl.sinks is None else impl.sinks.float().tolist(),
        alibi_slopes=impl.alibi_slopes,
    )


def pool_spec(impls: list[AttndImpl], config: Any, block_tokens: int, n_blocks: int) -> attnd.PoolSpec:
    """The pool of a model whose attention layers, in order, are impls."""
    first, n_pool = impls[0], settings.pool_blocks() or n_blocks
    if n_pool < n_blocks:
        raise ValueError(
            f"attnd-vllm: ATTND_VLLM_POOL_BLOCKS is {n_pool}, less than the engine's {n_blocks}"
            " (--num-gpu-blocks-override)"
        )
    for i, impl in enumerate(impls):
        for field in "num_heads", "num_kv_heads", "head_size":
            if getattr(impl, field) != getattr(first, field):
                raise ValueError(
                    f"attnd-vllm: layer {i} has {field} {getattr(impl, field)}, layer 0 has"
                    f" {getattr(first, field)}: all layers must be alike"
                )
    model = model_name(config, shared.weights)
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]  # those of other models have other pools
    return attnd.PoolSpec(
        name=settings.pool_name() or f"vllm-{digest}-{block_tokens}-{n_pool}",
        num_layers=len(impls),
        num_q_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim_k=first.head_size,
        block_tokens=block_tokens,
        n_blocks=n_pool,
        q_dtype=_DTYPES[config.model_config.dtype],
        layers=[_layer_spec(impl) for impl in impls],
        model=model,
    )


@dataclass
class AttndMetadata:
    """A step of n_tokens rows of q, k and v."""

    step: Step
    n_tokens: int

    def index(self) -> torch.Tensor | None:
        """The places of the tokens that are computed; None: all of them, in order."""
        rows = self.step.rows
        if sum(r.n for r in rows) == self.n_tokens:
            return None
        return torch.cat([torch.arange(r.start, r.start + r.n) for r in rows])


class AttndBuilder(AttentionMetadataBuilder):
    _cudagraph_support = AttentionCGSupport.NEVER
    reorder_batch_threshold = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if shared.requests is not None:
            raise ValueError("attnd-vllm: the model has several groups of KV caches")
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        ordered = sorted(layer_names, key=extract_layer_index)
        cache = vllm_config.cache_config
        spec = pool_spec(
            [layers[n].impl for n in ordered],
            vllm_config,
            kv_cache_spec.block_size,
            cache.num_gpu_blocks_override,
        )
        shared.layers = {name: i for i, name in enumerate(ordered)}
        shared.block_tokens = spec.block_tokens
        shared.requests = Requests(
            connect("vllm"),
            lambda client: client.create_pool(spec),
            cache.num_gpu_blocks_override if settings.pool_blocks() > 0 else 0,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> AttndMetadata:
        c = common_attn_metadata
        starts = c.query_start_loc_cpu.tolist()
        lens = (c.seq_lens if c.seq_lens_cpu_upper_bound is None else c.seq_lens_cpu_upper_bound).tolist()
        runner, rows = shared.runner, []
        for i, request in enumerate(runner.input_batch.req_ids[: c.num_reqs]):
            n = starts[i + 1] - starts[i]
            if n > 0:
                is_sampled = lens[i] >= runner.requests[request].num_tokens
                rows.append(Row(request, lens[i] - n, n, starts[i], is_sampled))
        return AttndMetadata(shared.requests.step(rows), starts[c.num_reqs])


class AttndImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ):
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attnd-vllm does not support attention of type {attn_type}")
        if kv_sharing_target_layer_name is not None:
            raise ValueError(
                f"attnd-vllm does not support layers that read the K and V of another"
                f" ({kv_sharing_target_layer_name})"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes, self.sliding_window = alibi_slopes, sliding_window
        self.logits_soft_cap, self.sinks, self.kv_cache_dtype = logits_soft_cap, sinks, kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: AttndMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q, k, v [tokens, heads, head_size] of the step; fills output of the rows that are left."""
        m = attn_metadata
        if m is None:  # vLLM measures its memory
            return output.zero_()
        at = shared.layers[layer.layer_name]

        def compute(step: Step) -> None:
            index = m.index()
            if index is None:
                q, k, v = (x[: m.n_tokens].contiguous() for x in (query, key, value))
                shared.requests.pool.step(at, step.items, q, k, v, out=output[: m.n_tokens])
                return
            q, k, v = (x.index_select(0, index) for x in (query, key, value))
            out = torch.empty_like(q)
            shared.requests.pool.step(at, step.items, q, k, v, out=out)
            output.zero_().index_copy_(0, index, out)

        return output if m.step.layer(at, compute) else output.zero_()
