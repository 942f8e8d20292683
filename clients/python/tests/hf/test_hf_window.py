"""Crops of caches whose blocks beyond a sliding window are free again: the model's own text, or a refusal."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import SIZES, batch, make, tokens  # noqa: E402

import attnd  # noqa: E402
from attnd.hf._named import CACHE  # noqa: E402

WINDOW, N_TOKENS = 32, 400


def mistral():
    return tf.MistralForCausalLM(tf.MistralConfig(**SIZES, sliding_window=WINDOW))


@pytest.mark.parametrize("keep", [399, 390, 384, 370, 300, 64, 8])
def test_what_is_left_of_a_crop_is_enough_or_it_is_refused(attach, keep):
    model = make(mistral)
    ids = torch.randint(3, 97, (2, N_TOKENS + 1), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
    worker = attach(model)
    with torch.no_grad(), worker.cache() as cache:
        for part in ids[:, :N_TOKENS].split(16, dim=1):  # blocks leave the window meanwhile
            model(input_ids=part, **{CACHE: cache})
        try:
            cache.crop(keep)
        except attnd.InvalidArgumentError as e:
            assert "freed" in str(e) and keep < N_TOKENS - worker.pool.spec.block_tokens
            assert cache.get_seq_length() == N_TOKENS
            keep = N_TOKENS  # as if nobody had asked
        got = model(input_ids=ids[:, keep : keep + 1], **{CACHE: cache}).logits[:, -1]
        torch.testing.assert_close(got, want[:, keep], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("sizes", [[1] * 40, [3, 20, 1, 1, 17, 5], [60]], ids=str)
def test_a_crop_goes_back_to_any_column_of_a_recorded_past(attach, client, sizes):
    """As generate() does with an assistant, whose guesses it takes back."""
    model = make(mistral)
    n, lengths = 150, (150, 121, 133)
    inputs = batch(*(tokens(k + 80, 60 + k) for k in lengths))
    ids, mask = inputs["input_ids"].to(model.device), inputs["attention_mask"].to(model.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    before = client.stats()["sequences"]
    worker = attach(model)
    with torch.no_grad(), worker.cache() as cache:

        def run(first, end):
            return model(
                input_ids=ids[:, first:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, first:end],
                **{CACHE: cache},
            ).logits

        run(0, n)
        for keep in n + 1, n + 2, n + 11:  # crop by crop further
            cache.activate_past_recording()
            first = cache.get_seq_length()
            for size in sizes:
                run(first, first + size)
                first += size
            cache.crop(-(first - keep))
            assert cache.get_seq_length() == keep
            got = run(keep, keep + 1)[:, -1]
            want = model(
                input_ids=ids[:, : keep + 1],
                attention_mask=mask[:, : keep + 1],
                position_ids=positions[:, : keep + 1],
                **{CACHE: (whole := worker.cache())},
            ).logits[:, -1]
            whole.close()
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
            cache.crop(-1)
    assert client.stats()["sequences"] == before
