"""Options of models and of generate() over attnd.hf: each works, or is refused by its name."""

import copy

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from conftest import TRANSPORT  # noqa: E402
from hf_models import GREEDY, SIZES, gpt_oss, llama, make, prompts, qwen3  # noqa: E402

import attnd  # noqa: E402
import attnd.hf  # noqa: E402


def refused(match):
    return pytest.raises(attnd.UnsupportedError, match=match)


@pytest.mark.parametrize("build", [llama, gpt_oss], ids=lambda f: f.__name__)
def test_a_compiled_model_says_the_same(attach, build):
    model = make(build)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    finally:
        torch._dynamo.reset()


def test_a_copied_cache_goes_its_own_way(attach):
    model = make(qwen3)
    inputs = prompts(model, (9, 4))
    more = torch.randint(3, 97, (2, 3), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        mask = inputs["attention_mask"]
        longer = torch.cat([mask, torch.ones_like(more)], dim=1)
        ids = torch.cat([inputs["input_ids"], more], dim=1)
        positions = (longer.cumsum(1) - 1).clamp(min=0)
        want = model(input_ids=ids, attention_mask=longer, position_ids=positions).logits[:, -1]
        worker = attach(model)
        with worker.cache() as cache:
            model(**inputs, position_ids=positions[:, :9], past_key_values=cache)
            with copy.deepcopy(cache) as other:
                rest = dict(input_ids=more, attention_mask=longer, position_ids=positions[:, 9:])
                for c in other, cache:
                    got = model(**rest, past_key_values=c).logits[:, -1]
                    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
                ids_of = {s.id for c in (other, cache) for s in c.sequences}
                assert len(ids_of) == 4
            assert other.is_closed and not cache.is_closed


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_caches_of_transformers_are_refused(attach, kind):
    model = make(llama)
    worker = attach(model)
    inputs = prompts(model)
    with refused(f"cache_implementation '{kind}'"):
        worker.generate(**inputs, **GREEDY, cache_implementation=kind)
    with refused(f"cache_implementation '{kind}'"):
        config = tf.GenerationConfig(**GREEDY, cache_implementation=kind)
        worker.generate(**inputs, generation_config=config)
    with refused("without an attnd cache"):
        model.generate(**inputs, **GREEDY)
    with torch.no_grad(), refused("without an attnd cache"):
        cache = tf.StaticCache(config=model.config, max_cache_len=32)
        model(**inputs, past_key_values=cache)


def test_autocast_is_refused_where_it_changes_the_dtype(attach):
    model = make(llama)
    worker = attach(model)
    inputs = prompts(model)
    with torch.autocast(model.device.type, torch.bfloat16), refused("autocast"):
        worker.generate(**inputs, **GREEDY)


def test_a_model_in_f32_may_have_bf16_on_the_wire(attach):
    model = make(llama)
    inputs = prompts(model)
    with torch.no_grad():
        want = model(**inputs).logits
        worker = attach(model, wire_dtype="bf16")
        assert all(p.spec.q_dtype == "bf16" for p in worker.pools.all)
        with worker.cache() as cache:
            got = model(**inputs, past_key_values=cache).logits
    seen = inputs["attention_mask"].bool()
    error = (got - want)[seen].abs().max() / want[seen].std()
    assert 0 < error < 0.05
    assert worker.generate(**inputs, **GREEDY).shape[0] == len(want)
    worker.close()
    with pytest.raises(ValueError, match="wire_dtype is for messages"):
        attach(model, wire_dtype="bf16", lane=True)
    with pytest.raises(ValueError, match="wire_dtype is 'fp8'"):
        attach(model, wire_dtype="fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_keys_and_values_may_travel_as_codes_of_fp8(attach, dtype):
    if TRANSPORT == "shm":
        pytest.skip("shared memory has no wire")
    model = make(llama).to(dtype)
    inputs = prompts(model)
    with torch.no_grad():
        want = model(**inputs).logits.float()
        worker = attach(model, wire_dtype="fp8_e4m3")
        assert all(p.spec.q_dtype == "bf16" for p in worker.pools.all)
        with worker.cache() as cache:
            got = model(**inputs, past_key_values=cache).logits.float()
    seen = inputs["attention_mask"].bool()
    error = (got - want)[seen].std() / want[seen].std()
    assert 1e-3 < error < 0.2
    assert worker.generate(**inputs, **GREEDY).shape[0] == len(want)
    worker.close()
    with pytest.raises(ValueError, match="share_prefixes"):
        attach(model, wire_dtype="fp8_e4m3", share_prefixes=True)


@pytest.mark.parametrize("kv_dtype", ["nvfp4", "mxfp4"])
def test_a_cache_may_be_fp4(attach, kv_dtype):
    model = make(llama)
    inputs = prompts(model)
    with torch.no_grad():
        want = model(**inputs).logits
        worker = attach(model, kv_dtype=kv_dtype)
        assert all(p.spec.kv_dtype == kv_dtype for p in worker.pools.all)
        with worker.cache() as cache:
            got = model(**inputs, past_key_values=cache).logits
    seen = inputs["attention_mask"].bool()
    error = (got - want)[seen].std() / want[seen].std()
    assert 0 < error < 0.5
    first = worker.generate(**inputs, **GREEDY)
    assert torch.equal(worker.generate(**inputs, **GREEDY), first)
    worker.close()


def test_fp4_of_heads_that_are_no_whole_groups_is_refused_by_name(attach):
    model = make(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**dict(SIZES, head_dim=16))))
    with pytest.raises(attnd.InvalidArgumentError, match="head_dim_k is 16, not a multiple of 32"):
        attach(model, kv_dtype="mxfp4")


