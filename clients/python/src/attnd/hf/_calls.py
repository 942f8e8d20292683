"""How the layers of a HuggingFace model call for attention: the attention and the mask interface
"attnd", which importing this module registers, and what a layer asked for when it was first seen.

A call finds its cache by the keys and values that it is given, which are those of Cache.update().
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache as TransformersCache

from ..spec import LayerSpec
from ._handed import Handed, Update, hand, refuse, refuse_attribute
from ._indexed import is_indexed
from ._latent import Absorbed, absorb, is_expansion
from ._states import States

NAME = "attnd"
NOT_CAUSAL_ALONE = "a mask besides causal, sliding window and padding (packed or bidirectional)"
# Arguments of attention calls that say nothing about the attention of a decoder with a cache.
_HARMLESS = frozenset(
    "position_ids cache_position use_cache output_hidden_states output_router_logits logits_to_keep"
    " return_dict past_key_values position_embeddings".split()
)


class Mask:
    """What the model's layers get for a mask: which mask was meant, not its elements.

    refusal  why attention with this mask is refused; a model may make masks that no layer uses
    padding  [batch, columns] bool, False is padding, or None
    chunk    tokens that see each other: those of a row from its first token on, cut into pieces
    """

    __slots__ = ("window", "chunk", "q_offset", "q_length", "kv_length", "padding", "refusal")

    def __init__(
        self,
        window: int,
        q_offset: int,
        q_length: int,
        kv_length: int,
        padding: Any,
        refusal: str | None,
        chunk: int = 0,
    ):
        self.refusal = refusal
        self.window = window
        self.chunk = chunk
        self.q_offset = q_offset
        self.q_length = q_length
        self.kv_length = kv_length
        self.padding = padding

    def __getattr__(self, name: str) -> Any:
        raise refuse_attribute(f"{name} of a mask: the model makes a mask of its own from it")

    def __getitem__(self, index: Any) -> Mask:
        """Of the last queries: layers that share keys and values may leave the others out."""
        whole, n = slice(None), self.q_length
        if isinstance(index, tuple) and len(index) == 4 and isinstance(index[2], slice):
            begin, end, step = index[2].indices(n)
            if index[0] == index[1] == index[3] == whole and (end, step) == (n, 1) and begin < n:
                part = copy.copy(self)
                part.q_offset, part.q_length = self.q_offset + begin, n - begin
                return part
        raise refuse("a part of a mask: the model makes a mask of its own from it")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", func)
        raise refuse(f"{name}() of a mask: the model makes a mask of its own from it")


class IndexedMask(Mask):
    """Of layers with an indexer, which scores against its elements: [batch, 1, queries, keys] bool."""

    __slots__ = ("elements",)

    def __init__(self, elements: torch.Tensor, *mask: Any):
        super().__init__(*mask)
        self.elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self.elements[index]


def _refuse_operator(self: Any, *args: Any) -> Any:
    raise refuse("arithmetic with a mask: the model makes a mask of its own from it")


for _name in "add radd sub rsub mul rmul and rand or ror invert lt le gt ge iter len bool".split():
    setattr(Mask, f"__{_name}__", _refuse_operator)


def _is_chunked(mask_function: Any, size: int, device: Any) -> bool:
    """Whether a mask of local_size `size` is of chunks: one of so many tokens does not see the last."""
    q = torch.arange(1, size + 1, device=device)
    return not bool(mask_function(0, 0, q, q - 1).all())


def _indexed_mask(
    batch_size: int, q_offset: int, q_length: int, kv_length: int, padding: Any, function: Any, device: Any
) -> IndexedMask:
    """A causal mask with its elements; refused where the model's own is another."""
    q = torch.arange(q_offset, q_offset + q_length, device=device).view(1, 1, -1, 1)
    k = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    rows = torch.arange(batch_size, device=device).view(-1, 1, 1, 1)
    causal = (k <= q).expand(batch_size, -1, -1, -1)
    is_causal = torch.equal(function(rows, 0, q, k).expand_as(causal), causal)
    if padding is not None:
        causal = causal & padding[:, None, None, :kv_length].bool()
    refusal = None if is_causal else NOT_CAUSAL_ALONE
    return IndexedMask(causal, 0, q_offset, q_length, kv_length, padding, refusal)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _make_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Any = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Mask:
    """The mask interface "attnd"."""
    positions = kwargs.get("cache_position")  # transformers 5.0: for q_length and q_offset
    if positions is not None:
        q_length, q_offset = positions.shape[0], positions[0]
    if is_indexed(kwargs.get("config")):
        device = kwargs["device"] if positions is None else positions.device
        return _indexed_mask(
            batch_size, int(q_offset), q_length, kv_length, attention_mask, mask_function, device
        )
    refusal = None
    if kwargs.get("allow_is_bidirectional_skip"):
        refusal = "a bidirectional mask"
    elif (
        not allow_is_causal_skip
    ):  # transformers says so when it adds anything to causal or sliding
        refusal = NOT_CAUSAL_ALONE
    window, chunk = local_size or 0, 0
    has_chunks = getattr(kwargs.get("config"), "attention_chunk_size", None) is not None
    if window and has_chunks and refusal is None:
        device = kwargs["device"] if positions is None else positions.device
        if _is_chunked(mask_function, window, device):
            window, chunk = 0, window
    return Mask(window, int(q_offset), q_length, kv_length, attention_mask, refusal, chunk)


