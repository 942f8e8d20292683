"""SGLang's attention backend over attnd: a layer is a step of the pool; SGLang's own pages are not
written.

Of a model with latent attention (MLA) the pool has latents: K with the rotated part behind it, V a part
of it, and queries come in absorbed form, prompts' too.

SGLang can't be told to compute a request's tokens again. Where attnd has lost them, passes over the
model do, inside of the pass that has found out, which then goes on.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

import attnd
from attnd.serving.model import digest_of_weights, model_name, model_tensors
from attnd.serving.requests import FULL_WAIT_S, Requests, Step

from . import refuse, settings
from .live import Live, LostError, shared

logger = logging.getLogger(__name__)

_AGAIN_TOKENS = 512  # of a pass that computes lost ones again
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def _attend_absorbed() -> None:
    """Has SGLang's layers with latent attention attend in absorbed form always."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("attnd", lambda attn, batch: AttnForwardMethod.MLA)


def attention_layers(runner: Any) -> list[Any]:
    """The model's attention layers, in order. A layer with latent attention (MLA) has two of SGLang's:
    one for expanded keys and values, which is left out, and one for latents, with one KV head."""
    config = runner.model_config
    layers = [m for m in runner.model.modules() if isinstance(m, RadixAttention)]
    if runner.use_mla_backend:
        latent = 1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
        layers = [m for m in layers if (m.tp_k_head_num, m.qk_head_dim, m.v_head_dim) == latent]
    return sorted(layers, key=lambda layer: layer.layer_id)


def _layer_spec(layer: Any) -> attnd.LayerSpec:
    return attnd.LayerSpec(
        scale=float(layer.scaling),
        window_tokens=max(layer.sliding_window_size + 1, 0),  # SGLang does not count the token itself
        soft_cap=float(layer.logit_cap or 0.0),
    )


def pool_spec(runner: Any, layers: list[Any]) -> attnd.PoolSpec:
    """The pool of a model whose attention layers, in order, are layers."""
    weights = digest_of_weights(model_tensors(runner.model))
    config, page = runner.model_config, runner.server_args.page_size
    n_blocks = runner.max_total_num_tokens // page
    first, is_latent = layers[0], runner.use_mla_backend
    return attnd.PoolSpec(
        name=settings.pool_name() or f"sglang-{weights[:16]}-{page}-{n_blocks}",
        num_layers=len(layers),
        num_q_heads=first.tp_q_head_num,
        num_kv_heads=first.tp_k_head_num,
        head_dim_k=first.qk_head_dim,
        head_dim_v=first.v_head_dim,
        block_tokens=page,
        n_blocks=n_blocks,
        q_dtype=_DTYPES[runner.dtype],
        layers=[_layer_spec(layer) for layer in layers],
        model=model_name(
            weights, runner.dtype, config.quantization, config.hf_text_config.to_dict()
        ),
        is_v_in_k=is_latent,
    )


def rows_of(batch: Any) -> list[tuple[str, int, int]]:
    """(request, position, number of tokens) of each row of a ForwardBatch, all on the host."""
    if len(batch.rids) != batch.batch_size:
        raise RuntimeError(f"{len(batch.rids)} requests in a batch of {batch.batch_size} rows")
    if batch.forward_mode.is_decode():
        return [(r, n - 1, 1) for r, n in zip(batch.rids, batch.seq_lens_cpu.tolist())]
    return list(zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu))


class _Enough(Exception):
    """Ends a pass whose K and V are all there: nobody wants its logits."""