def test_no_cache_is_refused(attach):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    with refused("use_cache=False"):
        worker.generate(**inputs, **GREEDY, use_cache=False)
    with refused("use_cache=False"), torch.no_grad(), worker.cache() as cache:
        model(**inputs, past_key_values=cache, use_cache=False)
    with torch.no_grad(), refused("without an attnd cache"):
        model(**inputs, past_key_values=None)
    assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=None), want)


@pytest.mark.parametrize("trained", ["q_proj", "k_proj", "v_proj"])
def test_gradients_are_refused_whichever_projection_is_trained(attach, trained):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith(f"0.self_attn.{trained}.weight")
    worker = attach(model)
    with worker.cache() as cache, refused("gradients"):
        model(**inputs, past_key_values=cache)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


def bert():
    config = tf.BertConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        is_decoder=True,
        add_cross_attention=True,
    )
    return tf.BertLMHeadModel(config)


def test_cross_attention_is_refused(attach):
    model = make(bert)
    inputs = prompts(model)
    worker = attach(model)
    states = torch.randn(4, 5, 64)
    with worker.cache() as cache, torch.no_grad():
        with refused("cross attention|cross-attention"):
            model(**inputs, encoder_hidden_states=states, past_key_values=cache)


def test_prefix_tuning_is_refused(attach):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make(llama)
    worker = attach(model)
    inputs = prompts(model)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(model, config).eval()
    with refused("without an attnd cache"):
        tuned.generate(**inputs, **GREEDY)
    with worker.cache() as cache, refused("attnd"):
        tuned.generate(**inputs, **GREEDY, past_key_values=cache)
    assert SIZES["num_hidden_layers"] == len(worker.seen)


def test_the_kind_of_cache_that_a_models_own_config_names_is_left_out(attach):
    """Gemma 3's is "hybrid"."""
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    model.generation_config.cache_implementation = "static"
    worker = attach(model)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    given = tf.GenerationConfig(**GREEDY, cache_implementation="static")
    got = worker.generate(**inputs, generation_config=given, cache_implementation=None)
    assert torch.equal(got, want)
    assert model.generation_config.cache_implementation == "static"
    assert given.cache_implementation == "static"


def test_what_follows_the_operations_of_torch_is_refused(attach):
    """Else a derivative or a trace would be without the attention."""
    from torch.autograd import forward_ad
    from torch.fx.experimental.proxy_tensor import make_fx

    model = make(llama).requires_grad_(False)
    x = model.model.embed_tokens(prompts(model)["input_ids"])
    worker = attach(model)

    def run(embeds):
        with worker.cache() as cache, torch.no_grad():
            return model(inputs_embeds=embeds, past_key_values=cache).logits

    def run_with_tangents(embeds):
        with worker.cache() as cache:
            return model(inputs_embeds=embeds, past_key_values=cache).logits

    want = run(x)
    with refused("forward-mode AD"), forward_ad.dual_level():
        run_with_tangents(forward_ad.make_dual(x, torch.ones_like(x)))
    with refused("torch.func"):
        torch.func.jvp(run_with_tangents, (x,), (torch.ones_like(x),))
    with refused("torch.func"):
        torch.func.vmap(lambda row: run(row[None]))(x)
    with refused("tracing"):
        torch.jit.trace(run, x, check_trace=False)
    with refused("tracing"):
        make_fx(run)(x)
    assert torch.equal(run(x), want)


def test_negative_sizes_are_refused_also_where_there_is_a_pool(attach):
    model = make(llama)
    attach(model)
    for name in "n_blocks", "n_tokens":
        with pytest.raises(ValueError, match=f"{name} is -1"):
            attach(model, **{"n_blocks": 0, name: -1})


def test_layers_of_a_cache_refuse_to_be_edited(attach):
    model = make(qwen3)
    worker = attach(model)
    with worker.cache() as cache, torch.no_grad():
        model(**prompts(model), past_key_values=cache)
        assert len(cache.layers) == len(cache) == 4
        assert cache.is_sliding == [True, False, True, False]
        for layer in cache.layers:
            with refused("keys of layer . set"):
                layer.keys = torch.zeros(1)
            with refused("values of layer ."):
                layer.values *= 2
            with refused("crop of layer ."):
                layer.crop(-1)


def test_an_attached_model_is_not_pickled(attach, tmp_path):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    with refused("pickling a model that is attached"):
        torch.save(model, tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "weights")
    worker.close()
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    assert torch.equal(loaded.generate(**inputs, **GREEDY), want)


def test_an_offloaded_model_has_its_own_text(attach, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    accelerate.cpu_offload(model, execution_device=model.device)
    worker = attach(model)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    with refused("share_prefixes.*forward was replaced by accelerate"):
        attach(model, share_prefixes=True)


@pytest.mark.skipif(
    tf.__version__.startswith("5.0."),
    reason="transformers 5.0 counts a column too many behind prefill_chunk_size, which is refused",
)
@pytest.mark.parametrize("share", [False, True])
def test_padded_prompts_in_chunks(attach, share):
    """A chunk may be all padding of a row."""
    model = make(llama, seed=2)
    inputs = prompts(model, (33, 13, 1, 25))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, share_prefixes=share)
    for n in 8, 16, 16, 20:
        assert torch.equal(worker.generate(**inputs, **GREEDY, prefill_chunk_size=n), want)
    inputs = prompts(model, (33, 0, 5))
    with refused("row 1 is all padding"):
        worker.generate(**inputs, **GREEDY, prefill_chunk_size=16)