def n_queries(given: Any) -> int:
    """What a cache is asked the size of a mask for: a number, in transformers 5.0 their positions."""
    return int(given.shape[0]) if isinstance(given, torch.Tensor) and given.ndim else int(given)


class Seen:
    """How one layer called for attention.

    sinks  of the latest call, until keep_sinks() copies them
    """

    def __init__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        call: dict[str, Any],
        latent: Absorbed | None = None,
    ):
        if not query.dtype == key.dtype == value.dtype:
            raise refuse(
                f"layer {layer} has q, k and v of {query.dtype}, {key.dtype} and {value.dtype}"
                " (autocast? load the model in the dtype it is to compute in)"
            )
        self.geometry: dict[str, Any] = {
            "query heads": query.shape[1],
            "KV heads": key.shape[1],
            "head_dim of k": key.shape[3],
            "head_dim of v": value.shape[3],
            "dtype": query.dtype,
            "V in K": latent is not None,
        }
        self.weights = None if latent is None else latent.weights
        if latent is not None and self.weights is not None:  # heads are projected by the daemon
            out_dim = latent.values_of.shape[1]
            self.geometry["head_dim of q"] = self.weights.shape[1] - out_dim
            self.geometry["head_dim of out"] = out_dim
        self.window, self.chunk = mask.window, mask.chunk
        self.scale = call.get("scaling")
        self.soft_cap = call.get("softcap")
        self.sinks = call.get("s_aux")

    def keep_sinks(self) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.detach().clone()

    def spec(self) -> LayerSpec:
        sinks = self.sinks
        return LayerSpec(
            scale=self.scale or 0.0,
            window_tokens=self.window,
            soft_cap=self.soft_cap or 0.0,
            branches=((self.chunk, 1),) if self.chunk else (),  # one that takes every token
            sink_logits=None if sinks is None else tuple(sinks.float().flatten().tolist()),
        )

    def check(self, layer: int, now: Seen) -> None:
        """Refuses a call that differs from the one the pool was made for."""
        for what, a in self.geometry.items():
            if a != now.geometry[what]:
                raise refuse(
                    f"layer {layer} has {what} {now.geometry[what]}, had {a} when the pool was made"
                )
        for what in ("window", "chunk", "scale", "soft_cap"):
            a, b = getattr(self, what), getattr(now, what)
            if a != b:
                raise refuse(f"layer {layer} has {what} {b}, had {a} when the pool was made")
        if not _is_same(self.sinks, now.sinks):
            raise refuse(
                f"layer {layer} has other sinks than when the pool was made: they were changed after"
                " attach(), or the cache is another model's"
            )


def _is_same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """By value: a version counter does not tell of changes through .data, nor of another tensor."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a, b.detach().to(a))


class Probe(TransformersCache):
    """Stands in for a cache while one token shows how the layers call for attention.

    absorbs  latents are to be stored as they are, where a layer's heads are made of them (_latent.py)
    absorbs_there  the daemon is to project the heads of such layers
    """

    absorbs = True
    absorbs_there = False

    def __init__(self, config: Any) -> None:
        self.states = States(config)
        TransformersCache.__init__(self, layers=self.states.layers)
        self.seen: dict[int, Seen] = {}

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        if layer_idx in self.seen:
            raise refuse(f"layer {layer_idx} attends twice in one pass")
        return hand(self, layer_idx, key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        return indexer_key_states

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return n_queries(query_length), 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def is_absorbed(self, module: Any, key: Handed, value: Handed) -> bool:
        return self.absorbs and is_expansion(module, key, value)

    def attend(
        self, update: Update, seen: Seen, q: Any, k: Any, v: Any, mask: Mask, indices: Any = None
    ) -> Any:
        if update.is_stored:
            self.seen[update.layer].check(update.layer, seen)
        else:
            seen.keep_sinks()
            self.seen[update.layer] = seen
            update.is_stored = True
        dim = seen.geometry.get("head_dim of out", v.shape[3])
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dim)


def _refuse_transforms(*tensors: torch.Tensor) -> None:
    """Refuses what follows operations of torch: the daemon's is none."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise refuse("gradients: run the model under torch.no_grad()")
    if any(_is_wrapped(x) for x in tensors):
        raise refuse("transforms of torch.func (grad, jvp, vmap) and tensors that stand for others")
    if forward_ad._current_level >= 0:
        unpack: Any = forward_ad.unpack_dual
        if any(unpack(x).tangent is not None for x in tensors):
            raise refuse("gradients of forward-mode AD")
    jit: Any = torch.jit
    if jit.is_tracing() or get_proxy_mode() is not None:
        raise refuse("tracing (torch.jit.trace, make_fx): the trace would have this pass's numbers")


