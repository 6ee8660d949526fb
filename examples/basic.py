"""Attention and its gradient, checked against the formula written out in float64."""

import torch

import onepass

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
batch, seqlen, head_dim = 2, 300, 64
# (batch, seqlen, num_heads, head_dim); 8 query heads share 2 key/value heads, 4 query heads each
q = torch.randn(batch, seqlen, 8, head_dim, **options, requires_grad=True)
k = torch.randn(batch, seqlen, 2, head_dim, **options, requires_grad=True)
v = torch.randn(batch, seqlen, 2, head_dim, **options, requires_grad=True)

out = onepass.attention(q, k, v, causal=True)
dout = torch.randn_like(out)
gradients = torch.autograd.grad(out, (q, k, v), dout)

# attention in its textbook form, which keeps all seqlen x seqlen scores in memory
leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
q_, k_, v_ = leaves[0], leaves[1].repeat_interleave(4, 2), leaves[2].repeat_interleave(4, 2)
q_, k_, v_ = (x.transpose(1, 2) for x in (q_, k_, v_))
scores = q_ @ k_.mT * head_dim**-0.5
future = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)
expected = (scores.masked_fill(future, -torch.inf).softmax(-1) @ v_).transpose(1, 2)
expected_gradients = torch.autograd.grad(expected, leaves, dout.double())

bound = 1e-4 if out.dtype == torch.float32 else 1e-1
results = {"out": (out.detach(), expected.detach())}
results |= {name: pair for name, *pair in zip(("dq", "dk", "dv"), gradients, expected_gradients, strict=True)}
for name, (actual, wanted) in results.items():
    print(f"{name}: largest difference {float((actual - wanted).abs().max()):.1e} ({device}, {out.dtype})")
    torch.testing.assert_close(actual.double(), wanted, rtol=bound, atol=bound)
