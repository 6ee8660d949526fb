"""Tensors, options and the float64 oracle for the tests of flash-attn 3's functions."""

import torch

from onepass import reference

DTYPE = torch.float64


E4M3 = torch.float8_e4m3fn


INT32 = torch.int32


def randn(*shape, seed=0, dtype=DTYPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64).to(dtype)


def qkv(batch=2, seqlen_q=7, seqlen_k=10, heads_q=4, heads_kv=2, head_dim=8, head_dim_v=8, dtype=DTYPE):
    return [
        randn(batch, seqlen_q, heads_q, head_dim, dtype=dtype),
        randn(batch, seqlen_k, heads_kv, head_dim, seed=1, dtype=dtype),
        randn(batch, seqlen_k, heads_kv, head_dim_v, seed=2, dtype=dtype),
    ]


DESCALES = "q_descale k_descale v_descale"


def chunks(seqlen_q, seqlen_k, size, start=0):
    """key_ranges of the oracle, in which keys before the start are cut off."""
    position = torch.arange(seqlen_q) + seqlen_k - seqlen_q - start
    begin = position.div(size, rounding_mode="floor") * size
    return torch.stack([begin, begin + size], -1)[None, None]


OPTIONS = [
    ({}, {}),
    (
        {"causal": True, "softcap": 2.0, "num_splits": 3, "pack_gqa": True, "sm_margin": 8},
        {"causal": True, "softcap": 2.0},
    ),
    ({"window_size": torch.tensor([3, -1]), "softmax_scale": 0.4}, {"window": (3, None), "softmax_scale": 0.4}),
    ({"attention_chunk": 4}, {"chunk": 4}),
    ({"attention_chunk": 3, "causal": True, "window_size": (1, 5)}, {"chunk": 3, "causal": True, "window": (1, 5)}),
]


def oracle(q, k, v, options, start=0):
    options = dict(options)
    size = options.pop("chunk", None)
    if size:
        options["key_ranges"] = chunks(q.shape[1], k.shape[1] + start, size, start)
    return reference.attention(q, k, v, **options)


# two sequences, of which some rows do not exist: NaN there must not show
OFFSETS_Q, USED_Q = torch.tensor([0, 7, 12], dtype=INT32), torch.tensor([4, 5], dtype=INT32)


OFFSETS_K, USED_K = torch.tensor([0, 9, 19], dtype=INT32), torch.tensor([9, 6], dtype=INT32)


def real(t, descale):
    """Real values of an e4m3 tensor (batch, seqlen, heads, dim) whose kv heads have descales."""
    group = t.shape[2] // descale.shape[1]
    return t.double() * descale.double().repeat_interleave(group, 1)[:, None, :, None]


def descales(batch=2, heads=2):
    return [torch.rand(batch, heads, generator=torch.Generator().manual_seed(s)) + 0.5 for s in range(3)]


FILLED = torch.tensor([8, 0, 5], dtype=INT32)


def cache(dtype=DTYPE):
    """k and v of three entries with room for 14 keys, NaN where none is."""
    caches = [randn(3, 14, 2, 8, seed=i, dtype=dtype) for i in (1, 2)]
    for c in caches:
        for b, n in enumerate(FILLED.tolist()):
            c.view(torch.uint8 if dtype == E4M3 else dtype)[b, n:] = 0x7F if dtype == E4M3 else torch.nan
    return caches
