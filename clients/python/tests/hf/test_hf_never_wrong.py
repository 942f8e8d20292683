"""What attnd.hf cannot give a model's own text for is refused: no order of calls gives a wrong one."""

import copy

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, gpt_oss, llama, make, prompts, qwen3  # noqa: E402

import attnd  # noqa: E402
import attnd.hf  # noqa: E402
from attnd.hf._named import CACHE  # noqa: E402

IS_OLD = int(tf.__version__.split(".")[1]) < 20
OTHERS = ["eager", "sdpa"]  # attentions a model may be set to


def refused(match):
    return pytest.raises(attnd.UnsupportedError, match=match)


def same_text(model, worker, inputs, want):
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert model.config._attn_implementation == "attnd"


def test_a_closed_worker_does_not_generate(attach):
    model = make(llama)
    inputs = prompts(model)
    worker = attach(model)
    worker.close()
    with refused("worker is closed"):
        worker.generate(**inputs, **GREEDY)
    with refused("worker is closed"):
        worker.cache()


@pytest.mark.parametrize("other", OTHERS)
def test_the_cache_of_a_closed_worker_is_refused(attach, other):
    model = make(llama)
    model.set_attn_implementation(other)
    inputs = prompts(model)
    worker = attach(model)
    cache = worker.cache()
    worker.close()
    with refused("worker of this cache is closed"):
        model.generate(**inputs, **GREEDY, past_key_values=cache)
    with torch.no_grad(), refused("worker of this cache is closed"):
        model(input_ids=inputs["input_ids"], past_key_values=cache)


def test_a_closed_cache_is_refused(attach):
    model = make(llama)
    worker = attach(model)
    cache = worker.cache()
    cache.close()
    with refused("this cache is closed"):
        worker.generate(**prompts(model), **GREEDY, past_key_values=cache)


@pytest.mark.parametrize("other", OTHERS)
def test_another_attention_set_meanwhile_is_refused(attach, other):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    with worker.cache() as cache, torch.no_grad():
        model(**inputs, past_key_values=cache)
        model.set_attn_implementation(other)
        with refused(f"set to the attention '{other}'"):
            model(input_ids=inputs["input_ids"][:, :1], past_key_values=cache)
    with refused(f"set to the attention '{other}'"):
        worker.generate(**inputs, **GREEDY)
    model.set_attn_implementation("attnd")
    same_text(model, worker, inputs, want)
    model.set_attn_implementation(other)
    worker.close()
    assert model.config._attn_implementation == other  # what the user chose stays


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("share", ["one model", "one config"])
def test_two_workers_of_one_config_may_close_in_any_order(attach, other, order, share):
    model = make(llama)
    model.set_attn_implementation(other)
    second = model
    if share == "one config":
        second = tf.LlamaForCausalLM(model.config).eval()
        second.load_state_dict(model.state_dict())
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    models = model, second
    workers = attach(model), attach(second)
    for m, worker in zip(models, workers):
        same_text(m, worker, inputs, want)
    workers[order[0]].close()
    same_text(models[order[1]], workers[order[1]], inputs, want)
    workers[order[1]].close()
    assert model.config._attn_implementation == other
    assert torch.equal(second.generate(**inputs, **GREEDY), want)


@pytest.mark.parametrize("other", OTHERS)
def test_a_model_that_is_not_attached_cannot_use_the_cache(attach, other):
    """Its attention would see the new keys alone."""
    model, stranger = make(llama), make(llama)
    stranger.set_attn_implementation(other)
    worker = attach(model)
    inputs = prompts(model)
    with worker.cache() as cache, torch.no_grad(), refused("only attnd's attention"):
        stranger(**inputs, past_key_values=cache)


def test_close_restores_the_attention_whatever_else_fails(attach, monkeypatch):
    model = make(llama)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    cache = worker.cache()
    worker.generate(**inputs, **GREEDY, past_key_values=cache)
    n_open = len(cache.sequences)
    asked = []

    def failing(self, **kwargs):
        asked.append(self)
        raise attnd.InternalError("planted")

    monkeypatch.setattr(attnd.Sequence, "close", failing)
    with pytest.raises(attnd.InternalError, match="planted"):
        worker.close()
    assert len(asked) == n_open  # one that fails does not keep the others
    assert worker.is_closed and model.config._attn_implementation == "eager"
    with refused("worker is closed"):
        worker.generate(**inputs, **GREEDY)
    with refused("worker of this cache is closed"):
        model.generate(**inputs, **GREEDY, past_key_values=cache)
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    assert cache.is_closed
    with pytest.raises(attnd.InvalidArgumentError, match="closed"):
        worker.pool.open()  # nor does it keep what is closed after it


def test_a_mask_of_fewer_rows_than_the_batch_is_refused(attach):
    model = make(llama)
    worker = attach(model)
    inputs = prompts(model, (6, 6, 6))
    with worker.cache() as cache, torch.no_grad():
        with refused(r"attention_mask has 1 rows.*batch of 3"):
            model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"][:1],
                past_key_values=cache,
            )
        assert cache.sequences == []


def test_sinks_changed_after_attaching_are_refused(attach):
    model = make(gpt_oss)
    worker = attach(model)
    inputs = prompts(model)
    model.model.layers[2].self_attn.sinks.data.add_(0.25)  # tells no version counter
    with refused("layer 2.*sinks"):
        worker.generate(**inputs, **GREEDY)


def test_another_models_sinks_are_refused_on_this_cache(attach):
    model, other = make(gpt_oss), make(gpt_oss, seed=3)
    worker = attach(model)
    attach(other)
    with worker.cache() as cache, refused("layer 0.*sinks"):
        other.generate(**prompts(other), **GREEDY, past_key_values=cache)


