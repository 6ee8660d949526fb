"""Decode with a cache in pages: a prompt in chunks, then token by token, then four guessed tokens checked at once."""

import torch

import onepass

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
batch, heads, heads_kv, head_dim, page_size, num_tokens = 2, 8, 2, 64, 16, 150
# the outputs of a layer's projections for the tokens of two sequences
q = torch.randn(batch, num_tokens, heads, head_dim, **options)
k, v = (torch.randn(batch, num_tokens, heads_kv, head_dim, **options) for _ in range(2))

# the pages of a sequence may lie anywhere in the pool
pages_each = -(-num_tokens // page_size)
pool = torch.randperm(batch * pages_each + 10, device=device)
page_table = pool[: batch * pages_each].view(batch, pages_each).int()
k_pages, v_pages = (torch.zeros(len(pool), page_size, heads_kv, head_dim, **options) for _ in range(2))
# the lengths stay on the GPU, so a step can be captured in a CUDA graph
filled = torch.zeros(batch, dtype=torch.int32, device=device)


def step(first: int, count: int) -> torch.Tensor:
    """Append the keys and values of the next tokens to the cache, and let these tokens attend to the whole cache."""
    new = slice(first, first + count)
    lengths = {"cache_seqlens": filled, "page_table": page_table}
    out = onepass.attention_decode(q[:, new], k_pages, v_pages, **lengths, k_new=k[:, new], v_new=v[:, new])
    filled.add_(count)
    return out


steps = [(0, 64), (64, 64), *((i, 1) for i in range(128, num_tokens - 4)), (num_tokens - 4, 4)]
outs = [step(first, count) for first, count in steps]
expected = onepass.attention(q, k, v, causal=True)
bounds = {"rtol": 2e-2, "atol": 2e-2} if q.dtype == torch.bfloat16 else {}  # bfloat16 has 8 bits
torch.testing.assert_close(torch.cat(outs, 1), expected, **bounds)
print(
    f"{device}: {num_tokens} tokens of {batch} sequences in {len(steps)} steps over pages: equal to one causal forward"
)
