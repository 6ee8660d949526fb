"""torch.compile(fullgraph=True) traces the functions of flash-attn 2, 3 and 4, with the results of eager calls."""

import pytest
import torch

from onepass.compat import flash_attn as fa2
from onepass.compat import flash_attn_3 as fa3
from onepass.compat import flash_attn_4 as fa4

INT32 = torch.int32
Q, K, V = (torch.randn(2, n, h, 8, generator=torch.Generator().manual_seed(n + h)) for n, h in ((5, 4), (9, 2), (9, 2)))
ROWS = [t.flatten(0, 1) for t in (Q, K, V)]
OFFSETS = torch.tensor([0, 5, 10], dtype=INT32), torch.tensor([0, 9, 18], dtype=INT32)
USED = torch.tensor([3, 5], dtype=INT32), torch.tensor([8, 6], dtype=INT32)
LENGTHS, STARTS = torch.tensor([5, 7], dtype=INT32), torch.tensor([2, 0], dtype=INT32)
NEW = torch.randn(2, 2, 2, 8)
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
TABLE, PAGES = torch.tensor([[3, 0], [1, 2]], dtype=INT32), torch.randn(4, 5, 2, 8)
COS, SIN = torch.randn(12, 3).cos(), torch.randn(12, 3).sin()


def cache2(q, **options):
    caches = K.clone(), V.clone()
    return fa2.flash_attn_with_kvcache(q, *caches, NEW, NEW, cache_seqlens=LENGTHS, **options), *caches


def cache3(q, **options):
    caches = K.clone(), V.clone()
    rotary = {"rotary_cos": COS, "rotary_sin": SIN, "rotary_seqlens": STARTS}
    return fa3.flash_attn_with_kvcache(q, *caches, NEW, NEW, cache_seqlens=LENGTHS, **rotary, **options), *caches


def packed_cache3(q, **options):
    caches, new = (PAGES.clone(), PAGES.clone()), NEW.flatten(0, 1)
    offsets = {"cu_seqlens_q": OFFSETS[0], "cu_seqlens_k_new": torch.tensor([0, 1, 3], dtype=INT32)}
    more = {"page_table": TABLE, "cache_seqlens": LENGTHS, "cache_batch_idx": torch.tensor([1, 0])}
    return fa3.flash_attn_with_kvcache(q.flatten(0, 1), *caches, new, new, **offsets, **more, **options), *caches


def backward2(q):
    out, lse, *_ = fa2._flash_attn_forward(q, K, V, 0.0, 0.3, True, -1, -1, 0.0, SLOPES, False)
    gradients = [torch.empty_like(t) for t in (q, K, V)]
    softmax_d = fa2._flash_attn_backward(out, q, K, V, out, lse, *gradients, 0.0, 0.3, True, -1, -1, 0.0, SLOPES, False)
    return *gradients, softmax_d


def backward3(q):
    metadata = fa3.get_scheduler_metadata(2, 5, 9, 4, 2, 8, LENGTHS)
    out, lse, *_ = fa3._flash_attn_forward(q, K, V, softmax_scale=0.3, causal=True, scheduler_metadata=metadata)
    gradients = [torch.empty_like(t) for t in (q, K, V)]
    buffers = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return fa3._flash_attn_backward(out, q, K, V, out, lse, **buffers, softmax_scale=0.3, is_causal=True), *gradients


def backward4(q):
    out, lse, *_ = fa4._flash_attn_fwd(q, K, V, softmax_scale=0.3, causal=True, return_lse=True)
    return fa4._flash_attn_bwd(q, K, V, out, out, lse, softmax_scale=0.3, causal=True)


CALLS = {
    "alibi": lambda q: fa2.flash_attn_func(q, K, V, causal=True, alibi_slopes=SLOPES, return_attn_probs=True),
    "window": lambda q: fa2.flash_attn_func(q, K, V, window_size=[3, -1]),
    "kvcache, left padding": lambda q: cache2(q, cache_leftpad=STARTS, window_size=(2, 3)),
    "kvcache, rotary": lambda q: cache2(q, rotary_cos=COS, rotary_sin=SIN, alibi_slopes=SLOPES),
    "kvcache, blocks": lambda q: fa2.flash_attn_with_kvcache(q, PAGES, PAGES, cache_seqlens=LENGTHS, block_table=TABLE),
    "private": backward2,
    "3": lambda q: fa3.flash_attn_func(q, K, V, attention_chunk=4, causal=True),
    "3, varlen": lambda q: fa3.flash_attn_varlen_func(
        q.flatten(0, 1), *ROWS[1:], *OFFSETS, 5, 9, *USED, causal=True, attention_chunk=3
    ),
    "3, kvcache": lambda q: cache3(q, causal=True, cache_leftpad=STARTS),
    "3, private": backward3,
    "3, packed kvcache": lambda q: packed_cache3(q, attention_chunk=3),
    "4": lambda q: fa4.flash_attn_func(q, K, V, window_size=(None, -1), learnable_sink=SLOPES, return_lse=True),
    "4, varlen": lambda q: fa4.flash_attn_varlen_func(q, K, V, seqused_q=USED[0], seqused_k=USED[1], return_lse=True),
    "4, private": backward4,
    "4, pages": lambda q: fa4.flash_attn_varlen_func(
        q, PAGES, PAGES, seqused_q=USED[0], seqused_k=LENGTHS, page_table=TABLE, causal=True, return_lse=True
    ),
    "combine": lambda q: fa4.flash_attn_combine(q[None].repeat(3, 1, 1, 1, 1), q[None, ..., 0].repeat(3, 1, 1, 1)),
}


WITH_GRADIENTS = ("alibi", "3, varlen", "4, varlen")
# Each part of these calls is in another one, too.
SLOW = ("kvcache, left padding", "kvcache, rotary", "3", "4, pages")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CALLS]


@pytest.mark.parametrize("name", NAMES)
def test_compiled_calls_are_eager_ones(name):
    torch._dynamo.reset()
    q = Q.clone().requires_grad_(name in WITH_GRADIENTS)
    results = []
    for call in (CALLS[name], torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")):
        found = torch.utils._pytree.tree_leaves(call(q))
        if q.requires_grad:
            loss = sum(t.square().nan_to_num(0, 0, 0).sum() for t in found if t is not None and t.requires_grad)
            found.append(torch.autograd.grad(loss, q)[0])
        results.append(found)
    expected, found = results
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
