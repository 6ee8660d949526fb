"""Sequences of different lengths in one call, one after the other, with no padding between them."""

import torch

import onepass

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
lengths = [5, 200, 33]
num_heads, head_dim = 4, 32
sequences = [torch.randn(n, 3, num_heads, head_dim, **options) for n in lengths]  # q, k and v of each sequence

packed = torch.cat(sequences)  # (238, 3, num_heads, head_dim)
# the start of each sequence and the end of the last one: [0, 5, 205, 238]
offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
out = onepass.attention_varlen(*packed.unbind(1), cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)

# each sequence attends only to itself, which equals one call per sequence
for i, sequence in enumerate(sequences):
    alone = onepass.attention(*sequence[None].unbind(2), causal=True)[0]
    bounds = {"rtol": 2e-2, "atol": 2e-2} if out.dtype == torch.bfloat16 else {}  # bfloat16 has 8 bits
    torch.testing.assert_close(out[offsets[i] : offsets[i + 1]], alone, **bounds)
print(
    f"{device}: {len(lengths)} sequences, {packed.shape[0]} tokens, 0 padding: equal to {len(lengths)} separate calls"
)
