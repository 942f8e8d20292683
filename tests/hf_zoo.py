#!/usr/bin/env python3
"""Every causal language model class of the installed transformers over attnd.hf, against itself.

    tests/hf_zoo.py [--prefix build] [--only TYPE[,TYPE]] [--results FILE] [--record]
    tests/hf_zoo.py --page

Each class gets a tiny config and random weights and generates from a left-padded batch, first with its
own attention, then over attnd (own_daemon.py starts one from PREFIX on its cpu backend). Results:

    same              the same tokens and logits (to 0.002 of their standard deviation; of its own cache,
                      or of a single pass), and the model generates as before once the worker is closed
    refused           UnsupportedError, which names what attnd cannot do
    differs           other tokens, or an error that is not a refusal: a defect
    not constructible no tiny model could be made, or it does not generate by itself

One that is the same is tried with share_prefixes, too: prompts of which the cache has the start give the
same text (same), or attach() refuses (why it does), or nothing was shared (whole).

Each class runs in a process of its own that is forked from this one, with a limit on memory and time.
Results are kept in FILE, a line of JSON each; classes that have one there are not run again.

clients/python/hf-zoo.jsonl has the results of record and the versions that gave them. Exit 1 if a
result differs, or is another than the one of record with the same transformers. --record makes the
results of a whole run those of record, and makes clients/python/hf-zoo.md from them. --page checks
that this page is what the file of record gives; it runs no model and needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import resource
import select
import signal
import sys
import textwrap
import time
import traceback
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "clients" / "python" / "bench"))
import own_daemon  # noqa: E402

MEMORY = 3 << 30  # of a class's process, beyond what this one has
MAX_PARAMETERS = 30_000_000
N_LAYERS = 4
N_NEW = 8
N_PREFILL = 13  # of the logits that are compared
RECORD = ROOT / "clients" / "python" / "hf-zoo.jsonl"
PAGE = RECORD.with_suffix(".md")
MEANING = {
    "same": "the same tokens and logits as with the model's own attention",
    "refused": "UnsupportedError, which names what attnd cannot do",
    "differs": "a defect",
    "not constructible": "no tiny model could be made, or it does not generate by itself",
}
TOLERANCE = 2e-3  # of logits, in their standard deviation
PROMPTS = (11, 3, 17, 8)
SHARED_PROMPTS = ((40, 0), (40, 0), (40, 24), (56, 40))  # tokens, and those that are another's
VOCAB = 120

# What a field of a config becomes, by its name. Fields that are None or absent are left alone.
WIDTH, HEADS, HEAD_DIM, ROPE_DIM = 128, 4, 32, 16
SIZES = [
    (
        WIDTH,
        "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim emb_dim"
        " hidden_dim attention_hidden_size conv_dim lru_width input_embedding_size"
        " dim_model block_out_dim",
    ),
    (
        160,
        "intermediate_size ffn_dim n_inner d_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size"
        " intermediate_size_mlp dim_ff encoder_intermediate_size block_ff_dim dense_intermediate_size",
    ),
    (
        64,
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"
        " shared_intermediate_size hidden_size_per_layer_input moe_shared_expert_intermediate_size"
        " expert_intermediate_size moe_ffn_hidden_size zaya_mlp_expansion",
    ),
    (
        N_LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"
        " num_local_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads"
        " num_heads swa_num_attention_heads index_n_heads linear_num_value_heads",
    ),
    (
        2,
        "num_key_value_heads num_kv_heads kv_n_heads n_kv_heads swa_num_key_value_heads"
        " multi_query_group_num num_experts_per_tok moe_topk moe_k num_experts_per_token top_k"
        " linear_num_key_heads moe_top_k",
    ),
    (
        4,
        "num_experts num_local_experts n_routed_experts moe_num_experts num_moe_experts"
        " zero_expert_num",
    ),
    (
        1,
        "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts"
        " moe_num_shared_experts num_dense_layers mamba_n_groups n_groups",
    ),
    (
        HEAD_DIM,
        "head_dim kv_channels v_head_dim qk_nope_head_dim index_head_dim swa_head_dim"
        " swa_v_head_dim linear_key_head_dim linear_value_head_dim kv_lora_rank attention_head_dim"
        " global_head_dim dim_head mamba_d_head mamba_head_dim mamba_headdim",
    ),
    (
        ROPE_DIM,
        "qk_rope_head_dim rotary_dim mamba_d_state ssm_state_size state_size"
        " mamba_chunk_size chunk_size mamba_dt_rank time_step_rank",
    ),
    (24, "q_lora_rank o_lora_rank"),
    (
        8,
        "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size"
        " mamba_n_heads mamba_num_heads index_topk",
    ),
    (
        512,
        "max_position_embeddings n_positions max_target_positions max_sequence_length seq_length"
        " n_ctx max_seq_len",
    ),
    (
        VOCAB,
        "vocab_size vocab_size_per_layer_input audio_vocab_size text_vocab_size"
        " decoder_vocab_size",
    ),
]
BY_NAME = {name: size for size, names in SIZES for name in names.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# Fields that a general rule gets wrong.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ATTENTIONS = ("sliding_attention", "full_attention")
EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {**EXPERTS, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "dots1": {**EXPERTS, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": {
        "intermediate_size": 160,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma3n_vision": {"architecture": "mobilenetv3_small_050"},  # of timm; its own has 300 million
    "hunyuan_v1_dense": {"head_dim": 32, "rope_parameters": ROPE},
    "hunyuan_v1_moe": {"head_dim": 32, "rope_parameters": ROPE},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 32, "layer_types": list(ATTENTIONS * 2), "rope_parameters": ROPE},
    "cohere_compass_text": {
        "layer_types": list(ATTENTIONS * 2),
        "rope_parameters": {t: ROPE for t in ATTENTIONS},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": HEAD_DIM + ROPE_DIM},
    "inkling2_text": {"unpadded_vocab_size": VOCAB},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB},
    "reformer": {"axial_pos_embds": False},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron": {"head_dim": 32, "num_key_value_heads": 2},
    "zamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
}


class NotConstructible(Exception):
    pass


# ---- tiny configs


def _short(value: list[Any], n: int) -> list[Any]:
    """n entries in which each kind of value shows up, in order of first appearance."""
    kinds = list({json.dumps(x, default=str): x for x in value}.values())[:n]
    return [kinds[i % len(kinds)] for i in range(n)]


def _layers_of(config: Any) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    return 0


def tiny_fields(config: Any) -> dict[str, Any]:
    """Fields to make a config of this class again, smaller."""
    fields: dict[str, Any] = {}
    n_layers = _layers_of(config)
    names = dict.fromkeys([*getattr(config, "__dataclass_fields__", ()), *config.__dict__])
    for name in names:
        if name.startswith("_"):
            continue
        value = config.__dict__.get(name, getattr(type(config), name, None))
        if name in getattr(config, "sub_configs", {}):
            if value is not None:
                fields[name] = tiny_fields(value)
        elif name in TOKENS:
            fields[name] = TOKENS[name]
        elif name in BY_NAME and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = min(BY_NAME[name], value) if name in KEEP_SMALL else BY_NAME[name]
        elif isinstance(value, list) and value and len(value) == n_layers:
            fields[name] = _short(value, N_LAYERS)
        elif name == "mrope_section" or (isinstance(value, dict) and "mrope_section" in value):
            fields[name] = _mrope(value)
    own = config.__dict__
    heads = own.get("num_attention_heads")
    if heads is not None and heads == own.get("num_key_value_heads"):
        fields["num_key_value_heads"] = HEADS  # every head has its own keys
    if own.get("qk_rope_head_dim"):
        fields["head_dim"] = ROPE_DIM  # of latent attention: what is rotated
    fields.update(SPECIAL.get(config.model_type, {}))
    return fields


KEEP_SMALL = frozenset("n_group topk_group first_k_dense_replace n_shared_experts".split())


def _mrope(value: Any) -> Any:
    if isinstance(value, dict):
        return {**value, "mrope_section": _mrope(value["mrope_section"])}
    parts = len(value)
    half = HEAD_DIM // 2
    return [half - (parts - 1) * (half // parts)] + [half // parts] * (parts - 1)


def make_model(tf: Any, torch: Any, model_type: str, class_name: str) -> Any:
    cls = getattr(tf, class_name)
    config_class = cls.config_class
    default = config_class()
    fields = tiny_fields(default)
    for name in ("is_decoder",):
        if hasattr(default, name):
            fields[name] = True
    try:
        config = config_class(**fields)
    except Exception as e:
        raise NotConstructible(f"config: {type(e).__name__}: {e}") from e
    if getattr(config, "is_encoder_decoder", False):
        config.is_encoder_decoder = False  # the decoder alone, as its ForCausalLM class is
    try:
        with torch.device("meta"):
            n = sum(p.numel() for p in cls(config).parameters())
    except Exception as e:
        raise NotConstructible(f"model: {type(e).__name__}: {e}") from e
    if n > MAX_PARAMETERS:
        raise NotConstructible(f"{n:,} parameters from the tiny config")
    torch.manual_seed(0)
    model = cls(config)
    with torch.no_grad():  # weights large enough that attention matters
        for p in model.parameters():
            if p.is_floating_point() and p.ndim >= 2:
                p.copy_(torch.randn(p.shape) * 1.2 / max(1, p.shape[-1]) ** 0.5)
            elif p.is_floating_point():
                p.nan_to_num_(0.0)
    return model.float().eval()


# ---- one class


def prompts(torch: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    width = max(PROMPTS)
    ids = torch.zeros(len(PROMPTS), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(PROMPTS):
        ids[row, width - n :] = torch.randint(3, VOCAB, (n,), generator=g)
        mask[row, width - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def logits_of(torch: Any, model: Any, ids: Any, cache: Any) -> Any:
    """Of a prompt and then of single tokens; cache None: the model's own."""
    parts = []
    with torch.no_grad():
        for part in (ids[:, :N_PREFILL], *ids[:, N_PREFILL:].split(1, dim=1)):
            out = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    if cache is None:
        raise NotConstructible("it keeps no cache")
    return torch.cat(parts, dim=1)


