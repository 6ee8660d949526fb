"""Attention and its gradient, checked against the formula written out."""

import torch

import onepass

torch.manual_seed(0)
batch, seqlen, head_dim = 2, 300, 64
# (batch, seqlen, num_heads, head_dim); 8 query heads share 2 key/value heads, 4 query heads each
q = torch.randn(batch, seqlen, 8, head_dim, requires_grad=True)
k = torch.randn(batch, seqlen, 2, head_dim, requires_grad=True)
v = torch.randn(batch, seqlen, 2, head_dim, requires_grad=True)

out = onepass.attention(q, k, v, causal=True)
loss = out.square().sum()
gradients = torch.autograd.grad(loss, (q, k, v))

# attention in its textbook form, which keeps all seqlen x seqlen scores in memory
q_, k_, v_ = (x.transpose(1, 2) for x in (q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2)))
scores = q_ @ k_.mT * head_dim**-0.5
future = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
expected = (scores.masked_fill(future, -torch.inf).softmax(-1) @ v_).transpose(1, 2)
expected_gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))

print(f"out: largest difference {float((out - expected).detach().abs().max()):.1e}")
for name, actual, wanted in zip(("dq", "dk", "dv"), gradients, expected_gradients, strict=True):
    print(f"{name}: largest difference {float((actual - wanted).abs().max()):.1e}")
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