def _is_wrapped(x: torch.Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return type(x) is not torch.Tensor and not isinstance(x, torch.nn.Parameter)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface "attnd".

    Shapes  query [batch, num_q_heads, new tokens, head_dim_k], key and value of the new tokens
            alike; returns [batch, new tokens, num_q_heads, head_dim_v]
    """
    paged = kwargs.pop("cache", None)  # continuous batching, before transformers 5.24
    if paged is not None and not hasattr(paged, "attend_packed"):
        raise refuse(f"continuous batching with a {type(paged).__name__}: not attnd's")
    if isinstance(key, Handed) and hasattr(key.update.cache, "attend_packed"):
        paged = key.update.cache
        if not (isinstance(value, Handed) and value.update is key.update):
            raise refuse(f"layer {key.update.layer} attends with the values of another layer")
        latent = absorb(module, query, key, value, paged.absorbs_there)
        if latent is not None and paged.is_absorbed(module, key, value):
            query, key, value = latent[:3]
            out = paged.attend_packed(
                module, query, key, value, attention_mask, dropout, kwargs, latent
            )
            return latent.finish(out), None
        key, value = key.tensor, value.tensor
    if paged is not None:
        out = paged.attend_packed(module, query, key, value, attention_mask, dropout, kwargs)
        return out, None
    if not (isinstance(key, Handed) and isinstance(value, Handed)):
        raise refuse(
            "attention without an attnd cache: pass past_key_values=worker.cache(), or use"
            f" worker.generate() ({type(module).__name__})"
        )
    update = key.update
    layer = update.layer
    if value.update is not update:
        raise refuse(f"layer {layer} attends with the values of another layer")
    if update.is_stored and not (key.is_whole and value.is_whole):
        raise refuse(f"layer {layer} attends twice in one pass, with other keys or values")
    latent = absorb(module, query, key, value, update.cache.absorbs_there)
    if latent is not None and not update.cache.is_absorbed(module, key, value):
        latent = None
    if latent is not None:
        query, key, value = latent[:3]
    else:
        key, value = key.tensor, value.tensor
    if not isinstance(attention_mask, Mask):
        raise refuse(
            "a custom 4D mask, or a model that does not make its masks through transformers'"
            f" mask interface ({type(module).__name__})"
        )
    if attention_mask.refusal is not None:
        raise refuse(attention_mask.refusal)
    if dropout:
        raise refuse(f"attention dropout {dropout}: call model.eval()")
    _refuse_transforms(query, key, value)
    if not (getattr(module, "is_causal", True) and kwargs.pop("is_causal", None) is not False):
        raise refuse(f"layer {layer} is not causal")
    known = {k: kwargs.pop(k, None) for k in ("scaling", "softcap", "s_aux")}
    indices = kwargs.pop("indices", None)  # of an indexer
    window = kwargs.pop("sliding_window", None)
    if window and attention_mask.window not in (0, window):
        raise refuse(
            f"layer {layer}: sliding_window {window}, its mask has {attention_mask.window}"
        )
    for name, given in kwargs.items():
        if name not in _HARMLESS and given is not None and given is not False:
            raise refuse(f"the argument {name} of layer {layer}'s attention")
    n_keys = key.shape[2]
    is_part = update.is_stored and query.shape[2] <= n_keys  # the last tokens of a shared layer
    if value.shape[2] != n_keys or not (query.shape[2] == n_keys or is_part):
        raise refuse(
            f"layer {layer}: {query.shape[2]} queries, {key.shape[2]} new keys,"
            f" {value.shape[2]} new values"
        )
    seen = Seen(layer, query, key, value, attention_mask, known, latent)
    if indices is not None and not isinstance(attention_mask, IndexedMask):
        raise refuse(f"the argument indices of layer {layer}'s attention")
    out = update.cache.attend(update, seen, query, key, value, attention_mask, indices)
    return out if latent is None else latent.finish(out), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
