"""generate() with a second model or a second pass: assistants, early exit, guidance, tuned prompts."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, gemma2, llama, make, prompts, qwen3  # noqa: E402

import attnd  # noqa: E402


def one_layer():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**{**SIZES, "num_hidden_layers": 1}))


def n_sequences(client):
    return client.stats()["sequences"]


@pytest.mark.parametrize("is_attached", [True, False], ids=["attached", "by itself"])
@pytest.mark.parametrize("build", [llama, qwen3], ids=lambda f: f.__name__)
def test_an_assistant_may_be_attached_too(attach, client, build, is_attached):
    model, assistant = make(build), make(one_layer, seed=1)
    inputs = prompts(model, (9,))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    if is_attached:
        helper = attach(assistant)
    before = n_sequences(client)
    assert torch.equal(worker.generate(**inputs, **GREEDY, assistant_model=assistant), want)
    assert n_sequences(client) == before
    if is_attached:
        assert helper.spent.n_steps > 8


@pytest.mark.parametrize("build", [llama, gemma2], ids=lambda f: f.__name__)
def test_guidance_runs_the_model_a_second_time(attach, client, build):
    model = make(build)
    inputs = prompts(model)
    negative = prompts(model, (2, 5, 3, 4), seed=2)
    options = dict(
        GREEDY,
        guidance_scale=1.7,
        negative_prompt_ids=negative["input_ids"],
        negative_prompt_attention_mask=negative["attention_mask"],
    )
    want = model.generate(**inputs, **options)
    assert not torch.equal(want, model.generate(**inputs, **GREEDY))
    worker = attach(model)
    before = n_sequences(client)
    assert torch.equal(worker.generate(**inputs, **options), want)
    with worker.cache() as cache:
        assert torch.equal(worker.generate(**inputs, **options, past_key_values=cache), want)
    assert n_sequences(client) == before


def test_a_cache_that_was_replaced_is_not_taken_again(attach):
    """It is as empty as before, though tokens were given with it."""
    model = make(llama)
    inputs = prompts(model, (9,))
    worker = attach(model)
    mine = tf.DynamicCache(config=model.config)

    def besides(input_ids, scores):
        model(input_ids=input_ids[:, -1:], past_key_values=mine, use_cache=True)
        return scores

    with pytest.raises(attnd.UnsupportedError, match="is in the output"):
        worker.generate(**inputs, **GREEDY, logits_processor=[besides])


@pytest.mark.parametrize("lane", [False, True])
def test_early_exit_drafts_with_the_first_layers(lane, attach, client):
    model = make(llama)
    inputs = prompts(model, (9,))
    want = model.generate(**inputs, **GREEDY)
    try:
        model.generate(**inputs, **GREEDY, assistant_early_exit=2)
    except TypeError as e:
        pytest.skip(f"transformers {tf.__version__} does not do it by itself: {e}")
    worker = attach(model, lane=lane)
    before = n_sequences(client)
    assert torch.equal(worker.generate(**inputs, **GREEDY, assistant_early_exit=2), want)
    assert worker.layers.is_used == lane
    assert n_sequences(client) == before


def test_a_tuned_prompt_is_part_of_the_text(attach):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = make(llama)
    inputs = prompts(model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    torch.manual_seed(7)
    tuned = peft.get_peft_model(model, config).eval()
    alike = prompts(model, (9, 9, 9))
    want = tuned.generate(**alike, **GREEDY)
    worker = attach(tuned)
    assert torch.equal(worker.generate(**alike, **GREEDY), want)
    with pytest.raises(attnd.UnsupportedError, match="row 0: padding after a token"):
        worker.generate(**inputs, **GREEDY)  # the prompt comes before the padding


def mistral():
    sizes = {**SIZES, "num_hidden_layers": 2, "sliding_window": 8}
    return tf.MistralForCausalLM(tf.MistralConfig(**sizes))


def far_ahead(assistant):
    """It guesses 20 tokens each time, sure or not."""
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = 20, "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


@pytest.mark.parametrize("build", [llama, mistral], ids=lambda f: f.__name__)
def test_an_assistant_of_windows_alone_guesses_far_ahead(attach, client, build):
    """Its guesses are taken back beyond what its window has left."""
    model, assistant = make(build), far_ahead(make(mistral, seed=1))
    inputs, options = prompts(model, (9,)), {**GREEDY, "max_new_tokens": 40}
    want = model.generate(**inputs, **options)
    worker, _ = attach(model), attach(assistant)
    before = n_sequences(client)
    assert torch.equal(worker.generate(**inputs, **options, assistant_model=assistant), want)
    assert n_sequences(client) == before


def test_the_padding_token_in_a_text_is_no_padding_for_an_assistant(attach):
    model, assistant = make(llama), far_ahead(make(llama))
    with torch.no_grad():
        model.lm_head.weight[SIZES["pad_token_id"]] *= 2
    inputs = prompts(model, (9,))
    want = model.generate(**inputs, **GREEDY)
    assert (want[:, 9:] == SIZES["pad_token_id"]).any()
    worker, _ = attach(model), attach(assistant)
    assert torch.equal(worker.generate(**inputs, **GREEDY, assistant_model=assistant), want)
    for seed in range(4):
        torch.manual_seed(seed)
        options = {**GREEDY, "do_sample": True, "assistant_model": assistant}
        assert worker.generate(**inputs, **options).shape == want.shape
