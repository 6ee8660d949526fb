"""The memory of attention over 32k tokens, forward and backward, compared with the memory of the formula written out.

    python examples/long_context.py        # 32768 tokens on a GPU; 8192 on a CPU, with fewer heads

The formula keeps (heads, seqlen, seqlen) matrices, so it runs at a quarter of the length only: its memory grows with
the square of the length, while onepass's grows with the length. Needs: pip install '.[bench]'
"""

import torch

import onepass
from onepass.bench.memory import peak_of

MIB = 2**20
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
seqlen, heads, head_dim = (32768, 16, 128) if device == "cuda" else (8192, 2, 64)


def written_out(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return ((q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def extra_mib(attention, seqlen: int) -> float:
    """The peak of a forward and a backward beyond inputs, gradients and output."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, seqlen, heads, head_dim, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attention(*(x[:, :256] for x in leaves)).sum().backward()  # the first call starts threads, or compiles kernels
    _, peak = peak_of(lambda: torch.autograd.grad(attention(*leaves), leaves, dout), device)
    return max(0, peak.extra_bytes - 4 * q.nbytes) / MIB


def attention(q, k, v):
    return onepass.attention(q, k, v, causal=True)


short = seqlen // 4
formula = extra_mib(written_out, short)
print(f"{device}, {dtype}, {heads} heads of {head_dim}, causal, forward and backward")
print(f"{short} tokens: onepass {extra_mib(attention, short):.0f} MiB, the formula written out {formula:.0f} MiB")
print(f"{seqlen} tokens: onepass {extra_mib(attention, seqlen):.0f} MiB, the formula would need {16 * formula:.0f} MiB")
