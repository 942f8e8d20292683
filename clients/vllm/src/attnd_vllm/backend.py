"""vLLM's attention backend over attnd: a layer is a step of the pool, vLLM keeps no K and V."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

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

from attnd.serving.requests import Requests

from . import settings
from .lane import Metadata, OverHost, OverLane, graph_sizes
from .versions import SmallPages, keep_chunked_backend, rank_and_size
from .worker import model_name, shared

_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
keep_chunked_backend()


class AttndBackend(SmallPages, AttentionBackend):
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
        return head_size % 8 == 0 and 8 <= head_size <= 512


def _layer_spec(impl: AttndImpl) -> attnd.LayerSpec:
    chunk = impl.chunk_tokens
    return attnd.LayerSpec(
        scale=impl.scale,
        branches=((chunk, 1),) if chunk else (),  # a branch that takes every token of its piece
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
        for field in "num_heads", "num_kv_heads", "head_size", "v_in_k":
            if getattr(impl, field) != getattr(first, field):
                raise ValueError(
                    f"attnd-vllm: layer {i} has {field} {getattr(impl, field)}, layer 0 has"
                    f" {getattr(first, field)}: all layers must be alike"
                )
    model = model_name(config, shared.weights)
    if first.v_in_k > 0:  # the same model may be served with its heads expanded
        model += " latents"
    digest = hashlib.sha256(model.encode()).hexdigest()[:16]  # those of other models have other pools
    rank, size = rank_and_size()
    name = settings.pool_name() or f"vllm-{digest}-{block_tokens}-{n_pool}"
    return attnd.PoolSpec(
        name=name if size == 1 else f"{name}-{rank}of{size}",
        num_layers=len(impls),
        num_q_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim_k=first.head_size,
        head_dim_v=first.v_in_k,
        block_tokens=block_tokens,
        n_blocks=n_pool,
        q_dtype=_DTYPES[config.model_config.dtype],
        layers=[_layer_spec(impl) for impl in impls],
        model=model,
        is_v_in_k=first.v_in_k > 0,
    )


def _places(layers: dict[str, Any], ordered: list[str]) -> dict[str, int]:
    """Each layer's place in the pool, by name. One that reads another's K and V has that one's.

    Raises ValueError where it attends otherwise than that one.
    """
    with_kv = [n for n in ordered if layers[n].impl.reads_from is None]
    places = {name: i for i, name in enumerate(with_kv)}
    for name in ordered:
        impl = layers[name].impl
        if impl.reads_from is not None:
            its, target = layers[impl.reads_from].impl, impl.reads_from
            if (_layer_spec(impl), impl.num_heads) != (_layer_spec(its), its.num_heads):
                raise ValueError(
                    f"attnd-vllm does not support {name}, which reads the K and V of {target} and attends"
                    " otherwise (scale, window, heads)"
                )
            places[name] = places[target]
    return places


class AttndBuilder(AttentionMetadataBuilder):
    reorder_batch_threshold = None
    layer_type: ClassVar[Any] = Attention

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if shared.requests is not None:
            raise ValueError("attnd-vllm: the model has several groups of KV caches")
        layers = get_layers_from_vllm_config(vllm_config, self.layer_type, layer_names)
        ordered = sorted(layer_names, key=extract_layer_index)
        for layer in layers.values():  # of ChunkedLocalAttention
            layer.impl.chunk_tokens = getattr(layer, "attention_chunk_size", None) or 0
        n_blocks = vllm_config.cache_config.num_gpu_blocks_override
        lane, sizes = shared.lane, graph_sizes(vllm_config)
        if lane is not None:  # the tokens that fill a graph have a block each
            n_blocks += max([2, *(b - a for a, b in zip([0, *sizes], sizes))])
        shared.layers = _places(layers, ordered)
        with_kv = [layers[n].impl for n in ordered if layers[n].impl.reads_from is None]
        if lane is not None and len(with_kv) < len(ordered):
            raise ValueError("attnd-vllm does not support layers that read another's K and V over a lane")
        spec = pool_spec(with_kv, vllm_config, kv_cache_spec.block_size, n_blocks)
        shared.block_tokens = spec.block_tokens
        is_async = vllm_config.scheduler_config.async_scheduling
        shared.requests = Requests(
            shared.client,
            lambda client: client.create_pool(spec),
            n_blocks if settings.pool_blocks() > 0 else 0,
            is_alone=rank_and_size()[1] == 1,
            # what another step, which is on its way, reads can't be given up
            gives_up=not is_async,
        )
        if lane is None:
            shared.way = OverHost(shared.requests)
        else:
            n_graph = sizes[-1] if sizes else 0
            shared.way = OverLane(shared.requests, lane, n_graph, is_ahead=is_async)
            shared.way.warm(torch.device(device))

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        if shared.lane is not None:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        c = common_attn_metadata
        rows = shared.batch.rows(c) if shared.is_in_step else []
        if rows:
            shared.latest = frozenset(r.request for r in rows)
            step, n_tokens = shared.requests.step(rows), rows[-1].start + rows[-1].n
            is_uniform = all(r.n == rows[0].n for r in rows)
        else:
            step, n_tokens, is_uniform = None, c.num_actual_tokens, True
        shared.metadata = shared.way.plan(step, n_tokens, c.num_actual_tokens, is_uniform)
        return shared.metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Metadata:
        return shared.way.capture(common_attn_metadata.num_actual_tokens)


class AttndImpl(AttentionImpl):
    """Of one layer.

    v_in_k        V's elements of K; 0: it has its own
    reads_from    the layer whose K and V it reads; None: it has its own
    chunk_tokens  of a layer whose tokens see those of their chunk alone; 0: all
    """

    v_in_k = 0
    reads_from: str | None = None
    chunk_tokens = 0

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
        self.reads_from = kv_sharing_target_layer_name
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes, self.sliding_window = alibi_slopes, sliding_window
        self.logits_soft_cap, self.sinks, self.kv_cache_dtype = logits_soft_cap, sinks, kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q, k, v [tokens, heads, head_size] of the step; fills output of the rows that are left. k and v of
        a layer that reads another's are not looked at."""
        m = attn_metadata
        if m is None:  # vLLM measures its memory
            return output.zero_()
        at = shared.layers[layer.layer_name]
        shape = (-1, self.num_heads, self.head_size)
        if self.reads_from is not None:
            key = value = None
        done = shared.way.attend(at, m, query, key, value, output.view(shape))
        return output if done else output.zero_()
