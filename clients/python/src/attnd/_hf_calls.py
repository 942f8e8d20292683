"""How the layers of a HuggingFace model call for attention: the attention and the mask interface
"attnd", which importing this module registers, and what a layer asked for when it was first seen.

A call finds its cache by the update() that came before it on the same thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as TransformersCache

from .errors import UnsupportedError
from .spec import LayerSpec

NAME = "attnd"
# Arguments of attention calls that say nothing about the attention of a decoder with a cache.
_HARMLESS = frozenset(
    "position_ids cache_position use_cache output_hidden_states output_router_logits logits_to_keep"
    " return_dict past_key_values position_embeddings".split()
)
# .made: the (cache, layer) of the update() that comes before attention
call_of_thread = threading.local()


def refuse(what: str) -> UnsupportedError:
    return UnsupportedError(f"attnd.hf: {what}")


class Mask:
    """What the model's layers get for a mask: which mask was meant, not its elements."""

    def __init__(self, window: int, q_offset: int, q_length: int, kv_length: int, padding: Any):
        self.window = window
        self.q_offset = q_offset
        self.q_length = q_length
        self.kv_length = kv_length
        self.padding = padding  # [batch, columns] bool, False is padding, or None


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Mask:
    """The mask interface "attnd"."""
    if not allow_is_causal_skip:  # transformers says so when it adds anything to causal or sliding
        raise refuse("a mask besides causal, sliding window and padding (packed or bidirectional)")
    if kwargs.get("allow_is_bidirectional_skip"):
        raise refuse("a bidirectional mask")
    return Mask(local_size or 0, int(q_offset), q_length, kv_length, attention_mask)


class Seen:
    """How one layer called for attention."""

    def __init__(self, query: Any, key: Any, value: Any, mask: Mask, call: dict[str, Any]):
        self.geometry = {
            "query heads": query.shape[1],
            "KV heads": key.shape[1],
            "head_dim of k": query.shape[3],
            "head_dim of v": value.shape[3],
            "dtype": query.dtype,
        }
        self.window = mask.window
        self.scale = call.get("scaling")
        self.soft_cap = call.get("softcap")
        self.sinks = call.get("s_aux")
        self.sinks_version = None if self.sinks is None else self.sinks._version

    def spec(self) -> LayerSpec:
        sinks = self.sinks
        return LayerSpec(
            scale=self.scale or 0.0,
            window_tokens=self.window,
            soft_cap=self.soft_cap or 0.0,
            sink_logits=None if sinks is None else tuple(sinks.detach().float().flatten().tolist()),
        )

    def check(self, layer: int, now: Seen) -> None:
        """Refuses a call that differs from the one the pool was made for."""
        for what in ("geometry", "window", "scale", "soft_cap", "sinks_version"):
            a, b = getattr(self, what), getattr(now, what)
            if a != b:
                raise refuse(f"layer {layer} has {what} {b}, had {a} when the pool was made")


class Probe(TransformersCache):
    """Stands in for a cache while one token shows how the layers call for attention."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.seen: dict[int, Seen] = {}

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        call_of_thread.made = self, layer_idx
        return key_states, value_states

    def attend(self, layer: int, seen: Seen, q: Any, k: Any, v: Any, mask: Mask) -> Any:
        if layer in self.seen:
            raise refuse(f"layer {layer} attends twice in one pass")
        self.seen[layer] = seen
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface "attnd".

    Shapes  query [batch, num_q_heads, new tokens, head_dim_k], key and value of the new tokens
            alike; returns [batch, new tokens, num_q_heads, head_dim_v]
    """
    cache, layer = getattr(call_of_thread, "made", None) or (None, 0)
    call_of_thread.made = None
    if cache is None:
        raise refuse(
            "attention without an attnd cache: pass past_key_values=worker.cache(), or use"
            " worker.generate()"
        )
    if not isinstance(attention_mask, Mask):
        raise refuse(
            "a custom 4D mask, or a model that does not make its masks through transformers'"
            f" mask interface ({type(module).__name__})"
        )
    if dropout:
        raise refuse(f"attention dropout {dropout}: call model.eval()")
    if query.requires_grad and torch.is_grad_enabled():
        raise refuse("gradients: run the model under torch.no_grad()")
    if not (getattr(module, "is_causal", True) and kwargs.pop("is_causal", None) is not False):
        raise refuse(f"layer {layer} is not causal")
    known = {k: kwargs.pop(k, None) for k in ("scaling", "softcap", "s_aux")}
    window = kwargs.pop("sliding_window", None)
    if window and attention_mask.window not in (0, window):
        raise refuse(
            f"layer {layer}: sliding_window {window}, its mask has {attention_mask.window}"
        )
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise refuse(f"the argument {name} of layer {layer}'s attention")
    seen = Seen(query, key, value, attention_mask, known)
    return cache.attend(layer, seen, query, key, value, attention_mask), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
