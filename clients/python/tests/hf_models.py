"""Tiny models with random weights for the tests of attnd.hf, and what they are given to read."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MIXED = ["sliding_attention", "full_attention"] * 2


def llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES))


def qwen3():
    return tf.Qwen3ForCausalLM(
        tf.Qwen3Config(**SIZES, sliding_window=9, use_sliding_window=True, layer_types=MIXED)
    )


def gemma2():
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **SIZES,
            sliding_window=8,
            layer_types=MIXED,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
        )
    )


def gemma3():
    return tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(**SIZES, sliding_window=7, layer_types=MIXED, query_pre_attn_scalar=48)
    )


def gpt_oss():
    config = tf.GptOssConfig(
        **SIZES, sliding_window=6, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
    )
    model = tf.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def llama4():
    """Layers 2 and 4 attend to chunks of 7 tokens."""
    config = tf.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=96,
        attention_chunk_size=7,
        layer_types=["full_attention", "chunked_attention"] * 2,
        no_rope_layers=[0, 1] * 2,
        floor_scale=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )
    return tf.Llama4ForCausalLM(config)


LATENTS = dict(
    SIZES,
    head_dim=8,
    num_key_value_heads=4,
    kv_lora_rank=48,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=16,
    moe_intermediate_size=48,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)


def deepseek_v3():
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**LATENTS, q_lora_rank=40))


def deepseek_v32():
    """None: this transformers has none."""
    if not hasattr(tf, "DeepseekV32Config"):
        return None
    indexer = dict(index_topk=12, index_n_heads=3, index_head_dim=24)
    return tf.DeepseekV32ForCausalLM(tf.DeepseekV32Config(**LATENTS, q_lora_rank=40, **indexer))


def glm4_moe_lite():
    """None: this transformers has none."""
    if not hasattr(tf, "Glm4MoeLiteForCausalLM"):
        return None
    return tf.Glm4MoeLiteForCausalLM(tf.Glm4MoeLiteConfig(**LATENTS, q_lora_rank=40))


def deepseek_v2():
    return tf.DeepseekV2ForCausalLM(
        tf.DeepseekV2Config(**LATENTS, q_lora_rank=None, topk_method="greedy")
    )


MODELS = [llama, qwen3, gemma2, gemma3, gpt_oss, llama4, deepseek_v3]


def make(build, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():  # weights large enough that attention matters
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.copy_(torch.randn_like(p) * 0.15)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, dtype).eval()
    model.set_attn_implementation("eager")
    return model


def prompts(model, lengths=(11, 3, 17, 8), seed=1):
    """Left-padded ids and mask."""
    g = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, width - n :] = torch.randint(3, 97, (n,), generator=g)
        mask[row, width - n :] = 1
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


GREEDY = dict(do_sample=False, max_new_tokens=24, eos_token_id=None)


# ---- shared prefixes


def columns(kwargs):
    ids = kwargs.get("input_ids")
    return (kwargs["inputs_embeds"] if ids is None else ids).shape[1]


def batch(*rows):
    """Left-padded."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def on(model, inputs):
    """The inputs on the model's device."""
    return {name: x.to(model.device) for name, x in inputs.items()}


def tokens(n, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n,), generator=g).tolist()


SYSTEM = tokens(50, 1)


def same(worker, model, inputs, **options):
    """The columns of the pass over the prompt; its text is eager's."""
    options = {**GREEDY, **options}
    inputs = on(model, inputs)
    worker.passes.clear()
    got = worker.generate(**inputs, **options)
    prompt = worker.passes[0]
    worker.passes.clear()
    now = model.config._attn_implementation
    model.set_attn_implementation("eager")
    want = model.generate(**inputs, **options)
    model.set_attn_implementation(now)
    worker.passes.clear()
    assert torch.equal(got, want)
    return prompt
