"""Vision-language models: their text attends over attnd, their vision tower is left alone."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

import torch  # noqa: E402
import transformers as tf  # noqa: E402
from hf_models import GREEDY, SIZES, llama4, make  # noqa: E402

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


def llama4_with_images():
    """Chunks of 7 tokens, which images cross."""
    vision = tf.Llama4VisionConfig(
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        vision_output_dim=64,
        projector_input_dim=64,
        projector_output_dim=64,
    )
    config = tf.Llama4Config(
        vision_config=vision,
        text_config=llama4().config,
        image_token_index=IMAGE,
        boi_token_index=94,
        eoi_token_index=95,
        pad_token_id=0,
    )
    return tf.Llama4ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [llava, llama4_with_images], ids=lambda f: f.__name__)
def test_text_with_images_is_that_of_the_models_own_attention(build, attach):
    if build is llama4_with_images and not 20 <= int(tf.__version__.split(".")[1]) < 24:
        pytest.skip("Llama 4 of transformers 5.0 and 5.24 fails over images by itself")
    model = make(build)
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


def test_text_is_shared_and_images_are_not(shared):
    model = make(llava, seed=5)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    g = torch.Generator().manual_seed(6)
    ids = torch.randint(3, 90, (1, 40), generator=g)
    text = {"input_ids": ids.clone().to(model.device)}
    ids[:, 2:6] = IMAGE
    one, other = (
        {"input_ids": ids.to(model.device), "pixel_values": torch.randn(1, 3, 16, 16, generator=g)}
        for _ in range(2)
    )
    prompts = (one, other, text, text, one)
    wanted = [model.generate(**inputs, **GREEDY) for inputs in prompts]
    worker = shared(model)
    for inputs, want in zip(prompts, wanted):
        assert torch.equal(worker.generate(**inputs, **GREEDY), want)
    assert [n for n in worker.passes if n > 1] == [40, 40, 40, 40 - 32, 40]
