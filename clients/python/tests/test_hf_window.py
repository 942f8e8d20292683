"""Crops of caches whose blocks beyond a sliding window are free again: the model's own text, or a refusal."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import SIZES, make  # noqa: E402

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
