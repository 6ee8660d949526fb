"""Decode with a cache in pages: a prompt in chunks, then token by token, then four guessed tokens checked at once."""

import torch

import onepass

torch.manual_seed(0)
batch, heads, heads_kv, head_dim, page_size, num_tokens = 2, 8, 2, 64, 16, 150
# the outputs of a layer's projections for the tokens of two sequences
q = torch.randn(batch, num_tokens, heads, head_dim)
k, v = (torch.randn(batch, num_tokens, heads_kv, head_dim) for _ in range(2))

# the pages of a sequence may lie anywhere in the pool
pages_each = -(-num_tokens // page_size)
pool = torch.randperm(batch * pages_each + 10)
page_table = pool[: batch * pages_each].view(batch, pages_each).int()
k_pages, v_pages = (torch.zeros(len(pool), page_size, heads_kv, head_dim) for _ in range(2))
filled = torch.zeros(batch, dtype=torch.int32)  # the lengths stay on the GPU, so a step can be captured in a CUDA graph


def step(first: int, count: int) -> torch.Tensor:
    """Append the keys and values of the next tokens to the cache, and let the tokens attend to all of it."""
    new = slice(first, first + count)
    lengths = {"cache_seqlens": filled, "page_table": page_table}
    out = onepass.attention_decode(q[:, new], k_pages, v_pages, **lengths, k_new=k[:, new], v_new=v[:, new])
    filled.add_(count)
    return out


steps = [(0, 64), (64, 64), *((i, 1) for i in range(128, num_tokens - 4)), (num_tokens - 4, 4)]
outs = [step(first, count) for first, count in steps]
torch.testing.assert_close(torch.cat(outs, 1), onepass.attention(q, k, v, causal=True))
print(f"{num_tokens} tokens of {batch} sequences in {len(steps)} steps over pages: equal to one causal forward")
