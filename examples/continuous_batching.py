"""A step of a serving engine: a chunk of one sequence's prompt beside single tokens of others, packed, over pages."""

import torch

import onepass

torch.manual_seed(0)
heads, heads_kv, head_dim, page_size = 8, 2, 64, 16
# the number of keys of each sequence, and how many of its last tokens are the queries
lengths, queries = (100, 37, 250), (60, 1, 1)
pages_each = [-(-n // page_size) for n in lengths]

# the pages of a sequence may lie anywhere in the pool; entries behind its last page may have any value
pool = torch.randperm(sum(pages_each) + 5).int()
page_table = torch.full((len(lengths), max(pages_each)), -1, dtype=torch.int32)
for b, pages in enumerate(pool[: sum(pages_each)].split(pages_each)):
    page_table[b, : len(pages)] = pages
k_pages, v_pages = (torch.randn(len(pool), page_size, heads_kv, head_dim) for _ in range(2))

q = torch.randn(sum(queries), heads, head_dim)
offsets = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
out = onepass.attention_decode(
    q,
    k_pages,
    v_pages,
    cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
    page_table=page_table,
    cu_seqlens_q=offsets,
)

for b, (n, rows) in enumerate(zip(lengths, q.split(queries), strict=True)):
    k, v = (t[page_table[b, : pages_each[b]]].flatten(0, 1)[None, :n] for t in (k_pages, v_pages))
    alone = onepass.attention(rows[None], k, v, causal=True)[0]
    torch.testing.assert_close(out[offsets[b] : offsets[b + 1]], alone)
print(f"{len(q)} queries of {len(lengths)} sequences in one call: equal to attention of each by itself")
