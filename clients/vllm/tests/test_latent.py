"""Latent attention (MLA) through attnd-vllm's modules, over the fake of vLLM (fake/): texts must be those
that a float64 model writes alone, with keys and values expanded from all latents.
"""

import importlib
import types

import numpy as np
import pytest
import test_modules as of_modules
from test_modules import BLOCK, daemon, engine, n_sequences  # noqa: F401: fixtures

import attnd  # isort: skip
import torch
from fake import MLAAttention
from fake.engine import Engine, config
from reference import attention
from toy_model import LAYERS, Q_HEADS, VOCABULARY, prompts, token_of

RANK, ROTATED, NOPE, DIM_V = 32, 16, 24, 8
SCALE = 0.31  # not that of any of these sizes
_rng = np.random.default_rng(20261128)
QUERIES = _rng.normal(size=(VOCABULARY, LAYERS, Q_HEADS, NOPE + ROTATED)).astype(np.float32)
LATENTS = _rng.normal(size=(VOCABULARY, LAYERS, RANK)).astype(np.float32)
ROTATIONS = _rng.normal(size=(VOCABULARY, LAYERS, 1, ROTATED)).astype(np.float32)
W_UK = _rng.normal(size=(LAYERS, Q_HEADS, NOPE, RANK)).astype(np.float32) / 6
W_UV = _rng.normal(size=(LAYERS, Q_HEADS, RANK, DIM_V)).astype(np.float32) / 3


class Latent(of_modules.Model):
    is_latent = True

    @staticmethod
    def layer(name, at, impl_cls, heads):
        return MLAAttention(name, impl_cls, W_UK[at, heads], W_UV[at, heads], ROTATED, SCALE)

    @staticmethod
    def qkv(ids, at, salt):
        """Queries, latents and rotated parts: those of a token depend on all tokens before it."""
        ids = np.asarray(ids)
        mixed = np.cumsum(ids * np.arange(1.0, len(ids) + 1)) * 0.37 + salt
        of = lambda x: (x[ids, at] + np.sin(mixed).reshape(-1, *[1] * (x.ndim - 2))).astype(np.float32)
        return of(QUERIES), of(LATENTS), of(ROTATIONS)


def text_of(prompt, n, salt=0):
    """What the model writes, with each head's keys and values, computed anew for every token."""
    ids, outs, layer = list(prompt), [], attnd.LayerSpec(scale=SCALE)
    for _ in range(n):
        outs = []
        for at in range(LAYERS):
            q, c, rotated = (x.astype(float) for x in Latent.qkv(ids, at, salt))
            keys = np.einsum("tr,hnr->thn", c, W_UK[at])
            keys = np.concatenate([keys, np.repeat(rotated, Q_HEADS, 1)], -1)
            values = np.einsum("tr,hrv->thv", c, W_UV[at])
            outs.append(attention(q[-1:], keys, values, len(ids) - 1, layer)[0][0])
        ids.append(token_of(outs))
    return ids[len(prompt) :]


def check(e, n):
    assert len(e.done) == n
    for r in e.done:
        assert r.text == text_of(r.prompt, r.n, r.model_salt), r.request_id


@pytest.fixture
def latent(daemon):  # noqa: F811
    made = []

    def make(n_blocks=128, **more):
        made.append(Engine(Latent(), n_blocks, BLOCK, **more))
        return made[-1]

    yield make
    for e in made:
        if e.shared.requests is not None:
            e.close()


def test_the_pool_has_latents_and_blocks_as_asked_for(latent):
    e = latent()
    spec = e.shared.requests.pool.spec
    assert (spec.num_q_heads, spec.num_kv_heads) == (Q_HEADS, 1)
    assert (spec.head_dim_k, spec.head_dim_v, spec.is_v_in_k) == (RANK + ROTATED, RANK, True)
    assert spec.block_tokens == BLOCK and e.config.scheduler_config.enable_chunked_prefill
    assert {layer.scale for layer in spec.layers} == {np.float32(SCALE)}


def test_a_pool_of_latents_is_not_that_of_expanded_heads(latent, engine):  # noqa: F811
    """The same weights and config may be served both ways."""
    specs = []
    for make in latent, engine:
        e = make()
        specs.append(e.shared.requests.pool.spec)
        e.close()
    assert specs[0].name != specs[1].name and specs[0].model != specs[1].model


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_chunks_drafts_and_prefixes(latent, daemon, n_ranks):  # noqa: F811
    e = latent(n_ranks=n_ranks)
    e.speculates = True
    for round in range(2):
        for i, p in enumerate(prompts(6, 3, shared=24)):
            e.add(f"r{round}.{i}", p, 10)
        e.run()
    check(e, 12)
    assert e.n_rejected > 3 and e.n_recomputed == 0
    assert sum(r.n_cached for r in e.done[6:]) > 6 * 24
    assert n_sequences(daemon) == 0


def test_adapters_of_a_prompt_do_not_share(latent):
    e = latent()
    (prompt,) = prompts(1, 7, shared=40)
    for i, salt in enumerate(["", "a", "a"]):
        e.add(f"r{i}", prompt, 6, salt=salt, model_salt=len(salt))
        e.run()
    check(e, 3)
    assert [r.n_cached > 0 for r in e.done] == [False, False, True]


