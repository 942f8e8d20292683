"""attnd.hf with share_prefixes: a prompt is shared only by what computes the same keys and values. What
else decides about them than weights makes other keys, or the model is refused by name."""

import contextlib

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, SYSTEM, batch, make, same, tokens  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

import attnd  # noqa: E402
import attnd.hf  # noqa: E402

N, SHARED = 50, 48  # tokens of SYSTEM, and those of its full blocks
SMALL = {**SIZES, "num_hidden_layers": 2}


def small():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))


def refused(match):
    return pytest.raises(attnd.UnsupportedError, match=match)


def shares(worker, model, prompt=SYSTEM, **options):
    """How much of the prompt was not computed; its text is eager's."""
    return len(prompt) - same(worker, model, batch(prompt), **options)


# ---- rotary frequencies that depend on the length


def phi3():
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, "factor": 8.0}
    rope["original_max_position_embeddings"] = 64
    sizes = {k: v for k, v in SMALL.items() if k != "head_dim"}
    config = tf.Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=64)
    return tf.Phi3ForCausalLM(config)


def dynamic():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    sizes = {**SMALL, "max_position_embeddings": 64}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, rope_parameters=rope))


def alone(build, prompt, seed, **options):
    """The text of a model that has read nothing before."""
    return make(build, seed=seed).generate(**batch(prompt), **{**GREEDY, **options})


@pytest.mark.parametrize("build", [phi3, dynamic], ids=lambda f: f.__name__)
@pytest.mark.parametrize("order", ["long first", "short first"])
def test_a_short_and_a_long_prompt_with_the_same_start(shared, build, order):
    seed = 201 + 2 * (build is phi3) + (order == "long first")
    worker = shared(make(build, seed=seed))
    long, short = tokens(90, 21), tokens(90, 21)[:40]
    few = {"max_new_tokens": 8}  # so that the short one stays so
    for prompt in (
        (long, short, long, short) if order == "long first" else (short, long, short, long)
    ):
        got = worker.generate(**batch(prompt), **GREEDY | few)
        assert torch.equal(got, alone(build, prompt, seed, **few))
    # those of the same length are shared
    assert {n for n in worker.passes if n > 1} == {90, 40, 40 - 32} | (
        {90 - 80} if build is phi3 else set()
    )


@pytest.mark.parametrize("build", [phi3, dynamic], ids=lambda f: f.__name__)
def test_a_text_that_grows_beyond_the_short_frequencies(shared, build):
    seed = 211 + (build is phi3)
    worker = shared(make(build, seed=seed))
    want = alone(build, SYSTEM, seed)  # 50 + 24 tokens
    for _ in range(2):
        assert torch.equal(worker.generate(**batch(SYSTEM), **GREEDY), want)
    text = want[0].tolist()
    for n in 56, 74:
        few = {"max_new_tokens": 3}
        got = worker.generate(**batch(text[:n]), **GREEDY | few)
        assert torch.equal(got, alone(build, text[:n], seed, **few))


def test_a_short_row_beside_a_long_one_has_its_frequencies(shared):
    rows = tokens(90, 22), tokens(40, 23)
    worker = shared(make(phi3, seed=215))
    few = {"max_new_tokens": 3}
    for inputs in batch(*rows), batch(rows[1]), batch(*rows):
        want = make(phi3, seed=215).generate(**inputs, **GREEDY | few)
        assert torch.equal(worker.generate(**inputs, **GREEDY | few), want)


# ---- adapters


def lora(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "up_proj"]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**config, **options})


