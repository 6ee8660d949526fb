"""A transformer of diffusers on torch's attention, which onepass computes."""

import importlib.util
from pathlib import Path

import pytest
import torch

from onepass.integrations import torch_sdpa

MODEL = Path(__file__).parents[1] / "compat" / "diffusers_model.py"


@pytest.mark.package("diffusers")
def test_flux_transformer():
    spec = importlib.util.spec_from_file_location("diffusers_model", MODEL)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    model = script.make_model()
    expected = script.model_and_gradient(model, torch.float64, "native")
    with torch_sdpa.activate("cpu"):
        found = script.model_and_gradient(model, torch.float32, "native")
        padded = script.padded_and_gradients(torch.float32, "native")
        assert torch_sdpa.fallbacks() == {}
    assert script.largest_error(found, expected) < 2e-6
    assert script.largest_error(padded, script.padded_and_gradients(torch.float64, "native")) < 2e-6
