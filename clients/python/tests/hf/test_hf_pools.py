"""Models whose layers differ in geometry: a pool for each, and rows that have a sequence in all of them."""

import copy

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.20", reason="transformers 5.20 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, llama, make, prompts  # noqa: E402

import attnd  # noqa: E402
import attnd.hf  # noqa: E402

KINDS = ["full_attention", "sliding_attention"] * 2


def mimo():
    """Windows over keys of more heads."""
    config = tf.MiMoV2FlashConfig(
        **SIZES,
        v_head_dim=16,
        sliding_window=7,
        layer_types=KINDS,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )
    return tf.MiMoV2FlashForCausalLM(config)


def gemma4(global_head_dim=64):
    """Windows over shorter heads; the last two layers share the keys and values of others."""
    config = tf.Gemma4TextConfig(
        **SIZES,
        global_head_dim=global_head_dim,
        sliding_window=7,
        layer_types=KINDS[1:] + KINDS[:1],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=97,
    )
    return tf.Gemma4ForCausalLM(config)


@pytest.fixture(params=[mimo, gemma4], ids=lambda f: f.__name__)
def model(request):
    return make(request.param)


def n_sequences(client):
    return client.stats()["sequences"]


def test_each_geometry_has_a_pool_and_greedy_text_is_that_of_eager(model, attach, client):
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    specs = [pool.spec for pool in worker.pools.all]
    assert len({(s.num_kv_heads, s.head_dim_k, s.head_dim_v) for s in specs}) == 2
    before = n_sequences(client)
    with worker.cache() as cache:
        assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=cache), want)
        assert n_sequences(client) == before + 2 * 4
    assert n_sequences(client) == before
    worker.max_tokens, worker.max_items = 9, 2
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


def count_steps(monkeypatch):
    """Counts the steps that go as messages."""
    steps = []
    step = attnd.Pool.step

    def counted(self, *args, **kwargs):
        steps.append(args[0])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(attnd.Pool, "step", counted)
    return steps


def test_each_pool_has_a_lane(model, attach, monkeypatch):
    """Layers that share the keys of others attend over it, too."""
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=True)
    steps = count_steps(monkeypatch)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert worker.layers.is_used and not steps
    worker.max_tokens, worker.max_items = 9, 2  # in chunks
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert not steps


def test_a_pass_that_ends_half_way_leaves_no_pool_out_of_step(attach):
    model = make(mimo)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model, lane=True)
    layer = model.model.layers[2]
    forward = layer.forward

    def failing(*args, **kwargs):
        raise RuntimeError("planted")

    with torch.no_grad(), worker.cache() as cache:
        first = model(**inputs, past_key_values=cache)
        ids = first.logits[:, -1:].argmax(-1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], dim=1)
        layer.forward = failing
        with pytest.raises(RuntimeError, match="planted"):
            model(input_ids=ids, attention_mask=mask, past_key_values=cache)
        layer.forward = forward
        cache.reset()
        assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=cache), want)
        assert worker.layers.is_used


def test_beams_fork_in_every_pool(model, attach, client):
    inputs = prompts(model)
    options = dict(GREEDY, num_beams=3, num_return_sequences=2)
    want = model.generate(**inputs, **options)
    worker = attach(model)
    before = n_sequences(client)
    assert torch.equal(worker.generate(**inputs, **options), want)
    assert n_sequences(client) == before


def test_guesses_are_cropped_in_every_pool(attach):
    model, assistant = make(mimo), make(llama, seed=1)
    inputs = prompts(model, (12,))
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    assert torch.equal(worker.generate(**inputs, **GREEDY, assistant_model=assistant), want)
    for n in 1, 2, 3:  # drafts of the first layers leave the other pool behind, or not
        got = worker.generate(**inputs, **GREEDY, assistant_early_exit=n)
        assert torch.equal(got, want)


def test_a_copied_cache_goes_its_own_way(model, attach):
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


@pytest.mark.parametrize("what", ["open", "fork"])
def test_rows_are_there_in_all_pools_or_in_none(attach, client, monkeypatch, what):
    model = make(mimo)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    worker = attach(model)
    owner = attnd.Pool if what == "open" else attnd.Sequence
    original = getattr(owner, what)
    n_left = 3

    def failing(self, *args, **kwargs):
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise attnd.OverloadedError("planted")
        return original(self, *args, **kwargs)

    with worker.cache() as cache, torch.no_grad():
        if what == "fork":
            model(**inputs, past_key_values=cache)
        before, columns = n_sequences(client), cache.get_seq_length()
        with monkeypatch.context() as m, pytest.raises(attnd.OverloadedError, match="planted"):
            m.setattr(owner, what, failing)
            if what == "open":
                model(**inputs, past_key_values=cache)
            else:
                cache.batch_repeat_interleave(2)
        assert n_left == -1
        assert n_sequences(client) == before
        assert cache.get_seq_length() == columns
        if what == "open":
            assert torch.equal(worker.generate(**inputs, **GREEDY, past_key_values=cache), want)
        else:
            assert cache.batch_size == 4


def test_a_crop_that_fails_half_way_is_done_again(attach, monkeypatch):
    model = make(mimo)
    ids = prompts(model, (9, 9))["input_ids"]
    worker = attach(model)
    original = attnd.Sequence.truncate
    n_left = 1

    def failing(self, *args, **kwargs):
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise attnd.OverloadedError("planted")
        return original(self, *args, **kwargs)

    with torch.no_grad(), worker.cache() as cache:
        want = model(input_ids=ids, past_key_values=cache).logits[:, -1]
        with monkeypatch.context() as m, pytest.raises(attnd.OverloadedError):
            m.setattr(attnd.Sequence, "truncate", failing)
            cache.crop(-1)
        with pytest.raises(attnd.InvalidArgumentError):  # of the sequence that was cropped
            model(input_ids=ids[:, -1:], past_key_values=cache)
        cache.crop(8)
        got = model(input_ids=ids[:, -1:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


def test_all_pools_are_made_again_after_a_restart(own_daemon):
    model = make(mimo)
    inputs = prompts(model)
    want = model.generate(**inputs, **GREEDY)
    with attnd.hf.attach(model, own_daemon.url, name="two", n_blocks=64) as worker:
        assert [pool.spec.name for pool in worker.pools.all] == ["two.0", "two.1"]
        own_daemon.restart()
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)
        assert [pool.spec.n_blocks for pool in worker.pools.all] == [64, 64]


def test_what_no_pool_can_hold_is_refused_by_its_name(attach):
    model = make(lambda: gemma4(global_head_dim=520))
    with pytest.raises(attnd.UnsupportedError, match="layer 1 has head_dim of k 520: .* 512"):
        attach(model)
    assert model.config._attn_implementation == "eager"