def adapted(seed, names=("A",), **options):
    """A small model with adapters, each of its own weights."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = peft.get_peft_model(
        make(small, seed=seed), lora(None, **options), adapter_name=names[0]
    )
    for name in names[1:]:
        model.add_adapter(name, lora(None, **options))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model.eval()


def test_adapters_have_prefixes_of_their_own(shared):
    model = adapted(221, ("A", "B"))
    worker = shared(model)
    model.set_adapter("A")
    assert shares(worker, model) == 0
    assert shares(worker, model) == SHARED
    model.set_adapter("B")
    assert shares(worker, model) == 0
    model.set_adapter("A")
    assert shares(worker, model) == SHARED
    with model.disable_adapter():
        assert shares(worker, model) == 0
    assert shares(worker, model) == SHARED
    model.merge_adapter()
    assert shares(worker, model) == 0  # other roundings
    model.unmerge_adapter()
    worker.close()
    model.set_adapter("B")
    worker = shared(model)  # attached anew
    shares(worker, model)
    assert shares(worker, model) == SHARED


def test_models_that_differ_in_lora_alpha_share_nothing(shared):
    model, other, again = adapted(222), adapted(222, lora_alpha=33), adapted(222)
    assert shares(shared(model), model) == 0
    assert shares(shared(other), other) == 0
    assert shares(shared(again), again) == SHARED


def test_adapters_of_transformers_own(shared, monkeypatch):
    pytest.importorskip("peft", reason="peft is not installed")
    from transformers.integrations import peft as integration

    monkeypatch.setattr(integration, "check_peft_version", lambda min_version: None)
    model = make(small, seed=223)
    worker = shared(model)
    assert shares(worker, model) == 0
    torch.manual_seed(1)
    model.add_adapter(lora(None, init_lora_weights=False), "A")
    model.eval()
    assert shares(worker, model) == 0
    assert shares(worker, model) == SHARED
    model.disable_adapters()
    shares(worker, model)
    assert shares(worker, model) == SHARED


def test_an_adapter_that_is_switched_in_the_middle_of_a_text(shared):
    model = adapted(224, ("A", "B"))
    worker = shared(model)
    ids = torch.tensor([tokens(80, 31)])
    with worker.cache() as cache, torch.no_grad():
        for first, name in ((0, "A"), (20, "B"), (40, "A"), (60, "A")):
            model.set_adapter(name)
            model(input_ids=ids[:, first : first + 20], past_key_values=cache)
    model.set_adapter("A")
    assert shares(worker, model, ids[0].tolist()) == 16


def test_a_tuned_prompt_is_refused(attach):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with refused("share_prefixes.*tuned prompt"):
        attach(peft.get_peft_model(make(small), config).eval(), share_prefixes=True)


def test_adapters_given_with_the_prompt_are_not_shared(shared, caplog):
    model = adapted(225, ("A", "B"))
    model.set_adapter("A")
    worker = shared(model)
    rows = batch(SYSTEM, SYSTEM)
    want = model.base_model.model  # the two rows have another adapter each
    for _ in range(2):
        same(worker, model, rows, adapter_names=["A", "B"])
    assert "has a hook" in caplog.text and want is worker.sharing.base
    assert shares(worker, model) == 0


# ---- what changes while the model is attached


def scaled(model):
    model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def past_the_counter(model):
    model.model.layers[1].mlp.up_proj.weight.data[3].add_(0.5)


def replaced(model):
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.flip(0)


def loaded(model):
    seed = int(model.lm_head.weight.abs().sum())  # another one of each model
    model.load_state_dict(make(small, seed=seed).state_dict())


def stepped(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.05).step()


def rotated(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)  # is not saved


def less_exact(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def another_module(model):
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh().eval()


CHANGES = [scaled, past_the_counter, replaced, loaded, stepped, rotated, less_exact, another_module]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_model_that_changes_has_other_prefixes(shared, change):
    model = make(small, seed=231 + CHANGES.index(change))
    worker = shared(model)
    assert shares(worker, model) == 0
    assert shares(worker, model) == SHARED
    with torch.no_grad():
        change(model)
    assert shares(worker, model) == 0
    assert shares(worker, model) == SHARED


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_models_that_differ_share_nothing(shared, change):
    model, other = (make(small, seed=241 + CHANGES.index(change)) for _ in range(2))
    with torch.no_grad():
        change(other)
    assert shares(shared(model), model) == 0
    assert shares(shared(other), other) == 0


# ---- what may compute anything


def halve(module, args, output):
    return output[0] / 2 if isinstance(output, tuple) else output / 2


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class Mine(tf.LlamaForCausalLM):
    pass


def mode(model):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.silu:
                return torch.tanh(args[0])
            return func(*args, **(kwargs or {}))

    return Mode()


@contextlib.contextmanager
def put(place, name, value):
    old = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, old)


def rope_backwards(q, k, cos, sin, *args, **kwargs):
    return APPLY(q, k, cos, -sin, *args, **kwargs)


APPLY = modeling_llama.apply_rotary_pos_emb
MLP_FORWARD = modeling_llama.LlamaMLP.forward


@contextlib.contextmanager
def removed(handle):
    try:
        yield
    finally:
        handle.remove()


FOREIGN = {
    "a hook of a layer": lambda m: removed(m.model.layers[0].mlp.register_forward_hook(halve)),
    "a hook before a layer": lambda m: removed(
        m.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: (args[0] / 2,))
    ),
    "a hook before the model": lambda m: removed(
        m.model.register_forward_pre_hook(lambda module, args: None)
    ),
    "a hook of all modules": lambda m: removed(
        torch.nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out / 2 if isinstance(module, torch.nn.SiLU) else None
        )
    ),
    "a class's forward": lambda m: put(
        modeling_llama.LlamaMLP, "forward", lambda self, x: MLP_FORWARD(self, x) / 2
    ),
    "a function of its module": lambda m: put(
        modeling_llama, "apply_rotary_pos_emb", rope_backwards
    ),
    "a function of torch": lambda m: put(torch.nn.functional, "silu", torch.tanh),
    "a forward": lambda m: put(
        m.model.layers[0].mlp, "forward", lambda x: MLP_FORWARD(m.model.layers[0].mlp, x) / 2
    ),
    "a module of another class": lambda m: put(m.model.layers[1], "mlp", Doubled().eval()),
    "dropout": lambda m: put(m.model.layers[0].mlp, "training", True),
    "a mode": mode,
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_what_may_compute_anything_is_refused_and_not_shared(shared, attach, foreign, caplog):
    model = make(small, seed=251 + list(FOREIGN).index(foreign))
    worker = shared(model)
    assert shares(worker, model) == 0
    with FOREIGN[foreign](model):
        for _ in range(2):
            assert shares(worker, model) == 0
        assert len(caplog.records) == 1 and "is not shared" in caplog.text
        with refused("share_prefixes, and"):
            attach(model, share_prefixes=True)
        attach(model).close()
        assert shares(worker, model, tokens(40, 41)) == 0
    assert shares(worker, model) == SHARED
    assert shares(worker, model, tokens(40, 41)) == 0


def test_classes_and_parametrizations_that_are_not_known_are_refused(attach):
    config = tf.LlamaConfig(**SMALL)
    with refused("share_prefixes.*test_hf_prefix_key.Mine"):
        attach(Mine(config).eval(), share_prefixes=True)
    model = make(small)
    torch.nn.utils.parametrize.register_parametrization(
        model.model.layers[0].mlp.up_proj, "weight", Doubled().eval()
    )
    with refused("up_proj has parametrizations"):
        attach(model, share_prefixes=True)


def test_what_holds_more_than_python_sees_is_refused(attach):
    model = make(small)
    model.model.layers[0].mlp.seed = torch.Generator()
    with refused("model.layers.0.mlp.seed is a .*Generator"):
        attach(model, share_prefixes=True)
    model.model.layers[0].mlp.seed = __import__("numpy").ones(3)
    with refused("model.layers.0.mlp.seed is a numpy.ndarray"):
        attach(model, share_prefixes=True)


def test_a_compiled_model_is_shared(shared):
    model = make(small, seed=262)
    worker = shared(model)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        assert shares(worker, model) == 0
        assert shares(worker, model) == SHARED
    finally:
        torch._dynamo.reset()


def test_a_pass_that_failed_leaves_no_ids_behind(shared):
    """Another prompt comes in its place: it has its own keys and values."""
    model = make(small, seed=263)
    worker = shared(model)
    first, other = (torch.tensor([tokens(60, seed)]) for seed in (42, 43))

    class Planted(Exception):
        pass

    def fail(self, *args, **kwargs):
        raise Planted

    with worker.cache() as cache, torch.no_grad():
        with pytest.raises(Planted), put(modeling_llama.LlamaModel, "forward", fail):
            model(input_ids=first, past_key_values=cache, logits_to_keep=1)
        model(input_ids=other, past_key_values=cache, logits_to_keep=1)
    assert shares(worker, model, first[0].tolist()) == 0
    assert shares(worker, model, other[0].tolist()) == 0


# ---- continuous batching


def batched(worker, prompts, n_new=8):
    options = tf.GenerationConfig(
        max_new_tokens=n_new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    out = worker.model.generate_batch(prompts, generation_config=options, progress_bar=False)
    return [out[key].generated_tokens for key in sorted(out, key=lambda k: int(k.split("_")[-1]))]


def alone_batched(model, prompts, n_new=8):
    model.set_attn_implementation("eager")
    texts = [
        model.generate(**batch(p), **{**GREEDY, "max_new_tokens": n_new})[0, len(p) :].tolist()
        for p in prompts
    ]
    model.set_attn_implementation("attnd")
    return texts


@pytest.mark.skipif(
    tuple(map(int, tf.__version__.split(".")[:2])) < (5, 23), reason="other managers before 5.23"
)
def test_continuous_batching_has_the_same_keys(attach, caplog):
    model = make(small, seed=264)
    worker = attach(model, share_prefixes=True)
    prompts = [SYSTEM + tokens(5, 51), SYSTEM + tokens(7, 52)]
    for change in None, scaled, past_the_counter:
        with torch.no_grad():
            if change is not None:
                change(model)
        for _ in range(2):
            assert batched(worker, prompts) == alone_batched(model, prompts)
    with FOREIGN["a hook of a layer"](model):
        assert batched(worker, prompts) == alone_batched(model, prompts)
        assert "has a hook" in caplog.text
    assert batched(worker, prompts) == alone_batched(model, prompts)
    caplog.clear()
    worker = attach(make(phi3, seed=265), share_prefixes=True)
    batched(worker, prompts)
    assert "longest text of a batch" in caplog.text