def test_preemption_and_aborts(latent, daemon):  # noqa: F811
    e, n = latent(24), [0]
    for i, p in enumerate(prompts(12, 5)):
        e.add(f"r{i}", p, 20)

    def each():
        n[0] += 1
        if n[0] == 4:
            e.abort("r1")

    e.run(each)
    check(e, 11)
    assert e.n_preempted > 2
    assert n_sequences(daemon) == 0


def test_a_daemon_that_begins_empty_is_computation(latent, daemon):  # noqa: F811
    e, n = latent(), [0]
    for i, p in enumerate(prompts(6, 8)):
        e.add(f"r{i}", p, 12)

    def each():
        n[0] += 1
        if n[0] in (5, 12):
            daemon.restart()

    e.run(each)
    check(e, 6)
    assert e.n_recomputed > 2 and e.shared.requests.n_restarts == 2
    assert n_sequences(daemon) == 0


def test_a_daemon_with_a_keeper_is_a_pause(monkeypatch):
    of_modules.is_a_pause(monkeypatch, Latent(), check, 6, 12, (9, 24))


def test_rows_that_fail_leave_the_others_as_they_are(latent, daemon):  # noqa: F811
    """Sequences are lost between the two layers of steps with several rows."""
    e, n = latent(), [0]
    other = attnd.connect(daemon.url)
    pool = other.pool(e.shared.requests.pool.spec.name)
    for i, p in enumerate(prompts(6, 5, shared=16)):
        e.add(f"r{i}", p, 16)

    def between(at):
        n[0] += 1
        late = [r.request_id for r in e.running if r.num_computed_tokens > 0]
        if n[0] % 8 == 0 and late:
            pool.adopt(e.shared.requests.held[late[0]].seq.id).close()

    e.between = between
    e.run()
    other.close()
    check(e, 6)
    assert e.n_recomputed > 2
    assert n_sequences(daemon) == 0


def test_vllms_kernel_that_rotates_parts_of_queries_wrongly_is_off(latent):
    assert latent().config.compilation_config.custom_ops == ["all", "-rotary_embedding"]


def test_a_trial_of_vllms_computes_nothing(latent):
    e = latent()
    (layer,) = list(e.config.layers.values())[:1]
    common = types.SimpleNamespace(num_reqs=2, num_actual_tokens=5)
    meta = e.ranks[0].builder.build(0, common)
    q, c, rotated = (torch.from_numpy(x) for x in Latent.qkv([1, 2, 3, 4, 5], 0, 0))
    assert not np.asarray(layer.forward(q, c, rotated, meta)).any()


def test_a_query_without_its_latents_is_an_error(latent):
    e = latent()
    e.add("r", [1, 2, 3], 2)
    for layer in e.config.layers.values():
        layer.impl.do_kv_cache_update = lambda *args: None
    with pytest.raises(RuntimeError, match="attends before its latents are known"):
        e.step()


@pytest.mark.parametrize(
    "where, value, device, says",
    [
        ("use_v2_model_runner", False, "cuda", r"latent attention \(MLA\) on GPUs"),
        ("lora_config", object(), "cpu", r"LoRA with latent attention \(MLA\)"),
        ("model_config__hf_text_config", types.SimpleNamespace(index_topk=2048), "cpu", "an indexer"),
        ("model_config__hf_text_config", types.SimpleNamespace(model_type="deepseek_v4"), "cpu", "an indexer"),
        ("cache_config__cache_dtype", "fp8_ds_mla", "cpu", "kv_cache_dtype 'fp8_ds_mla'"),
    ],
)
def test_refused_by_name(where, value, device, says):
    of_platform = importlib.import_module("attnd_vllm.platform")
    of_platform.check_config(config(Latent(), 8, BLOCK))
    with pytest.raises(ValueError, match=f"attnd-vllm does not support .*{says}"):
        of_platform.check_config(config(Latent(), 8, BLOCK, **{where: value}), device)


def test_a_vllm_whose_layer_is_not_known_is_refused(monkeypatch):
    of_platform = importlib.import_module("attnd_vllm.platform")
    monkeypatch.setattr(of_platform.versions, "found", lambda: "0.25.1")
    with pytest.raises(ValueError, match=r"latent attention \(MLA\) with vLLM 0.25.1: it does with 0.32.0"):
        of_platform.check_config(config(Latent(), 8, BLOCK))


@pytest.mark.parametrize(
    "what, says",
    [
        ({"kv_lora_rank": 520}, "kv_lora_rank 520: a multiple of 8, at most 512"),
        ({"qk_rope_head_dim": 12}, "qk_rope_head_dim 12: a multiple of 8, at most 64"),
        ({"sliding_window": 128}, "with sliding_window: 128"),
        ({"indexer": "top"}, "with an indexer: top"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
    ],
)
def test_layers_that_are_refused(what, says):
    from attnd_vllm.latent import AttndLatentImpl

    names = "alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"
    layer = {**dict.fromkeys(names), "num_heads": 2, "head_size": 48, "scale": 1.0, "num_kv_heads": 1}
    layer |= {"kv_cache_dtype": "auto", "attn_type": "decoder", "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    AttndLatentImpl(**layer)
    with pytest.raises(ValueError, match=says):
        AttndLatentImpl(**{**layer, **what})


def test_sparse_attention_is_refused_where_a_backend_is_chosen():
    of_platform = importlib.import_module("attnd_vllm.cpu_platform")
    selector = types.SimpleNamespace(use_mla=True, use_sparse=True)
    with pytest.raises(ValueError, match="sparse attention"):
        of_platform.AttndCpuPlatform.get_attn_backend_cls(None, selector)
