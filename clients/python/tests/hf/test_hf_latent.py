"""attnd.hf with models of latent attention (MLA): one latent per token is cached, and the text is that of
eager attention."""

import re

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
from hf_models import (  # noqa: E402
    GREEDY,
    SYSTEM,
    batch,
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    glm4_moe_lite,
    make,
    on,
    prompts,
    same,
    tokens,
)

import attnd  # noqa: E402
import attnd.hf._latent  # noqa: E402


@pytest.fixture(params=[deepseek_v2, deepseek_v3, glm4_moe_lite], ids=lambda f: f.__name__)
def model(request):
    if request.param() is None:
        pytest.skip("this transformers has no such model")
    model = make(request.param, seed=len(request.node.name))
    if not hasattr(type(model.model.layers[0].self_attn), "expand_kv"):
        pytest.skip("this transformers gives caches expanded heads")
    return model


def eager(model, inputs, **options):
    now = model.config._attn_implementation
    model.set_attn_implementation("eager")
    want = model.generate(**on(model, inputs), **{**GREEDY, **options})
    model.set_attn_implementation(now)
    return want


def test_a_latent_is_stored_and_the_text_is_eagers(model, shared):
    worker = shared(model)
    spec = worker.pools.all[0].spec
    assert (spec.num_q_heads, spec.num_kv_heads) == (4, 1)
    assert (spec.is_v_in_k, spec.head_dim_k, spec.head_dim_v) == (True, 56, 48)
    assert len(worker.pools.all) == 1
    assert same(worker, model, batch(SYSTEM + tokens(9, 2))) == 59
    assert same(worker, model, batch(SYSTEM + tokens(9, 2))) == 59 - 48
    assert same(worker, model, batch(SYSTEM + tokens(5, 3), SYSTEM[:34])) > 0
    inputs = prompts(model)
    assert torch.equal(worker.generate(**inputs, **GREEDY), eager(model, inputs))
    beams = dict(GREEDY, num_beams=3)
    assert same(worker, model, batch(SYSTEM), **beams) > 0


@pytest.mark.parametrize("absorb", ["worker", "daemon"])
def test_over_a_lane_latents_are_stored(model, attach, absorb):
    inputs = prompts(model)
    want = eager(model, inputs)
    worker = attach(model, lane=True, absorb=absorb)
    spec = worker.pools.all[0].spec
    assert spec.is_v_in_k and (spec.q_nope_dim > 0) == (absorb == "daemon")
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    one, beams = batch(SYSTEM), {**GREEDY, "num_beams": 3}
    want = eager(model, one, **beams)
    assert torch.equal(worker.generate(**on(model, one), **beams), want)
    worker.max_tokens, worker.max_items = 9, 2  # in chunks
    assert torch.equal(worker.generate(**inputs, **GREEDY), eager(model, inputs))
    assert worker.layers.is_used and worker.spent.n_steps == 0
    rows = [SYSTEM, tokens(9, 2)]
    texts = [eager(model, batch(row))[0, len(row) :].tolist() for row in rows]
    got = model.generate_batch(inputs=rows, **GREEDY)
    ends = [x.generated_tokens for x in got.values()]
    assert ends == [text[: len(end)] for text, end in zip(texts, ends)]


def test_bf16_over_the_wire_and_int8_latents(model, attach):
    for options in ({"wire_dtype": "bf16"}, {"kv_dtype": "int8"}):
        worker = attach(model, **options)
        assert worker.pools.all[0].spec.is_v_in_k
        out = worker.generate(**prompts(model), **GREEDY)
        assert out.shape[1] == 17 + 24
        worker.close()


def test_continuous_batching_has_latents(model, attach):
    rows = [SYSTEM, tokens(9, 2), tokens(30, 3)]
    want = [eager(model, batch(row))[0, len(row) :].tolist() for row in rows]
    worker = attach(model)
    assert worker.pools.all[0].spec.is_v_in_k
    got = model.generate_batch(inputs=rows, **GREEDY)
    ends = [x.generated_tokens for x in got.values()]  # at the end of a text, which eager goes past
    assert ends == [text[: len(end)] for text, end in zip(want, ends)]
    assert all(len(end) == 24 or end[-1] == 2 for end in ends)


class Other(torch.nn.Linear):
    """Might compute anything, as an adapter's or a quantised layer's does."""


def test_what_is_not_a_plain_expansion_keeps_its_heads(model, attach):
    model.model.layers[1].self_attn.kv_b_proj.__class__ = Other
    inputs = prompts(model)
    want = eager(model, inputs)
    worker = attach(model)
    assert [p.spec.is_v_in_k for p in worker.pools.all] == [True, False]
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


def test_what_changes_after_attach_is_refused(model, attach):
    worker = attach(model)
    model.model.layers[1].self_attn.kv_b_proj.__class__ = Other
    with pytest.raises(attnd.UnsupportedError, match="layer 1 has KV heads 4, had 1 when"):
        worker.generate(**prompts(model), **GREEDY)


def test_an_expansion_of_another_kind_is_seen(model, attach, monkeypatch):
    kind = type(model.model.layers[0].self_attn)
    expand = kind.expand_kv

    def other(self, kv_nope, k_rot):
        keys, values = expand(self, kv_nope, k_rot)
        return keys[:, [1, 0, 2, 3]], values

    monkeypatch.setattr(kind, "expand_kv", other)
    worker = attach(model)
    assert not worker.pools.all[0].spec.is_v_in_k


