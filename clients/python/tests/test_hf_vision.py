"""A vision-language model: its text attends over attnd, its vision tower is left alone."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, make  # noqa: E402

IMAGE = 96  # the token that stands for a part of an image


def llava():
    vision = tf.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    )
    config = tf.LlavaConfig(
        vision_config=vision,
        text_config=tf.LlamaConfig(**SIZES),
        image_token_id=IMAGE,
        vision_feature_layer=-1,
    )
    return tf.LlavaForConditionalGeneration(config)


def test_text_with_images_is_that_of_the_models_own_attention(attach):
    model = make(llava)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 90, (2, 12), generator=g)
    ids[:, 2:6] = IMAGE  # four patches
    inputs = {
        "input_ids": ids.to(model.device),
        "attention_mask": torch.ones_like(ids).to(model.device),
        "pixel_values": torch.randn(2, 3, 16, 16, generator=g).to(model.device),
    }
    want = model.generate(**inputs, **GREEDY)
    other = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
    assert not torch.equal(model.generate(**other, **GREEDY), want)  # the images matter
    worker = attach(model)
    config = model.config
    assert config.text_config._attn_implementation == "attnd"
    assert config.vision_config._attn_implementation == "sdpa"
    assert worker.pool.spec.num_layers == SIZES["num_hidden_layers"]
    assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    worker.close()
    assert config.text_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "sdpa"
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
