"""Models whose layers do not all attend to a cache of their own: hybrids, and layers that share keys and
values."""

import copy

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.20", reason="transformers 5.20 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, MIXED, SIZES, make, prompts  # noqa: E402

import attnd  # noqa: E402

KINDS = ["linear_attention", "full_attention"] * 2


def qwen3_next():
    config = tf.Qwen3NextConfig(
        **SIZES,
        layer_types=KINDS,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return tf.Qwen3NextForCausalLM(config)


def lfm2():
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2))


def minimax():
    """With a cache class of its own, which takes its first layer for one that attends."""
    config = tf.MiniMaxConfig(
        **SIZES,
        layer_types=KINDS[1:] + KINDS[:1],
        block_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return tf.MiniMaxForCausalLM(config)


def gemma3n():
    config = tf.Gemma3nTextConfig(
        **SIZES,
        layer_types=MIXED,
        sliding_window=7,
        num_kv_shared_layers=2,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=97,
        laurel_rank=8,
    )
    return tf.Gemma3nForCausalLM(config)


ALL = pytest.mark.parametrize(
    "build", [qwen3_next, lfm2, minimax, gemma3n], ids=lambda f: f.__name__
)
HYBRID = pytest.mark.parametrize("build", [qwen3_next, lfm2, minimax], ids=lambda f: f.__name__)


@ALL
def test_greedy_generation_is_that_of_eager_attention(build, attach):
    model = make(build)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    assert worker.pool.spec.num_layers == 2  # those that attend to keys of their own
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    worker.max_tokens = 9
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


@ALL
def test_beams_carry_their_states_along(build, attach):
    model = make(build)
    inputs = prompts(model)
    options = dict(GREEDY, num_beams=3, num_return_sequences=2)
    want = model.generate(**inputs, **options)
    assert torch.equal(attach(model).generate(**inputs, **options), want)


@ALL
def test_a_copied_cache_goes_its_own_way(build, attach):
    model = make(build)
    inputs = prompts(model, (9, 9))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    with worker.cache() as cache, torch.no_grad():
        first = model(input_ids=inputs["input_ids"], past_key_values=cache).logits[:, -1:]
        with copy.deepcopy(cache) as other:
            for c in cache, other:
                ids = [first.argmax(-1)]
                while len(ids) < 8:
                    ids.append(model(input_ids=ids[-1], past_key_values=c).logits.argmax(-1))
                assert torch.equal(torch.cat(ids, dim=1), want[:, 9:17])


@HYBRID
def test_states_that_cannot_go_back_are_refused(build, attach, monkeypatch):
    model = make(build)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    with worker.cache() as cache, torch.no_grad():
        model(input_ids=inputs["input_ids"], past_key_values=cache)
        assert not cache.is_croppable
        with pytest.raises(attnd.UnsupportedError, match="crop of a model with recurrent"):
            cache.crop(-1)

        def no_blocks(*args, **kwargs):
            raise attnd.OutOfBlocksError("planted")

        one = dict(input_ids=inputs["input_ids"][:, -1:], past_key_values=cache)
        with monkeypatch.context() as m:
            m.setattr(attnd.Pool, "step", no_blocks)
            with pytest.raises(attnd.OutOfBlocksError):
                model(**one)
        with pytest.raises(attnd.UnsupportedError, match="failed midway"):
            model(**one)
        cache.reset()
        assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=cache), want)


def test_a_shared_layer_that_attends_otherwise_is_refused(attach):
    model = make(gemma3n)
    model.model.layers[3].self_attn.scaling = 0.5
    with pytest.raises(attnd.UnsupportedError, match="scale 0.5"):
        attach(model)
    assert model.config._attn_implementation == "eager"
