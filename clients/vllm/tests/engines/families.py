"""Greedy texts of small models of random weights, one of each family that attention has been made for, in
float32.

    families.py make FOLDER             makes the models below FOLDER
    families.py text SIDE FOLDER [FAMILY ...]
                                        prints a line of JSON for each: its texts, or why there are none

SIDE is own (vLLM alone), attnd (vLLM over the daemon of $ATTND_VLLM), transformers, or hf (attnd.hf over
the daemon of $FAMILIES_URL). Each model has a process of its own, forked from this one, so
that what they need is imported once.
"""

import json
import os
import pathlib
import random
import sys
import traceback

N_TOKENS = 24
CHUNK = 64  # of Llama 4
LENGTHS = (5, 20, 63, 64, 65, 130, 200, 40)

_SIZES = dict(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
              max_position_embeddings=1024, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
              pad_token_id=None, tie_word_embeddings=False)
_EXPERTS = dict(moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
                first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True)
_LATENT = dict(num_key_value_heads=4, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32,
               q_lora_rank=48)
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = dict(index_n_heads=4, index_head_dim=128, index_topk=64)
# what published configs have besides, and vLLM reads: without it vLLM's experts are chosen by a
# softmax
_SIGMOID = {"scoring_func": "sigmoid", "moe_layer_freq": 1}
_PUBLISHED = {"deepseek-v3": _SIGMOID, "kimi-k2": _SIGMOID, "deepseek-v3.2": _SIGMOID}
# family: Transformers' config class and its fields
FAMILIES = {
    "deepseek-v2": ("DeepseekV2Config", _SIZES | _EXPERTS | _LATENT | {
        "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False}),
    "deepseek-v3": ("DeepseekV3Config", _SIZES | _EXPERTS | _LATENT | {
        "n_group": 2, "topk_method": "noaux_tc"}),
    "kimi-k2": ("DeepseekV3Config", _SIZES | _EXPERTS | _LATENT | {  # one group of many experts
        "n_routed_experts": 12, "routed_scaling_factor": 2.827, "topk_method": "noaux_tc"}),
    "glm-4.5": ("Glm4MoeConfig", _SIZES | _EXPERTS | {
        "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True}),
    "glm-4.7-flash": ("Glm4MoeLiteConfig", _SIZES | _EXPERTS | _LATENT),
    "llama-4": ("Llama4TextConfig", _SIZES | {
        "intermediate_size_mlp": 256, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4,
        "attention_chunk_size": CHUNK, "no_rope_layers": [1, 1, 1, 0], "floor_scale": 32,
        "interleave_moe_layer_step": 2, "rope_parameters": _ROPE}),
    "gemma-3n": ("Gemma3nTextConfig", _SIZES | {
        "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
        "intermediate_size": 256, "activation_sparsity_pattern": [0.0] * 6, "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 32, "laurel_rank": 16, "altup_num_inputs": 2, "tie_word_embeddings": True}),
    "deepseek-v3.2": ("DeepseekV32Config", _SIZES | _EXPERTS | _LATENT | _INDEXER | {
        "n_group": 2, "topk_method": "noaux_tc"}),
    "glm-5": ("GlmMoeDsaConfig", _SIZES | _EXPERTS | _LATENT | _INDEXER),
}


def prompts():
    rng = random.Random(7)
    return [[rng.randrange(3, 250) for _ in range(n)] for n in LENGTHS]


def make(folder):
    import torch
    import transformers

    for name, (config, fields) in FAMILIES.items():
        torch.manual_seed(20261128)
        config = getattr(transformers, config)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if model.config.tie_word_embeddings:  # else every token is followed by itself
            torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.02)
        for layer in model.modules():  # gates choose by it, and it begins as zeros
            bias = getattr(layer, "e_score_correction_bias", None)
            if bias is not None:
                torch.nn.init.normal_(bias, std=0.1)
        model.save_pretrained(folder / name)
        file = folder / name / "config.json"
        file.write_text(json.dumps(_PUBLISHED.get(name, {}) | json.loads(file.read_text())))


def text_of_transformers(path, is_over_attnd):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    options = dict(do_sample=False, max_new_tokens=N_TOKENS, eos_token_id=None, pad_token_id=0)
    if is_over_attnd:
        import attnd
        import attnd.hf

        model = attnd.hf.attach(model, attnd.connect(os.environ["FAMILIES_URL"]), n_blocks=64)
    return [model.generate(input_ids=torch.tensor([ids]), **options)[0, len(ids):].tolist() for ids in prompts()]


def text_of_vllm(path, is_own):
    from vllm import LLM, SamplingParams

    options = dict(model=path, dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
                   max_num_seqs=8, block_size=32, num_gpu_blocks_override=128, disable_log_stats=True, seed=0)
    options |= dict(enable_prefix_caching=False) if is_own else dict(max_num_batched_tokens=48)
    # vLLM's kernel turns a part of each query of latent attention wrongly
    options["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    llm = LLM(**options)
    params = SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True, detokenize=False)
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False)
    texts = [list(o.outputs[0].token_ids) for o in outs]
    llm.llm_engine.engine_core.shutdown()
    return texts


def in_a_process(side, path):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            if side in ("transformers", "hf"):
                texts = text_of_transformers(path, side == "hf")
            else:
                texts = text_of_vllm(path, side == "own")
            said = {"texts": texts}
        except BaseException as e:
            traceback.print_exc()
            said = {"refused": f"{type(e).__name__}: {e}"}
        os.write(write, json.dumps(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        text = f.read()
    _, status = os.waitpid(pid, 0)
    return json.loads(text) if text else {"refused": f"its process ended with status {status}"}


def main():
    if sys.argv[1] == "make":
        return make(pathlib.Path(sys.argv[2]))
    side, folder = sys.argv[2], pathlib.Path(sys.argv[3])
    if side in ("transformers", "hf"):
        import transformers.models.deepseek_v3.modeling_deepseek_v3  # noqa: F401
    else:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm.entrypoints.llm  # noqa: F401
        import vllm.v1.worker.cpu_worker  # noqa: F401
    for name in sys.argv[4:] or FAMILIES:
        print(json.dumps({"family": name, **in_a_process(side, str(folder / name))}), flush=True)


if __name__ == "__main__":
    main()
