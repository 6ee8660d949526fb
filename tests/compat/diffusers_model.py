"""A transformer of diffusers on flash-attn's functions: `python -m onepass.compat run diffusers_model.py`.

It compares the output and the gradient of the input with those of torch's attention in float64, beside torch's
attention in the same dtype. The package is imported as it is.
"""

import copy
import logging
import sys

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

BACKENDS = ("flash", "flash_varlen", "_flash_varlen_3")
SEQLEN, SEQLEN_TEXT, TEXT_DIM = 64, 24, 32


def make_model():
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        axes_dims_rope=[8, 12, 12],
    )


def model_and_gradient(model, dtype, backend):
    """The output of a model and the gradient of its input."""
    model = copy.deepcopy(model).to(dtype)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    x = random(2, SEQLEN, 4).requires_grad_()
    text, pooled, dout = random(2, SEQLEN_TEXT, TEXT_DIM), random(2, TEXT_DIM), random(2, SEQLEN, 4)
    rows = torch.arange(SEQLEN)
    with attention_backend(backend):
        out = model(
            hidden_states=x,
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=torch.ones(2, dtype=dtype),
            img_ids=torch.stack([rows * 0, rows // 8, rows % 8], dim=1).to(dtype),
            txt_ids=torch.zeros(SEQLEN_TEXT, 3, dtype=dtype),
        ).sample
    return [out.detach(), *torch.autograd.grad(out, x, dout)]


def padded_and_gradients(dtype, backend):
    """The output of the package's attention under a padding mask, and the gradients of q, k and v."""
    generator = torch.Generator().manual_seed(2)
    *tensors, dout = (torch.randn(2, 48, 4, 32, generator=generator).to(dtype) for _ in range(4))
    leaves = [t.requires_grad_() for t in tensors]
    mask = torch.arange(48) < torch.tensor([48, 31])[:, None]
    if backend == "native":
        mask = mask[:, None, None]
    out = dispatch_attention_fn(*leaves, attn_mask=mask, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def largest_error(found, expected):
    """The largest difference, relative to the largest value of its tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def main():
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    model = make_model()
    calls = {"model": lambda *arguments: model_and_gradient(model, *arguments), "padded": padded_and_gradients}
    for name, call in calls.items():
        expected = call(torch.float64, "native")
        for dtype in (torch.bfloat16, torch.float32):
            of_torch = largest_error(call(dtype, "native"), expected)
            for backend in BACKENDS[1 if name == "padded" else 0 :]:  # "flash" takes no mask
                error = largest_error(call(dtype, backend), expected)
                print(f"{name} {backend} {dtype}: error {error:.1e}, torch's {of_torch:.1e}", flush=True)
                if not error <= 2 * of_torch:
                    sys.exit(f"{name} {backend} {dtype}: expected an error up to {2 * of_torch}, got {error}")


if __name__ == "__main__":
    main()