def test_a_daemon_that_refuses_latents_stores_heads(model, attach, monkeypatch):
    create = attnd.Client.create_pool

    def refuse(self, spec, **options):
        if spec.is_v_in_k:
            raise attnd.UnsupportedError('required_features: pools have no feature "v_in_k"')
        return create(self, spec, **options)

    monkeypatch.setattr(attnd.Client, "create_pool", refuse)
    inputs = prompts(model)
    want = eager(model, inputs)
    worker = attach(model)
    assert worker.pools.all[0].spec.num_kv_heads == 4
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)


@pytest.fixture
def indexed(request):
    """Of DeepSeek-V3.2's kind: each query visits 12 tokens."""
    if deepseek_v32() is None:
        pytest.skip("this transformers has no DeepSeek-V3.2")
    return make(deepseek_v32, seed=len(request.node.name))


def test_queries_visit_what_an_indexer_chooses(indexed, attach):
    inputs = prompts(indexed)
    sparse = eager(indexed, inputs)
    worker = attach(indexed, lane=None)
    assert worker.pools.all[0].spec.is_v_in_k
    assert torch.equal(worker.generate(**inputs, **GREEDY), sparse)
    for options in (
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},  # whose wrong guesses are taken back
        {"prefill_chunk_size": 5},
    ):
        one = on(indexed, batch(SYSTEM + tokens(9, 2)))
        got = worker.generate(**one, **GREEDY, **options)
        indexed.set_attn_implementation("eager")
        want = indexed.generate(**one, **GREEDY, **options)
        indexed.set_attn_implementation("attnd")
        assert torch.equal(got, want), options
    worker.close()
    for layer in indexed.model.layers:
        layer.self_attn.indexer.index_topk = 1000
    assert not torch.equal(eager(indexed, inputs), sparse)  # so it matters what they visit


@torch.no_grad()
def test_a_pass_that_failed_leaves_no_indexer_keys(indexed, attach):
    worker = attach(indexed, lane=None)
    ids = torch.tensor([tokens(20, 3)], device=indexed.device)
    want = indexed(input_ids=ids, past_key_values=worker.cache()).logits
    with worker.cache() as cache:
        broken = indexed.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            indexed(input_ids=ids, past_key_values=cache)
        broken.remove()
        with pytest.raises(attnd.UnsupportedError, match=r"layer 2 goes on at column 0, .* at 40"):
            indexed(input_ids=ids, past_key_values=cache)
        cache.crop(-40)
        assert torch.equal(indexed(input_ids=ids, past_key_values=cache).logits, want)


def test_what_an_indexer_does_not_go_with_is_refused_by_name(indexed, attach):
    for option in ("share_prefixes", "lane", "graphs"):
        with pytest.raises(attnd.UnsupportedError, match=f"{option}=True, and a model whose"):
            attach(indexed, **{"lane": None, option: True})
    attach(indexed, lane=None)
    with pytest.raises(attnd.UnsupportedError, match="continuous batching of a model whose"):
        indexed.generate_batch(inputs=[tokens(9, 2)], **GREEDY)


def test_the_daemon_projects_heads(model, attach):
    """The text is eager's with either; rows that join, prompts and beams too."""
    inputs = prompts(model)
    want = eager(model, inputs)
    worker = attach(model, absorb="daemon")
    attention = model.model.layers[0].self_attn
    spec = worker.pools.all[0].spec
    assert (spec.q_nope_dim, spec.out_dim) == (attention.qk_nope_head_dim, attention.v_head_dim)
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    rows = [SYSTEM, tokens(9, 2)]
    texts = [eager(model, batch(row))[0, len(row) :].tolist() for row in rows]
    got = model.generate_batch(inputs=rows, **GREEDY)
    ends = [x.generated_tokens for x in got.values()]
    assert ends == [text[: len(end)] for text, end in zip(texts, ends)]


def test_a_model_of_other_weights_has_a_pool_of_its_own(attach):
    """The daemon projects with its weights, though the geometry is that of a pool which is there."""
    first, other = make(deepseek_v3, seed=101), make(deepseek_v3, seed=102)
    if not hasattr(type(first.model.layers[0].self_attn), "expand_kv"):
        pytest.skip("this transformers gives caches expanded heads")
    inputs = prompts(first)
    for model in (first, other):
        want = eager(model, inputs)
        assert torch.equal(attach(model, absorb="daemon").generate(**inputs, **GREEDY), want)
    first, other = make(deepseek_v3, seed=101), make(deepseek_v3, seed=102)
    for model in (first, other):
        model.config._name_or_path = "/models/" + 80 * "x"  # refusals show no more of it
    attach(first, absorb="daemon", name="one")
    with pytest.raises(attnd.AlreadyExistsError, match="exists with identity.model") as refused:
        attach(other, absorb="daemon", name="one")
    there, asked = re.search('model "(.*)", asked for "(.*)"', str(refused.value)).groups()
    assert there != asked


def test_where_heads_are_projected_is_one_of_two(model, attach):
    with pytest.raises(ValueError, match="absorb is 'here': 'worker' or 'daemon'"):
        attach(model, absorb="here")
    with pytest.raises(ValueError, match="absorb='daemon' is for layers in the model's dtype"):
        attach(model, absorb="daemon", wire_dtype="bf16")
