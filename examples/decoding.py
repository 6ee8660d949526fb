"""A cache in pages: a prompt in chunks, then token by token, then four guessed tokens checked at once."""

import torch

import onepass

torch.manual_seed(0)
batch, heads, heads_kv, head_dim, page_size, num_tokens = 2, 8, 2, 64, 16, 150
# what a layer's projections give for the tokens of two sequences
q = torch.randn(batch, num_tokens, heads, head_dim)
k, v = (torch.randn(batch, num_tokens, heads_kv, head_dim) for _ in range(2))

# each sequence has pages anywhere in the pool
pages_each = -(-num_tokens // page_size)
pool = torch.randperm(batch * pages_each + 10)
page_table = pool[: batch * pages_each].view(batch, pages_each).int()
k_pages, v_pages = (torch.zeros(len(pool), page_size, heads_kv, head_dim) for _ in range(2))
filled = torch.zeros(batch, dtype=torch.int32)  # on a GPU it stays there: a step can be a CUDA graph


def step(first: int, count: int) -> torch.Tensor:
    """The next tokens: their keys and values go to the cache, and they attend to all that is there."""
    new = slice(first, first + count)
    lengths = {"cache_seqlens": filled, "page_table": page_table}
    out = onepass.attention_decode(q[:, new], k_pages, v_pages, **lengths, k_new=k[:, new], v_new=v[:, new])
    filled.add_(count)
    return out


steps = [(0, 64), (64, 64), *((i, 1) for i in range(128, num_tokens - 4)), (num_tokens - 4, 4)]
outs = [step(first, count) for first, count in steps]
torch.testing.assert_close(torch.cat(outs, 1), onepass.attention(q, k, v, causal=True))
print(f"{num_tokens} tokens of {batch} sequences in {len(steps)} steps over pages: equal to one causal forward")