def moshi():
    config = tf.MoshiConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        ffn_dim=96,
        max_position_embeddings=512,
        sliding_window=16,
        audio_vocab_size=32,
        depth_decoder_config=dict(hidden_size=32, num_hidden_layers=1, audio_vocab_size=32),
    )
    return tf.MoshiForCausalLM(config)


@pytest.mark.skipif(IS_OLD, reason="Moshi has an attention of its own before 5.20")
def test_a_cache_that_forgets_without_a_mask_that_does_is_refused_beyond_its_window(attach):
    """Moshi's own cache forgets what is beyond its window, its masks do not."""
    model = make(moshi)
    inputs = prompts(model, (5, 9))
    short, long = ({**GREEDY, "max_new_tokens": n} for n in (7, 12))
    want = model.generate(**inputs, **short)
    worker = attach(model)
    assert torch.equal(worker.generate(**inputs, **short), want)
    with refused("layer 0.*sliding_window of 16"):
        worker.generate(**inputs, **long)


def test_a_row_that_is_all_padding_is_refused(attach):
    """Its logits are made of padding: eager and sdpa differ in what they say."""
    model = make(llama)
    worker = attach(model)
    inputs = prompts(model, (5, 0, 3))
    for n in 1, 8:
        with refused("row 1 is all padding"):
            worker.generate(**inputs, **{**GREEDY, "max_new_tokens": n})
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ones = torch.ones_like(mask[:, :1])
    with worker.cache() as cache, torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        with refused("row 1 is all padding"):
            mask = torch.cat([mask, ones], dim=1)
            model(input_ids=ids[:, :1], attention_mask=mask, past_key_values=cache)


def stablelm():
    sizes = {name: n for name, n in SIZES.items() if name != "head_dim"}
    return tf.StableLmForCausalLM(tf.StableLmConfig(**sizes))


@pytest.mark.parametrize("build", [llama, gpt_oss, stablelm], ids=lambda f: f.__name__)
def test_output_attentions_is_refused(attach, build):
    """Also of models that would answer with an empty tuple, as StableLM."""
    if build is stablelm and IS_OLD:
        pytest.skip("StableLM is refused before 5.20: it makes masks of its own")
    model = make(build)
    worker = attach(model)
    inputs = prompts(model)
    with worker.cache() as cache, torch.no_grad():
        with refused("output_attentions"):
            model(**inputs, past_key_values=cache, output_attentions=True)
        with refused("output_attentions"):
            model.model(**inputs, past_key_values=cache, output_attentions=True)
    with refused("output_attentions"):
        worker.generate(**inputs, **GREEDY, output_attentions=True, return_dict_in_generate=True)


def test_an_exception_between_update_and_attention_does_not_reach_the_next_model(attach):
    model, other = make(llama), make(qwen3)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker, other_worker = attach(model), attach(other)
    attention = model.model.layers[1].self_attn

    class Planted(Exception):
        pass

    class FailingCache:
        def __getattr__(self, name):
            return getattr(cache, name)

        def update(self, *args, **kwargs):
            cache.update(*args, **kwargs)
            raise Planted

    with worker.cache() as cache, torch.no_grad():
        forward = attention.forward
        attention.forward = lambda *a, **k: forward(*a, **{**k, CACHE: FailingCache()})
        with pytest.raises(Planted):
            model(**inputs, past_key_values=cache)
        attention.forward = forward
        with refused("without an attnd cache"):
            other(**inputs)  # on a cache of its own, whose keys are not those that were left
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    with other_worker.cache() as fresh, torch.no_grad():
        other(**inputs, past_key_values=fresh)
        assert fresh.get_seq_length() == inputs["input_ids"].shape[1]


def test_what_update_hands_on_is_taken_by_attnd_alone(attach):
    """Every way to read it as if it were all cached keys."""
    worker = attach(make(llama))
    k, v, q = (torch.randn(2, heads, 3, 32) for heads in (2, 2, 4))
    with worker.cache() as cache:
        keys, values = cache.update(k, v, 0)
        assert keys.shape == k.shape and keys.dtype == k.dtype and keys.device == k.device
        for use in (
            lambda: q[:, :2] @ keys.transpose(2, 3),
            lambda: torch.matmul(q[:, :2], keys.transpose(-1, -2)),
            lambda: torch.einsum("bhqd,bhkd->bhqk", q[:, :2], keys),
            lambda: torch.nn.functional.scaled_dot_product_attention(q[:, :2], keys, values),
            lambda: torch.nn.functional.linear(q, keys),
            lambda: torch.cat([k, keys], dim=2),
            lambda: k + keys,
            lambda: keys * 2,
            lambda: torch.empty_like(k).copy_(keys),
            lambda: torch.softmax(keys, dim=-1),
            lambda: keys.numpy(),
            lambda: keys.data_ptr(),
        ):
            with refused("only attnd's attention"):
                use()
        assert not isinstance(keys, torch.Tensor)


def test_a_config_that_was_copied_while_attached_does_not_stay_attached(attach):
    model = make(llama)
    worker = attach(model)
    clone = copy.deepcopy(model)
    worker.close()
    inputs = prompts(model)
    with refused("without an attnd cache"):
        clone.generate(**inputs, **GREEDY)
    clone.set_attn_implementation("eager")
    want = model.generate(**inputs, **GREEDY)
    assert torch.equal(clone.generate(**inputs, **GREEDY), want)
    assert SIZES["num_hidden_layers"] == clone.config.num_hidden_layers
