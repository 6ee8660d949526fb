"""Models and a pipeline of diffusers on torch's attention, which onepass computes."""

import importlib.util
from pathlib import Path

import pytest
import torch

from onepass.integrations import torch_sdpa
from onepass.integrations.torch_sdpa import calls

MODEL = Path(__file__).parents[1] / "compat" / "diffusers_model.py"

pytestmark = pytest.mark.package("diffusers")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("diffusers_model", MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flux_transformer(script):
    model = script.make_model()
    expected = script.model_and_gradient(model, torch.float64, "native")
    with torch_sdpa.activate("cpu"):
        found = script.model_and_gradient(model, torch.float32, "native")
        padded = script.padded_and_gradients(torch.float32, "native")
        assert torch_sdpa.fallbacks() == {}
    assert script.largest_error(found, expected) < 2e-6
    assert script.largest_error(padded, script.padded_and_gradients(torch.float64, "native")) < 2e-6


def make_pipeline(transformer):
    """Flux, from random latents to pixels, without its text encoders: prompts are given as embeddings."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=1,
        norm_num_groups=2,
        layers_per_block=1,
        shift_factor=0.0,
        scaling_factor=1.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_a_pipeline(script, monkeypatch):
    """Four steps of denoising and the decoder: the pixels are those of torch's kernels."""
    pipeline = make_pipeline(script.make_model())
    pipeline.transformer.set_attention_backend("native")
    computed, forward = [], calls.forward
    monkeypatch.setattr(calls, "forward", lambda *args: computed.append(args) or forward(*args))
    generator = torch.Generator().manual_seed(1)
    prompt, pooled = (torch.randn(shape, generator=generator) for shape in ((2, 24, 32), (2, 32)))

    def pixels():
        return pipeline(
            prompt_embeds=prompt,
            pooled_prompt_embeds=pooled,
            height=32,
            width=32,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(2),
            output_type="pt",
        ).images

    expected = pixels()
    assert computed == []
    with torch_sdpa.activate("cpu"):
        found = pixels()
        assert torch_sdpa.fallbacks() == {}
    assert found.shape == (2, 3, 32, 32)
    assert expected.std() > 0.05
    num_layers = len(pipeline.transformer.transformer_blocks) + len(pipeline.transformer.single_transformer_blocks)
    assert len(computed) == 4 * num_layers + 1  # and one in the decoder
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