def _first_line(e: BaseException) -> str:
    text = str(e).strip()
    return text.splitlines()[0][:300] if text else ""


def try_sharing(torch: Any, attnd: Any, url: str, model: Any, options: dict[str, Any]) -> str:
    """The result with share_prefixes."""
    g = torch.Generator().manual_seed(2)
    ids: list[Any] = []
    for n, n_before in SHARED_PROMPTS:
        start = ids[0][:, :n_before] if n_before else torch.zeros(1, 0, dtype=torch.long)
        rest = torch.randint(3, VOCAB, (1, n - n_before), generator=g)
        ids.append(ids[0] if n == 40 and ids and not n_before else torch.cat([start, rest], dim=1))
    batch = torch.cat([ids[2], ids[0]])
    wanted = [model.generate(input_ids=x, **options) for x in (*ids, batch)]
    columns: list[int] = []
    with attnd.connect(url) as client:
        try:
            worker = attnd.hf.attach(model, client, n_blocks=64, share_prefixes=True)
        except attnd.UnsupportedError as e:
            return "refused: " + plain(str(e.message.removeprefix("attnd.hf: ")))
        hook = model.register_forward_hook(
            lambda m, args, kwargs, out: columns.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        try:
            for i, (x, want) in enumerate(zip((*ids, batch), wanted)):
                if not torch.equal(worker.generate(input_ids=x, **options), want):
                    return f"differs: prompt {i}"
        finally:
            hook.remove()
            worker.close()
    return "same" if 40 - 32 in columns else "whole"


def try_class(url: str, model_type: str, class_name: str) -> tuple[str, str, str]:
    """(result, why, result with share_prefixes) of one class."""
    import torch
    import transformers as tf

    import attnd
    import attnd.hf

    torch.set_num_threads(1)
    try:
        model = make_model(tf, torch, model_type, class_name)
    except NotConstructible as e:
        return "not constructible", str(e), ""
    except Exception as e:
        return "not constructible", f"{type(e).__name__}: {_first_line(e)}", ""
    inputs = prompts(torch)
    options = dict(do_sample=False, max_new_tokens=N_NEW, eos_token_id=None, pad_token_id=0)
    before = model.config._attn_implementation
    try:
        try:
            model.set_attn_implementation("eager")
        except Exception:
            model.set_attn_implementation(before)
        own = model.generate(**inputs, **options)
        with torch.no_grad():
            finite = bool(model(input_ids=inputs["input_ids"][2:3]).logits.isfinite().all())
    except Exception as e:
        return "not constructible", f"does not generate: {type(e).__name__}: {_first_line(e)}", ""
    if not finite:
        return "not constructible", "its logits are not finite", ""
    if len({tuple(row[max(PROMPTS) :].tolist()) for row in own}) == 1:
        return "not constructible", "it says the same after every prompt", ""

    ids = own[2:3]  # the longest prompt: no padding
    try:
        own_logits = logits_of(torch, model, ids, None)
        with torch.no_grad():  # where its own cache says something else than one pass: either will do
            whole_logits = model(input_ids=ids).logits
    except Exception:  # not every model can be called in this way
        own_logits = None

    before = model.config._attn_implementation
    worker, sharing = None, ""
    try:
        with attnd.connect(url) as client:
            worker = attnd.hf.attach(model, client, n_blocks=32)
            got = worker.generate(**inputs, **options)
            if not torch.equal(got, own):
                column = int((got != own).any(dim=0).nonzero()[0]) - max(PROMPTS)
                return "differs", f"from token {column} of {N_NEW}", ""
            if own_logits is not None:
                with worker.cache() as cache:
                    got_logits = logits_of(torch, model, ids, cache)
                error = min(
                    float((got_logits - x).abs().max() / x.std()) for x in (own_logits, whole_logits)
                )
                if not error < TOLERANCE:
                    return "differs", f"logits by {error:.2g} standard deviations", ""
            weights = _attentions(attnd, model, worker, inputs)
            if weights:
                return "differs", weights, ""
            worker.close()
    except attnd.UnsupportedError as e:
        if worker is not None:
            worker.close()
        result, why = "refused", e.message.removeprefix("attnd.hf: ")
    except Exception as e:
        traceback.print_exc()
        return "differs", f"{type(e).__name__}: {_first_line(e)}", ""
    else:
        result, why = "same", ""
    if model.config._attn_implementation != before:
        return "differs", f"left with the attention {model.config._attn_implementation!r}", ""
    if not torch.equal(model.generate(**inputs, **options), own):
        return "differs", "other tokens once the worker is closed", ""
    if result == "same":
        sharing = try_sharing(torch, attnd, url, model, options)
        if sharing.startswith("differs"):
            return "differs", f"with share_prefixes: {sharing}", sharing
    return result, why, sharing


def _attentions(attnd: Any, model: Any, worker: Any, inputs: dict[str, Any]) -> str:
    """What is wrong with the answer to output_attentions, which must be a refusal."""
    import torch

    with worker.cache() as cache, torch.no_grad():
        try:
            out = model(**inputs, past_key_values=cache, output_attentions=True)
        except attnd.UnsupportedError:
            return ""
        except TypeError as e:
            return "" if "output_attentions" in str(e) else f"output_attentions: TypeError: {e}"
        return f"output_attentions gives {type(out.get('attentions')).__name__}"


# ---- all of them


def in_a_process(url: str, model_type: str, class_name: str, timeout: int) -> tuple[str, str, str]:
    """try_class() in a fork with limits."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            now = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
            limit = now * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            answer = try_class(url, model_type, class_name)
        except BaseException as e:
            traceback.print_exc()
            answer = "not constructible", f"{type(e).__name__}: {_first_line(e)}", ""
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        if not select.select([f], [], [], timeout)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "not constructible", f"no result within {timeout} s", ""
        text = f.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return "differs", f"its process ended with status {status}", ""
    result, why, sharing = json.loads(text)
    return result, why, sharing


def plain(text: str) -> str:
    """For a cell of a table."""
    text = re.sub(r"\s+", " ", text).replace("()", "").replace("|", "/")
    text = re.sub(r"<(\S+) object at 0x[0-9a-f]+>", r"\1", text)
    text = text.replace("<", "").replace(">", "")
    return text if len(text) <= 180 else text[:177] + "..."


def read_record() -> tuple[dict[str, str], list[dict[str, str]]]:
    """The versions, and a result for each model type."""
    versions, *results = (json.loads(line) for line in RECORD.read_text().splitlines())
    return versions, results


def _of_sharing(results: list[dict[str, str]]) -> str:
    """A sentence about share_prefixes."""
    groups: dict[str, list[str]] = {}
    for x in results:
        if x["result"] == "same":
            groups.setdefault(x.get("sharing", "not tried"), []).append(x["type"])
    n_same = len(groups.pop("same", ()))
    others = (f"{why} ({', '.join(types)})" for why, types in sorted(groups.items()))
    return (
        f"With share_prefixes=True, prompts of which the cache has the start give the same text in {n_same}"
        f" of these. The others: {'; '.join(others) or 'none'}."
    )


def page(versions: dict[str, str], results: list[dict[str, str]]) -> str:
    order = ["same", "refused", "differs", "not constructible"]
    counts = {r: sum(x["result"] == r for x in results) for r in order}
    groups: dict[tuple[int, str], list[str]] = {}
    results = sorted(results, key=lambda x: x["type"])
    same = [x["type"] for x in results if x["result"] == "same"]
    for x in results:
        if x["result"] == "same":
            continue
        why = plain(x["why"]).replace(x["class"], "it")
        groups.setdefault((order.index(x["result"]), why), []).append(x["type"])
    lines = [
        "# HuggingFace models over attnd",
        "",
        "Every causal language model class that Transformers maps a model type to, with a tiny config and",
        f"random weights, over `attnd.hf` (Transformers {versions['transformers']}, torch {versions['torch']},"
        " f32, the cpu backend).",
        "`tests/hf_zoo.py` makes this page from `hf-zoo.jsonl`, which also has the classes.",
        "",
        "| result | model types | what it means |",
        "|---|---|---|",
        *(f"| {r} | {n} | {MEANING[r]} |" for r, n in counts.items()),
        "",
        *textwrap.wrap(f"The same: {', '.join(same)}.", 110, break_on_hyphens=False),
        "",
        *textwrap.wrap(_of_sharing(results), 110, break_on_hyphens=False),
        "",
        "| result | why | model types |",
        "|---|---|---|",
        *(
            f"| {order[r]} | {why} | {', '.join(types)} |"
            for (r, why), types in sorted(groups.items(), key=lambda g: (g[0][0], -len(g[1]), g[0]))
        ),
        "",
    ]
    return "\n".join(lines)


def check_page() -> int:
    """Of --page."""
    versions, results = read_record()
    types = [x["type"] for x in results]
    if len(set(types)) != len(types):
        print(f"{RECORD}: a model type is there twice", file=sys.stderr)
        return 1
    if PAGE.read_text() != page(versions, results):
        print(f"{PAGE} is not what {RECORD} gives: tests/hf_zoo.py --record", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    own_daemon.add_arguments(parser)
    parser.add_argument("--only", help="model types, comma-separated")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build" / "hf_zoo.jsonl")
    parser.add_argument("--record", action="store_true", help="make these the results of record")
    parser.add_argument("--page", action="store_true", help="only check the page")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a class")
    args = parser.parse_args()
    args.backend = "cpu"
    if args.page:
        return check_page()

    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import transformers
    import transformers.models.llama.modeling_llama  # what every class needs, once
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    import attnd.hf  # noqa: F401

    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    wanted = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if args.only:
        wanted = {t: wanted[t] for t in args.only.split(",")}
    done: dict[str, dict[str, str]] = {}
    if args.results.exists():
        for line in args.results.read_text().splitlines():
            entry = json.loads(line)
            done[entry["type"]] = entry
    settings = {"device.kv_memory": "2G", "cache.max_pools": 256, "device.threads": 1}
    with own_daemon.running(args, "ipc", settings) as url, args.results.open("a") as f:
        for model_type, class_name in wanted.items():
            if model_type in done and not args.only:
                continue
            begin = time.monotonic()
            result, why, sharing = in_a_process(url, model_type, class_name, args.timeout)
            entry = {"type": model_type, "class": class_name, "result": result, "why": why}
            entry |= {"sharing": sharing} if sharing else {}
            done[model_type] = entry
            seconds = time.monotonic() - begin
            print(f"{model_type:28} {seconds:5.1f} s {result:18} {sharing} {why[:150]}", flush=True)
            f.write(json.dumps(entry) + "\n")
            f.flush()
    if args.record:
        names = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        missing = [t for t in names if t not in done]
        if missing:
            sys.exit(f"--record needs a result of each model type, there is none of {missing}")
        results = [{**done[t], "why": plain(done[t]["why"])} for t in names]
        RECORD.write_text("".join(json.dumps(x) + "\n" for x in [versions, *results]))
        PAGE.write_text(page(versions, results))
    recorded, results = read_record()
    of_record = {x["type"]: (x["result"], x.get("sharing", "")) for x in results}
    now = {t: (done[t]["result"], done[t].get("sharing", "")) for t in wanted}
    changed = [
        f"{t}: {now[t]}, of record {of_record[t]}"
        for t in wanted
        if recorded["transformers"] == versions["transformers"]
        and of_record.get(t, now[t]) != now[t]
    ]
    print(*changed, sep="\n", end="\n" if changed else "")
    return 1 if changed or any(done[t]["result"] == "differs" for t in wanted) else 0


if __name__ == "__main__":
    sys.exit(main())
