"""attach(): what a model needs of attention, the pool made of that, and its attention switched."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from .. import client as _client
from .._handle import whole
from ..errors import AttndError, UnsupportedError
from ._calls import Probe
from ._handed import refuse
from ._indexed import KIND, is_indexed
from ._minimax import cache_class
from ._named import with_cache
from ._pool import BLOCK_TOKENS, LayersSpec, Pools, pool_specs
from ._prefix import Sharing
from ._states import KINDS, States
from ._switch import Switch
from ._worker import Worker

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", *KINDS, KIND, "moe", "mlp")


def _check_config(config: Any) -> None:
    """Refuses what can be seen in a config; the rest shows in the calls."""
    if getattr(config, "is_encoder_decoder", False):
        raise refuse("encoder-decoder models")
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise refuse(f"layer type {kind!r}; it knows {', '.join(_LAYER_TYPES)}")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", None):
        raise refuse("bidirectional attention")


def _probe(model: Any, config: Any, absorbs: bool, absorbs_there: bool) -> Probe:
    """One token through the model."""
    probe = cache_class(config, Probe)(config)
    probe.absorbs, probe.absorbs_there = absorbs, absorbs_there
    # a model that is offloaded is on the meta device, and moves what it is given itself
    device = "cpu" if model.device.type == "meta" else model.device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            model(input_ids=token, use_cache=True, **with_cache({}, probe))
    except AttndError:
        raise
    except Exception as e:
        raise refuse(
            f"{type(model).__name__} fails with a cache that is not its own: {type(e).__name__}: {e}"
        ) from e
    return probe


def attach(
    model: Any,
    client: _client.Client | str,
    *,
    name: str | None = None,
    n_tokens: int = 0,
    n_blocks: int = 0,
    block_tokens: int = 0,
    kv_dtype: str | None = None,
    wire_dtype: str | None = None,
    is_batch_invariant: bool = False,
    lane: bool | None = None,
    graphs: bool = False,
    share_prefixes: bool = False,
    absorb: str = "worker",
) -> Worker:
    """Makes a pool for a causal language model, or one for each geometry that its layers have, and
    has the model attend through them.

    model   a transformers model in eval mode, in f32, f16 or bf16, on the CPU or one GPU
    client  an attnd.Client, or a url to connect to
    name    the pool's, of several with their numbers behind it; None: made of the model's type and
            geometry
    n_tokens, n_blocks  each pool's size, one of them: tokens of all sequences together, or blocks.
            Neither: 8192 tokens, or fewer where less memory is left
    wire_dtype  "bf16" for a model in f32: q, k, v and outputs travel and are cached in bf16, half the
            bytes, each element rounded by 2^-8 of itself at most. "fp8_e4m3", over sockets, for a model
            in bf16 (or f32, as with "bf16"): q, k and v travel in half the bytes of bf16, each element
            off by 2^-4 of itself at most. Neither over a lane. None: as the model
    lane    layers without messages: None, where model and daemon share a GPU under MPS, layers have one
            geometry and none shares another's keys; False: never; True: all layers, or an error that
            says what is missing
    graphs  decode steps of generate() and Worker.forward() are captured in CUDA graphs, over a lane,
            and replayed: the host's part of a step no longer grows with the layers. The model's
            weights stay where they are meanwhile, and hooks on its parts are not called
    share_prefixes  what the cache has of a prompt is not computed again, whichever worker of the same
            tenant computed it, as long as there is room: leading blocks of tokens that are equal.
            Workers share if all that computes keys and values is the same to the bit: config, weights
            and buffers, adapters as they act, attributes, packages' versions. A model that changes
            meanwhile has other prefixes from the next prompt on; one that may compute anything
            (hooks, replaced methods, classes of one's own) is refused, or, if it becomes so later,
            not shared, which the log says
    absorb  where heads of latent attention (MLA) are multiplied into the space of latents, and out of
            it: "worker", by the model; "daemon", which is given the weights once, in the model's dtype,
            and gets and sends as many elements as the layer's heads have: for DeepSeek-V3 0.3 of the
            bytes. Models without latents attend as with "worker"; not with wire_dtype
    others  as in PoolSpec

    A pool of the same geometry that is large enough is shared. One that is too small is made anew, or,
    while somebody has it, another is made beside it. A pool makes way for others once no worker has
    it: each releases its own when it is closed, whoever's the client is.

    Raises UnsupportedError for a model that needs what attnd cannot do, naming it, and what
    Client.create_pool() raises.
    """
    if int(transformers.__version__.split(".")[0]) < 5:
        raise refuse(f"transformers {transformers.__version__}: it needs 5 or newer")
    if model.training:
        raise refuse("a model in training mode: call model.eval()")
    n_tokens, n_blocks = whole("n_tokens", n_tokens), whole("n_blocks", n_blocks)
    if n_tokens and n_blocks:
        raise ValueError(f"n_tokens is {n_tokens} and n_blocks is {n_blocks}, expected one of them")
    if graphs and lane is False:
        raise ValueError("graphs is True and lane is False: steps are captured over a lane")
    if share_prefixes and States(model.config.get_text_config()).layers:
        raise refuse("share_prefixes=True, and a model with recurrent or convolution states")
    if is_indexed(model.config.get_text_config()):
        for option, given in (("share_prefixes", share_prefixes), ("graphs", graphs), ("lane", lane)):
            if given:
                raise refuse(f"{option}=True, and a model whose queries visit what an indexer chooses")
        lane = False
    wire_dtypes = {torch.float32: ("bf16", "fp8_e4m3"), torch.bfloat16: ("fp8_e4m3",)}
    if wire_dtype is not None and wire_dtype not in wire_dtypes.get(model.dtype, ()):
        raise ValueError(
            f"wire_dtype is {wire_dtype!r}: 'bf16', for a model in f32, 'fp8_e4m3', for one in f32"
            " or bf16, or None"
        )
    if wire_dtype is not None and (lane or graphs):
        raise ValueError("wire_dtype is for messages: not with lane=True or graphs=True")
    if wire_dtype == "fp8_e4m3" and share_prefixes:
        raise ValueError("wire_dtype 'fp8_e4m3' and share_prefixes: what is cached is not the same to the bit")
    if absorb not in ("worker", "daemon"):
        raise ValueError(f"absorb is {absorb!r}: 'worker' or 'daemon'")
    if absorb == "daemon" and wire_dtype:
        raise ValueError("absorb='daemon' is for layers in the model's dtype: not with wire_dtype")
    sharing = Sharing(model) if share_prefixes else None
    size = n_blocks or -(-n_tokens // (block_tokens or BLOCK_TOKENS))
    _check_config(model.config)
    switch = Switch(model)
    owned: _client.Client | None = None

    def specs_of(absorbs: bool) -> tuple[Probe, list[LayersSpec]]:
        probe = _probe(model, switch.config, absorbs, absorbs and absorb == "daemon")
        if sharing is not None:
            sharing.check()
        return probe, pool_specs(
            model,
            probe.seen,
            name=name or "",
            block_tokens=block_tokens,
            kv_dtype=kv_dtype,
            q_dtype="bf16" if wire_dtype else None,
            is_batch_invariant=is_batch_invariant,
        )

    try:
        lane = True if graphs else False if wire_dtype else lane
        if isinstance(client, str):
            client = owned = _client.connect(client)
        probe, specs = specs_of(True)
        dtypes = {
            "array_dtype": "f32" if wire_dtype and model.dtype == torch.float32 else None,
            "wire_dtype": None if wire_dtype == "bf16" else wire_dtype,
        }
        try:
            pools = Pools(client, specs, size, is_named=bool(name), **dtypes)
        except UnsupportedError:  # by an older daemon
            if absorb == "daemon" or not any(s.spec.is_v_in_k for s in specs):
                raise
            probe, specs = specs_of(False)
            pools = Pools(client, specs, size, is_named=bool(name), **dtypes)
        return Worker(
            model, client, pools, owned is not None, switch, probe.seen, lane, graphs, sharing
        )
    except BaseException:
        switch.back()
        if owned is not None:
            owned.close()
        raise
