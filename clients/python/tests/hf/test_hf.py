"""attnd.hf against models' own eager attention: tiny models with random weights."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
from hf_models import (  # noqa: E402
    GREEDY,
    MODELS,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    make,
    prompts,
    qwen3,
)

import attnd  # noqa: E402
import attnd.hf  # noqa: E402
from attnd.hf import _worker  # noqa: E402


@pytest.fixture(params=MODELS, ids=lambda f: f.__name__)
def model(request):
    return make(request.param)


def test_logits_are_those_of_eager_attention_with_padding_and_chunks(model, attach):
    """A prompt, then several tokens, then one: against one pass of everything."""
    inputs = prompts(model, (11, 3, 17, 8))
    extra = torch.randint(3, 97, (4, 6), device=model.device)
    ids = torch.cat([inputs["input_ids"], extra], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(extra)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    worker = attach(model)
    got = []
    with torch.no_grad(), worker.cache() as cache:
        for a, b in [(0, 10), (10, 17), (17, 22), (22, 23)]:
            got.append(
                model(
                    input_ids=ids[:, a:b],
                    attention_mask=mask[:, :b],
                    position_ids=positions[:, a:b],
                    past_key_values=cache,
                ).logits
            )
            assert cache.get_seq_length() == b
    real = mask.bool()
    torch.testing.assert_close(torch.cat(got, dim=1)[real], want[real], atol=2e-4, rtol=1e-4)
    assert want[real].std() > 0.1  # the models say something


def test_greedy_generation_is_that_of_eager_attention(model, attach):
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    got = worker.generate(**inputs, **GREEDY)
    assert torch.equal(got, want)
    worker.close()
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model.generate(**inputs, **GREEDY), want)


def test_sampling_with_a_seed_gives_the_same_tokens(attach):
    model = make(llama)
    inputs = prompts(model)
    options = dict(do_sample=True, max_new_tokens=16, top_k=20, temperature=1.3, eos_token_id=None)
    torch.manual_seed(5)
    want = model.generate(**inputs, **options, num_return_sequences=2)
    worker = attach(model)
    torch.manual_seed(5)
    assert torch.equal(worker.generate(**inputs, **options, num_return_sequences=2), want)


@pytest.mark.parametrize("build", [llama, gpt_oss], ids=lambda f: f.__name__)
def test_beam_search_forks_sequences_and_frees_them(build, attach, client):
    model = make(build)
    inputs = prompts(model)
    options = dict(GREEDY, num_beams=4, num_return_sequences=3)
    want = model.generate(**inputs, **options)
    worker = attach(model, name=f"beams-{build.__name__}")
    forks = []
    original = attnd.Sequence.fork
    attnd.Sequence.fork = lambda self, *a, **k: forks.append(self) or original(self, *a, **k)
    try:
        got = worker.generate(**inputs, **options)
    finally:
        attnd.Sequence.fork = original
    assert torch.equal(got, want)
    assert len(forks) > 4
    pool = client.pool(f"beams-{build.__name__}")
    assert pool.n_free_blocks == pool.spec.n_blocks


def test_prompt_lookup_crops_what_was_guessed_wrong(attach):
    model = make(llama)
    inputs = prompts(model, (12,))
    inputs = {k: torch.cat([v, v], dim=1) for k, v in inputs.items()}
    options = dict(GREEDY, eos_token_id=2)  # transformers 5.0 wants one here
    want = model.generate(**inputs, **options)
    worker = attach(model)
    got = worker.generate(**inputs, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(got, want)


def test_a_kept_cache_goes_on_where_it_ended(attach):
    model = make(qwen3)
    inputs = prompts(model, (9, 9))
    want = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 12})
    worker = attach(model)
    with worker.cache() as cache:
        first = worker.generate(**inputs, **{**GREEDY, "max_new_tokens": 5}, past_key_values=cache)
        assert cache.get_seq_length() == 13  # the last token is not yet put in
        mask = torch.ones_like(first)
        second = worker.generate(
            input_ids=first,
            attention_mask=mask,
            **{**GREEDY, "max_new_tokens": 7},
            past_key_values=cache,
        )
    assert torch.equal(second, want)


def test_rows_are_repeated_and_selected(attach):
    model = make(gemma3)
    ids = prompts(model, (6, 6))["input_ids"]
    with torch.no_grad():
        rows = [1, 1, 0]
        want = model(input_ids=torch.cat([ids, ids[:, :1]], dim=1)[rows]).logits[:, -1]
        worker = attach(model)
        with worker.cache() as cache:
            model(input_ids=ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            assert cache.batch_size == 4
            cache.batch_select_indices(torch.tensor([3, 2, 0]))
            got = model(input_ids=ids[:, :1][rows], past_key_values=cache).logits[:, -1]
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_long_prompts_go_in_several_steps(attach):
    model = make(gemma3)
    inputs = prompts(model, (40, 33, 27))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    worker.max_tokens, worker.max_items = 16, 2
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


def as_if_on_a_gpu(worker, monkeypatch):
    """Copies as from a GPU and to it; on a machine without one, of host memory."""
    monkeypatch.setattr(worker, "_is_on_gpu", True)
    worker.layers.is_refused = True
    if worker.model.device.type == "cpu":

        class Stream:
            def synchronize(self):
                pass

            def record_event(self):
                return self

        empty = torch.empty
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        worker._is_pinned = True
        monkeypatch.setattr(worker, "_run_on_host", worker._run_on_device)


def test_the_way_of_a_gpu_gives_the_same(attach, monkeypatch):
    """The copies into messages and out of answers."""
    model = make(gpt_oss)
    inputs = prompts(model, (20, 9))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=False)
    worker.max_tokens = 12
    as_if_on_a_gpu(worker, monkeypatch)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert worker.spent.n_steps >= 24 * 4 and worker.spent.copy_ns > 0


@pytest.mark.parametrize("is_shared", (False, True), ids=("sockets", "shm"))
def test_large_passes_of_a_gpu_go_over_sockets_in_halves(attach, monkeypatch, is_shared):
    model = make(llama)
    inputs = prompts(model, (20, 9, 1))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=False)
    n_layers = len(worker.seen)
    as_if_on_a_gpu(worker, monkeypatch)
    worker._is_shared = is_shared
    worker.spent = attnd.hf.Spent()
    monkeypatch.setattr(_worker, "HALVES_BYTES", 3 * worker._token_bytes)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    # the prompt and each token; with three rows from the first one on, in two steps each
    n_passes = want.shape[1] - inputs["input_ids"].shape[1]
    assert worker.spent.n_steps == n_passes * n_layers * (1 if is_shared else 2)
    monkeypatch.setattr(_worker, "HALVES_BYTES", 3 * worker._token_bytes + 1)
    worker.spent = attnd.hf.Spent()
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert worker.spent.n_steps == n_layers * (n_passes if is_shared else n_passes + 1)


def test_halves_of_a_gpu_that_fail_leave_nothing_in_flight(attach, monkeypatch):
    model = make(llama)
    inputs = prompts(model, (20, 9, 4))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=False)
    as_if_on_a_gpu(worker, monkeypatch)
    worker._is_shared = False
    monkeypatch.setattr(_worker, "HALVES_BYTES", 1)
    step_start, n = worker.pool.step_start, 0

    def failing(layer, items, *tensors, **kwargs):
        nonlocal n
        n += 1
        if n == 7:  # the first half of a layer: it begins behind what is cached
            items.c[0].pos += 1
        return step_start(layer, items, *tensors, **kwargs)

    monkeypatch.setattr(worker.pool, "step_start", failing)
    with pytest.raises(attnd.InvalidArgumentError, match="pos"):
        worker.generate(**inputs, **GREEDY)
    assert not worker.pool._steps
    assert not worker._staging._of_thread.__dict__  # others may not write to its buffers
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


@pytest.mark.parametrize("build", (llama, gemma3), ids=lambda f: f.__name__)
def test_prompts_go_over_a_lane_in_chunks(build, attach):
    model = make(build)
    inputs = prompts(model, (40, 3, 17))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=True)
    worker.max_tokens = 7
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert worker.spent.n_steps == 0 and worker.layers.is_used


def test_prompts_larger_than_a_lane_go_over_it_in_pieces(attach, client, monkeypatch):
    """Once as a chunk that is too large for the lane's 2 MiB, which hold 2047 tokens, once in several."""
    model = make(llama)
    lengths = [290] * 8  # 2320 tokens of 1 KiB
    inputs = prompts(model, lengths)
    want = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 3})
    open_lane = client.open_lane
    monkeypatch.setattr(client, "open_lane", lambda: open_lane(in_bytes=1, out_bytes=1))
    worker = attach(model, lane=True)
    assert worker.max_tokens > sum(lengths)
    for max_tokens in (worker.max_tokens, 2100):
        worker.max_tokens = max_tokens
        got = worker.generate(**inputs, **{**GREEDY, "max_new_tokens": 3})
        assert torch.equal(got, want)
    assert worker.spent.n_steps == 0 and worker.layers.is_used


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_stay_near_eager_attention(dtype, attach):
    model = make(llama, dtype)
    inputs = prompts(model)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        want = model(**inputs, position_ids=positions).logits.float()
        worker = attach(model)
        assert worker.pool.spec.q_dtype == ("bf16" if dtype == torch.bfloat16 else "f16")
        with worker.cache() as cache:
            got = model(**inputs, position_ids=positions, past_key_values=cache).logits.float()
    error = (got - want)[mask].abs().max() / want[mask].std()
    assert error < (0.15 if dtype == torch.bfloat16 else 0.02)