class AttndBackend(AttentionBackend):
    def __init__(self, runner: Any):
        super().__init__()
        refuse.check_args(runner.server_args)
        layers = attention_layers(runner)
        refuse.check_model(runner, layers)
        if runner.use_mla_backend:
            _attend_absorbed()
        spec = pool_spec(runner, layers)
        client = attnd.connect(
            settings.endpoint(), timeout=settings.TIMEOUT_S, max_retries=1000, name="sglang"
        )
        runner.max_running_requests = refuse.n_running(client.info, runner)  # the scheduler reads it
        shared.live = Live(Requests(client, lambda c: c.create_pool(spec), gives_up=False))
        self._model, self._n_layers, self._is_v_in_k = runner.model, len(layers), spec.is_v_in_k
        self._batch: Any = None  # SGLang's, of the pass that is on its way
        self._step: Step | None = None  # None: attnd has lost some of it
        self._rows: list[tuple[str, int, int]] = []
        self._n_tokens = 0
        self._past: int | None = None  # the layer before which a pass has done enough

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Once for each pass: what has ended, opened and become known since the last one."""
        self._step, self._rows, self._batch = None, [], forward_batch
        if forward_batch.rids is None or forward_batch.forward_mode.is_idle():
            return  # SGLang warms up
        live, rows = shared.live, rows_of(forward_batch)
        for name, pos, _ in rows:
            req = shared.reqs.get(name)
            if req is not None and live.wants_tokens(name, pos):
                live.tell(name, (req.origin_input_ids + req.output_ids)[:pos])
        self._rows = rows
        self._n_tokens = sum(n for _, _, n in rows)
        try:
            self._step = live.step(rows)
        except LostError:
            pass  # the first layer computes it again

    def _forward(
        self, q: Any, k: Any, v: Any, layer: Any, save_kv_cache: bool, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """q, k, v of all rows, in order. Returns [tokens, heads * head size]."""
        asked = [name for name, value in kwargs.items() if value is not None]
        if asked or k is None or v is None or not save_kv_cache:
            what = ", ".join(asked) or "a layer that reads another layer's K and V"
            raise NotImplementedError(f"attnd-sglang does not support {what}")
        n = q.shape[0]
        out = q.new_empty(n, layer.tp_q_head_num, layer.v_head_dim)
        if not self._rows:
            return out.zero_().view(n, -1)
        if n != self._n_tokens:
            raise RuntimeError(f"{n} tokens in a pass of {self._n_tokens}")
        if layer.layer_id == self._past:
            raise _Enough
        until = time.monotonic() + FULL_WAIT_S
        while True:
            try:
                self._attend(layer, q, k, v, out)
                break
            except LostError as e:
                if self._past is not None or time.monotonic() > until:
                    raise
                logger.warning("attnd: %s: their tokens are computed again", e)
                self._compute_again(layer.layer_id)
        if layer.layer_id + 1 == self._past == self._n_layers:
            raise _Enough
        return out.view(n, -1)

    def _attend(self, layer: Any, q: Any, k: Any, v: Any, out: Any) -> None:
        live, n = shared.live, q.shape[0]
        if self._step is None:
            raise LostError("attnd has lost running requests")

        def compute(step: Step) -> None:
            live.check(step, self._rows)
            live.requests.pool.step(
                layer.layer_id,
                step.items,
                q.reshape(n, layer.tp_q_head_num, layer.qk_head_dim).contiguous(),
                k.reshape(n, layer.tp_k_head_num, layer.qk_head_dim).contiguous(),
                None if self._is_v_in_k else v.reshape(n, layer.tp_v_head_num, layer.v_head_dim).contiguous(),
                out=out,
            )

        self._step.layer(layer.layer_id, compute)
        live.check(self._step, self._rows)

    def _compute_again(self, at: int) -> None:
        """K and V of this pass's requests that attnd has lost: of tokens before it in all layers, of its
        own in those before `at`."""
        batch, rows, n_tokens = self._batch, self._rows, self._n_tokens
        try:
            self._pass_again(batch, rows, at)
            self._step = shared.live.step(rows)
        except LostError:  # once more, meanwhile
            self._step = None
        self._rows, self._n_tokens = rows, n_tokens

    def _pass_again(self, batch: Any, rows: list[tuple[str, int, int]], at: int) -> None:
        lost = shared.live.lost(rows)
        for name, pos, _ in lost:
            req = shared.reqs[name] if pos > 0 else None
            for first in range(0, pos, _AGAIN_TOKENS):
                past = min(pos, first + _AGAIN_TOKENS)
                ids = (req.origin_input_ids + req.output_ids)[first:past]
                self._pass(
                    [(name, first, past - first)],
                    torch.tensor(ids, dtype=batch.input_ids.dtype),
                    torch.arange(first, past, dtype=batch.positions.dtype),
                    self._n_layers,
                )
        if at > 0 and lost:
            start, mine = 0, []
            for row in rows:
                if row in lost:
                    mine += range(start, start + row[2])
                start += row[2]
            self._pass(lost, batch.input_ids[mine], batch.positions[mine], at)

    def _pass(
        self, rows: list[tuple[str, int, int]], ids: torch.Tensor, positions: torch.Tensor, past: int
    ) -> None:
        """A pass over the layers before `past`."""
        batch = copy.copy(self._batch)
        batch.forward_mode, batch.batch_size = ForwardMode.EXTEND, len(rows)
        batch.rids, batch.input_ids, batch.positions = [name for name, _, _ in rows], ids, positions
        batch.global_num_token_non_padded_cpu = None
        self._rows, self._n_tokens, self._past = rows, len(ids), past
        try:
            self._step = shared.live.step(rows)
            self._model.forward(ids, positions, batch)
        except _Enough:
            return
        finally:
            self._past = None
        raise RuntimeError(f"a pass over the model has not come to layer {past}")

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._forward(q, k, v, layer, save_kv_cache, kwargs)

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        return False
