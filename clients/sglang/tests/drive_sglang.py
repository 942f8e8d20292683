"""Runs SGLang on a CPU as often as it is told, and prints what each engine wrote.

Each line of stdin is a JSON object, and is answered with one:

    {"model": folder, "options": of sglang.Engine's, "env": variables, "prompts": ids, "log": file,
     "retracts": bool}    retracts: SGLang's own test of it, every nine passes
    {"makes": folder}     makes a small model with latent attention (MLA) there

Each is done in a process of its own, forked from this one: SGLang, of which all parts take long to
import, is imported once. An empty object: it has failed, and the log says how.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import traceback

# SGLang asks for processes that import all of it again
multiprocessing.set_start_method = lambda *args, **kwargs: None

import sglang  # noqa: E402
import sglang.srt.entrypoints.engine  # noqa: E402
import sglang.srt.models.registry  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402
from sglang.srt.models.deepseek_common import attention_backend_handler  # noqa: E402
from sglang.srt.models.deepseek_common.attention_forward_methods import AttnForwardMethod  # noqa: E402

# what SGLang's own attention on CPUs can compute of a model with latents
attention_backend_handler.AttentionBackendRegistry.register(
    "torch_native", lambda attn, batch: AttnForwardMethod.MLA
)


def make_latent(path):
    """A DeepSeek-V3 with random weights, whose first layer is dense and whose others have experts."""
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(20261128)
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=128,
        qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32, first_k_dense_replace=1, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1, max_position_embeddings=2048,
        initializer_range=0.2, eos_token_id=None,
        rope_parameters={  # SGLang has no other on CPUs
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    )
    DeepseekV3ForCausalLM(config).save_pretrained(path)
    file = os.path.join(path, "config.json")
    with open(file) as f:  # what published ones have, and Transformers leaves out
        fields = json.load(f) | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    with open(file, "w") as f:
        json.dump(fields, f)
    return {"made": path}


def run(job):
    options = dict(
        device="cpu", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True,
        mem_fraction_static=0.95, max_total_tokens=8192, page_size=32, chunked_prefill_size=64,
        max_running_requests=8, log_level="error",
    )
    if job.get("retracts"):
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, 9
    engine = sglang.Engine(model_path=job["model"], **{**options, **job["options"]})
    prompts, said = job["prompts"], {"texts": [], "cached": [], "retracted": 0}
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    for _ in range(2):
        outs = engine.generate(input_ids=prompts, sampling_params=sampling)
        said["texts"].append([o["output_ids"] for o in outs])
        said["cached"].append([o["meta_info"]["cached_tokens"] for o in outs])
        said["retracted"] += sum(o["meta_info"]["num_retractions"] for o in outs)

    async def aborted(prompt):
        sampling = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
        last = None
        async for last in await engine.async_generate(
            input_ids=prompt, sampling_params=sampling, stream=True
        ):
            if last["meta_info"]["completion_tokens"] > 3:
                engine.tokenizer_manager.abort_request(abort_all=True)
        return last["meta_info"]["finish_reason"]["type"]

    async def abort_some():
        return await asyncio.gather(*(aborted(p) for p in ([1, 2, 3], [4, 5, 6])))

    said["aborted"] = engine.loop.run_until_complete(abort_some())
    engine.shutdown()
    return said


def in_a_process(job):
    """What a fork gives that does the job, in a group of its own: SGLang kills its group when it fails."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read)
        log = os.open(job.get("log", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(job.get("env", {}))
        try:
            answer = json.dumps(make_latent(job["makes"]) if "makes" in job else run(job))
        except BaseException:
            traceback.print_exc()
            answer = "{}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        answer = f.read()
    os.waitpid(pid, 0)
    return answer.decode() or "{}"


def main():
    for line in sys.stdin:
        print("SAID " + in_a_process(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