def test_the_pool_is_made_from_what_the_layers_ask(attach):
    worker = attach(make(gpt_oss))
    spec = worker.pool.spec
    assert (spec.num_layers, spec.num_q_heads, spec.num_kv_heads, spec.head_dim_k) == (4, 4, 2, 32)
    assert [layer.window_tokens for layer in spec.layers] == [6, 0, 6, 0]
    sinks = worker.model.model.layers[1].self_attn.sinks.tolist()
    assert spec.layers[1].sink_logits == pytest.approx(sinks)
    spec = attach(make(gemma2)).pool.spec
    assert spec.layers[0].soft_cap == 3.0 and spec.layers[0].scale == pytest.approx(20**-0.5)
    assert len(attach(make(llama)).pool.spec.layers) == 1


def test_what_cannot_be_done_is_refused_by_name(attach):
    def refused(match, model=None, **changes):
        model = model or make(llama)
        for name, value in changes.items():
            setattr(model.config, name, value)
        with pytest.raises(attnd.UnsupportedError, match=match):
            attach(model)
        assert model.config._attn_implementation == "eager"

    refused("layer type 'another_attention'", layer_types=["another_attention"] * 4)
    refused("encoder-decoder", is_encoder_decoder=True)
    refused("bidirectional", is_causal=False)
    refused("training mode", make(llama).train())
    refused("dtype torch.float64", make(llama, torch.float64))

    model = make(llama)
    worker = attach(model)
    ids = prompts(model, (5, 5))["input_ids"]

    def call_refused(match, **kwargs):
        with worker.cache() as cache, pytest.raises(attnd.UnsupportedError, match=match):
            model(**{"input_ids": ids, "past_key_values": cache, **kwargs})

    with torch.no_grad():
        call_refused("without an attnd cache", past_key_values=None, use_cache=False)
        holes = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 1, 1]], device=model.device)
        call_refused("row 1: padding after a token", attention_mask=holes)
        mask = torch.zeros(2, 1, 5, 5, device=model.device)
        call_refused("a custom 4D mask", attention_mask=mask)
        model.model.layers[2].self_attn.scaling = 0.5
        call_refused("layer 2 has scale 0.5, had 0.17")
        model.model.layers[2].self_attn.scaling = 32**-0.5
        with worker.cache() as cache:
            model(input_ids=ids, past_key_values=cache)
            with pytest.raises(attnd.UnsupportedError, match="a batch of 1 rows on a cache of 2"):
                model(input_ids=ids[:1], past_key_values=cache)
    call_refused("gradients")
