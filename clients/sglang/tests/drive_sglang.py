"""Runs SGLang on a CPU over one attention backend and prints what it wrote, as JSON.

    drive_sglang.py MODEL ENGINE_OPTIONS   a JSON object of sglang.Engine's; prompts come from stdin
"""

import asyncio
import json
import sys


def main():
    import sglang

    options = dict(
        device="cpu", dtype="float32", skip_tokenizer_init=True, disable_cuda_graph=True,
        mem_fraction_static=0.95, max_total_tokens=8192, page_size=32, chunked_prefill_size=64,
        max_running_requests=8, log_level="error",
    )
    engine = sglang.Engine(model_path=sys.argv[1], **{**options, **json.loads(sys.argv[2])})
    prompts, said = json.load(sys.stdin), {"texts": [], "cached": [], "retracted": 0}
    sampling = {"temperature": 0, "max_new_tokens": 32}
    for _ in range(2):
        outs = engine.generate(input_ids=prompts, sampling_params=sampling)
        said["texts"].append([o["output_ids"] for o in outs])
        said["cached"].append([o["meta_info"]["cached_tokens"] for o in outs])
        said["retracted"] += sum(o["meta_info"]["num_retractions"] for o in outs)

    async def aborted(prompt):
        sampling = {"temperature": 0, "max_new_tokens": 2000}
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
    print("SAID " + json.dumps(said), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
