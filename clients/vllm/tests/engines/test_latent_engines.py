"""Latent attention (MLA) in vLLM over attnd against vLLM's own, in float32: a small DeepSeek-V3 with random
weights, whose first layer is dense and whose others have experts. The tests are test_engines.py's, with
this model.
"""

import pytest
import test_engines as of_engines
from test_engines import (  # noqa: F401: tests and fixtures
    Engine,
    check_empty,
    check_same,
    daemon,
    own,
    round_of,
    test_chunks_kills_and_aborts,
    test_compiled,
    test_ngram_speculation,
    test_prefixes,
    test_preemption,
    test_two_ranks,
)

import attnd

YARN = {  # as in DeepSeek's own models
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def make(path, **more):
    """Saves a DeepSeek-V3 with random weights there."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(20261128)
    config = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 512,  # with the 64 that follow, all that vLLM's own kernel has
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",  # vLLM asks for it
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "rope_parameters": YARN,
        **more,
    }
    DeepseekV3ForCausalLM(DeepseekV3Config(**config)).save_pretrained(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make(path)
    return str(path)


def test_the_pool_has_latents(model, own, daemon):  # noqa: F811
    check_same(Engine(model, [round_of()], daemon.url).result()["rounds"][0], own)
    with attnd.connect(daemon.url) as c:
        (pool,) = c.stats()["pools"]
        spec = c.pool(pool["name"]).spec
    assert (spec.num_q_heads, spec.num_kv_heads, spec.block_tokens) == (4, 1, 32)
    assert (spec.head_dim_k, spec.head_dim_v, spec.is_v_in_k) == (576, 512, True)


@pytest.mark.parametrize("n_processes", [1, 2])
def test_an_empty_daemon(model, own, daemon, tmp_path, n_processes):  # noqa: F811
    of_engines.test_an_empty_daemon_costs_computation_only(model, own, daemon, tmp_path, 1, n_processes)


def test_a_rope_that_is_not_scaled(daemon, tmp_path):  # noqa: F811
    """vLLM's kernel for it rotates wrongly what is a part of each query: attnd-vllm turns it off."""
    make(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    ops = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
    (own,) = Engine(str(tmp_path), [round_of()], **ops).result()["rounds"]  # noqa: F811
    (mine,) = Engine(str(tmp_path), [round_of()], daemon.url).result()["rounds"]
    check_same(mine, [t["ids"] for t in own])
    check_empty(daemon)
