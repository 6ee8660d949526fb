"""A step of a serving engine: a chunk of one sequence's prompt and single tokens of others, packed, over pages."""

import torch

import onepass

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
options = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
heads, heads_kv, head_dim, page_size = 8, 2, 64, 16
# the number of keys of each sequence, and how many of its last tokens are the queries
lengths, queries = (100, 37, 250), (60, 1, 1)
pages_each = [-(-n // page_size) for n in lengths]

# the pages of a sequence may lie anywhere in the pool; entries behind its last page may have any value
pool = torch.randperm(sum(pages_each) + 5, device=device).int()
page_table = torch.full((len(lengths), max(pages_each)), -1, dtype=torch.int32, device=device)
for b, pages in enumerate(pool[: sum(pages_each)].split(pages_each)):
    page_table[b, : len(pages)] = pages
k_pages, v_pages = (torch.randn(len(pool), page_size, heads_kv, head_dim, **options) for _ in range(2))

q = torch.randn(sum(queries), heads, head_dim, **options)
offsets = torch.tensor([0, *queries], device=device).cumsum(0, dtype=torch.int32)
out = onepass.attention_decode(
    q,
    k_pages,
    v_pages,
    cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device=device),
    page_table=page_table,
    cu_seqlens_q=offsets,
)

for b, (n, rows) in enumerate(zip(lengths, q.split(queries), strict=True)):
    k, v = (t[page_table[b, : pages_each[b]]].flatten(0, 1)[None, :n] for t in (k_pages, v_pages))
    alone = onepass.attention(rows[None], k, v, causal=True)[0]
    bounds = {"rtol": 2e-2, "atol": 2e-2} if out.dtype == torch.bfloat16 else {}  # bfloat16 has 8 bits
    torch.testing.assert_close(out[offsets[b] : offsets[b + 1]], alone, **bounds)
print(f"{device}: {len(q)} queries of {len(lengths)} sequences in one call: equal to attention of each by itself")
