"""What is refused, and by which name: refuse.py on arguments and layers as SGLang has them."""

import pathlib
import sys
from types import SimpleNamespace as Bag

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "python/src"), str(HERE.parent / "src")]

from attnd_sglang import SGLANG_VERSIONS, check_version, refuse  # noqa: E402

ARGS = {
    "device": "cpu", "tp_size": 1, "pp_size": 1, "dp_size": 1, "enable_dp_attention": False,
    "speculative_algorithm": None, "kv_cache_dtype": "auto", "enable_lora": None,
    "disaggregation_mode": "null", "radix_cache_backend": "attnd", "disable_radix_cache": False,
    "max_total_tokens": 4096, "page_size": 32,
}
LAYER = {
    "tp_q_head_num": 8, "tp_k_head_num": 2, "qk_head_dim": 64, "v_head_dim": 64, "logit_cap": 0.0,
    "logit_capping_method": "tanh", "xai_temperature_len": -1, "use_irope": False,
    "is_cross_attention": False, "attn_type": Bag(value="decoder"), "sliding_window_size": -1,
}


def layers(n=3, **of_the_last):
    made = [Bag(layer_id=i, **LAYER) for i in range(n)]
    vars(made[-1]).update(of_the_last)
    return made


def test_what_is_served_is_not_refused():
    refuse.check_args(Bag(**ARGS))
    refuse.check_model(Bag(use_mla_backend=False, is_hybrid_swa=False), layers(sliding_window_size=127))


@pytest.mark.parametrize("setting", ["engine.max_step_items", "cache.max_sequences"])
def test_more_running_requests_than_the_daemon_allows(setting):
    def runner(n, asked):
        return Bag(max_running_requests=n, server_args=Bag(max_running_requests=asked))

    limits = {"max_step_items": 64, "max_sequences": 0}  # 0: it does not say
    assert refuse.n_running(Bag(**limits), runner(64, 64)) == 64
    limits[setting.partition(".")[2]] = 48
    assert refuse.n_running(Bag(**limits), runner(48, 48)) == 48
    assert refuse.n_running(Bag(**limits), runner(2048, None)) == 48  # SGLang's default
    with pytest.raises(ValueError, match=f"max_running_requests is 49, .* {setting}, which is 48"):
        refuse.n_running(Bag(**limits), runner(49, 100))


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("device", "cuda", "device 'cuda'"),
        ("tp_size", 2, "tp_size 2"),
        ("dp_size", 2, "dp_size 2"),
        ("enable_dp_attention", True, "enable_dp_attention True"),
        ("speculative_algorithm", "NGRAM", "speculative_algorithm 'NGRAM'"),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype 'fp8_e5m2'"),
        ("enable_lora", True, "enable_lora True"),
        ("disaggregation_mode", "prefill", "disaggregation_mode 'prefill'"),
        ("radix_cache_backend", None, "--radix-cache-backend attnd"),
        ("disable_radix_cache", True, "--disable-radix-cache"),
        ("max_total_tokens", None, "--max-total-tokens"),
        ("page_size", 1, "page_size 1"),
        ("decode_attention_backend", "triton", "decode_attention_backend 'triton'"),
    ],
)
def test_an_argument_is_refused_by_its_name(field, value, said):
    with pytest.raises(ValueError, match="attnd-sglang does not support .*" + said):
        refuse.check_args(Bag(**{**ARGS, field: value}))


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("is_cross_attention", True, r"not causal \(layer 2\)"),
        ("attn_type", Bag(value="encoder_only"), r"not causal \(layer 2\)"),
        ("xai_temperature_len", 8, r"temperature by position \(layer 2\)"),
        ("use_irope", True, r"in chunks \(layer 2\)"),
        ("tp_k_head_num", 4, r"tp_k_head_num 4 \(layer 2\), 2 \(layer 0\)"),
        ("layer_id", 5, "not every layer has attention"),
    ],
)
def test_a_layer_is_refused_by_what_it_has(field, value, said):
    with pytest.raises(ValueError, match=said):
        refuse.check_model(Bag(use_mla_backend=False, is_hybrid_swa=False), layers(**{field: value}))


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("kv_lora_rank", 576, "kv_lora_rank 576: a multiple of 8, at most 512"),
        ("qk_rope_head_dim", 96, "qk_rope_head_dim 96: a multiple of 8, at most 64"),
        ("hf_text_config", Bag(index_topk=2048), "with an indexer: index_topk is 2048"),
    ],
)
def test_latents_that_attnd_can_not_store_or_visit(field, value, said):
    config = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hf_text_config": Bag()}
    of_latents = {"tp_k_head_num": 1, "qk_head_dim": 576, "v_head_dim": 512}
    made = layers()
    for layer in made:
        vars(layer).update(of_latents)

    def check(**fields):
        model = Bag(**{**config, **fields})
        refuse.check_model(Bag(use_mla_backend=True, is_hybrid_swa=False, model_config=model), made)

    check()
    with pytest.raises(ValueError, match=said):
        check(**{field: value})


def test_pools_for_sliding_layers_are_refused():
    with pytest.raises(ValueError, match="--disable-hybrid-swa-memory"):
        refuse.check_model(Bag(use_mla_backend=False, is_hybrid_swa=True), layers())


def test_requests_for_other_weights_are_answered_with_why_not(monkeypatch):
    def update(*args, **options):
        return True, "done"

    assert refuse.keep_weights(update, "/a/model", recapture_cuda_graph=False) == (True, "done")
    monkeypatch.setattr(refuse.shared, "live", object())
    ok, why = refuse.keep_weights(update, "/a/model", recapture_cuda_graph=False)
    assert not ok and "weights can't change" in why


def test_another_version_is_refused_by_name(monkeypatch):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.6.1")
    with pytest.raises(RuntimeError, match="knows SGLang 0.5.23, this is 0.6.1"):
        check_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: SGLANG_VERSIONS[0])
    check_version()
