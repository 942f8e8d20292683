"""vLLM's attention backend for latent attention (MLA): DeepSeek-V2 and V3, and models made like them.

vLLM's MLAAttention layer has both forms: tokens that it counts as prompts attend with expanded keys and
values, those that it counts as decodes in absorbed form, where W_UK is multiplied to the query and W_UV to
the output. attnd stores latents, so here all tokens count as decodes. The pool has one KV head: K is the
latent with the rotated part behind it, V the latent in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from .backend import AttndBackend, AttndBuilder
from .lane import Metadata
from .worker import shared

_MAX_K, _MAX_V = 576, 512  # the daemon's


@dataclass
class LatentMetadata:
    """What the layers of one step need; fields but the first are what vLLM's layer asks for.

    num_actual_tokens  rows of the step, with those that are padding
    """

    of_step: Metadata
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: bool = True


class AttndLatentBackend(AttndBackend):
    forward_includes_kv_cache_update = False  # do_kv_cache_update() is called before forward_mqa()

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[AttndLatentImpl]:  # type: ignore[override]
        return AttndLatentImpl

    @staticmethod
    def get_builder_cls() -> type[AttndLatentBuilder]:
        return AttndLatentBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= _MAX_K


class AttndLatentBuilder(AttndBuilder):
    layer_type: ClassVar[Any] = MLAAttention

    def build(  # type: ignore[override]
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> LatentMetadata:
        c = common_attn_metadata
        of_step = super().build(common_prefix_len, c, fast_build)
        return LatentMetadata(of_step, c.num_actual_tokens, c.num_reqs, c.num_actual_tokens)


class AttndLatentImpl(MLAAttentionImpl):
    """Of one layer. Its new latents are here between the two calls of a step."""

    alibi_slopes = logits_soft_cap = sinks = None
    sliding_window = reads_from = None
    chunk_tokens = 0

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        **of_layer: Any,
    ):
        if attn_type != AttentionType.DECODER:
            raise ValueError(f"attnd-vllm does not support attention of type {attn_type}")
        for name, value in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name),
            ("an indexer", of_layer.get("indexer")),
        ):
            if value is not None:
                raise ValueError(f"attnd-vllm does not support latent attention (MLA) with {name}: {value}")
        for name, value, most in (
            ("kv_lora_rank", kv_lora_rank, _MAX_V),
            ("qk_rope_head_dim", qk_rope_head_dim, _MAX_K - _MAX_V),
        ):
            if value % 8 or not 0 < value <= most:
                raise ValueError(
                    f"attnd-vllm does not support {name} {value}: a multiple of 8, at most {most}"
                )
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, 1, head_size
        self.v_in_k, self.scale, self.kv_cache_dtype = kv_lora_rank, float(scale), kv_cache_dtype
        self._new: torch.Tensor | None = None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """kv_c_normed [tokens, kv_lora_rank], k_pe [tokens, 1, qk_rope_head_dim]."""
        self._new = torch.cat((kv_c_normed.unsqueeze(1), k_pe), dim=-1)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: LatentMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """q [tokens, heads, kv_lora_rank] with its rotated part; gives [tokens, heads, kv_lora_rank],
        zeros for rows that are not computed."""
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        new, self._new = self._new, None
        out = torch.zeros(q.shape[0], self.num_heads, self.v_in_k, dtype=q.dtype)
        if attn_metadata.of_step.step is None:  # a trial of vLLM's
            return out, None
        if new is None:
            raise RuntimeError(f"attnd-vllm: {layer.layer_name} attends before its latents are known")
        at = shared.layers[layer.layer_name]
        shared.way.attend(at, attn_metadata.of_step, q, new, None, out)
        return out, None
