"""Attention in FP8: what the options of the rounding are worth, and gradients through an FP8 forward.

On a Hopper GPU a kernel computes the attention (here of 8192 keys and 16 heads). Elsewhere the same numbers come from
PyTorch, at no gain in speed: on a CPU there are 1024 keys and 2 heads.
"""

import torch

import onepass
from onepass import reference

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
seqlen, heads = (8192, 16) if device == "cuda" else (1024, 2)
# a few large values, as models have them: N(0, 1), and N(0, 100) for one value in a thousand
q, k, v = (
    torch.randn(shape := (1, seqlen, heads, 128), device=device)
    + 10 * torch.randn(shape, device=device) * (torch.rand(shape, device=device) < 1e-3)
    for _ in range(3)
)
q, k, v = (x.to(dtype) for x in (q, k, v))
some = slice(0, 512)  # queries that are compared; each sees all keys
oracle = reference.attention(q[:, some], k, v).out
print(f"{device}: {onepass.supports(onepass.quantize_fp8(q, k, v)).backend} computes FP8")
for name, options in {
    "one scale a tensor, no rotation": {"granularity": "tensor", "rotate": False},
    "scales of blocks, no rotation": {"rotate": False},
    "scales of blocks, rotation (the default)": {},
    "scales of rows, rotation": {"granularity": "row"},
}.items():
    out = onepass.attention(onepass.quantize_fp8(q, k, v, **options))[:, some]
    print(f"  {name:42s} root mean square error {float((out - oracle).square().mean().sqrt()):.1e}")
print(f"  {f'no FP8: {dtype}':42s} root mean square error ", end="")
print(f"{float((onepass.attention(q, k, v)[:, some] - oracle).square().mean().sqrt()):.1e}")

# training: the forward is in FP8, the backward in the tensors' own type
leaves = [x[:, :512].detach().requires_grad_() for x in (q, k, v)]
onepass.attention(*leaves, causal=True, precision="fp8").square().sum().backward()
print(f"  gradients of a causal call: {', '.join(str(tuple(x.grad.shape)) for x in leaves)}")
