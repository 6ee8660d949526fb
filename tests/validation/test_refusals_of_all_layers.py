"""Refusals of functions beside `attention` and `attention_decode`: compat, distributed, configurations, warmup."""

from dataclasses import replace

import pytest
import torch

import onepass
from onepass import distributed
from onepass.compat import flash_attn, flash_attn_3, flash_attn_4, sdpa
from onepass.compat.upstream import rotary
from onepass.geometry.splits import MAX_SPLITS_BY_SIZE
from onepass.integrations.vllm import cache as vllm_cache
from onepass.kernels.config import BackwardConfigSm80, ForwardConfigSm80, ForwardConfigSm90, arch
from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.problem import AttentionProblem, Mask
from onepass.validation.decode import few_queries

E4M3, INT32 = torch.float8_e4m3fn, torch.int32
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 1, 512, 512, 8, 8, 128, 128, softmax_scale=0.1, mask=Mask())


def qkv(heads_q=2, heads_kv=2, lead=(2,)):
    return [torch.randn(*lead, 6, heads, 8) for heads in (heads_q, heads_kv, heads_kv)]


def decoded(**changes):
    q, k, v = qkv()
    call = {"q": q[:, :1], "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor([3, 3], dtype=INT32)}
    return onepass.attention_decode(**call | changes)


def packed_decoded(q, offsets):
    return decoded(q=q, cu_seqlens_q=torch.tensor(offsets, dtype=INT32))


def backward_of_fa3(**changes):
    q, k, v = qkv()
    out, lse, *_ = flash_attn_3._flash_attn_forward(q, k, v)
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse} | changes
    return flash_attn_3._flash_attn_backward(**given)


def differentiated(function):
    q, k, v = (t.to(E4M3).requires_grad_() for t in qkv())
    out = function(q, k, v)
    (out[0] if isinstance(out, tuple) else out).float().sum().backward()


def fa4_pages(q, k, **options):
    return flash_attn_4.flash_attn_varlen_func(q, k, k, page_table=torch.zeros(2, 1, dtype=INT32), **options)


def plan(tokens=16, **changes):
    given = {"num_heads_q": 2, "num_heads_kv": 2, "num_ranks": 2, "rank": 0, "head_dim": 8}
    return distributed.plan(tokens, **given | changes)


def on_one_rank(tokens=8, **changes):
    whole = distributed.plan(tokens, num_heads_q=2, num_heads_kv=2, num_ranks=1, rank=0, head_dim=8)
    q, k, v = (torch.randn(2, tokens, 2, 8) for _ in range(3))
    return distributed.attention(*({"q": q, "k": k, "v": v} | changes).values(), whole)


def decoded_on_one_rank(**changes):
    whole = distributed.plan(8, num_heads_q=2, num_heads_kv=2, num_ranks=1, rank=0, head_dim=8)
    given = {"q": torch.randn(2, 1, 2, 8), "k_cache": torch.randn(2, 8, 2, 8), "v_cache": torch.randn(2, 8, 2, 8)}
    return distributed.decode(**given | changes, plan=whole, cache_seqlens=torch.tensor([3, 3], dtype=INT32))


def quantized_v(**changes):
    quantized = onepass.quantize_fp8(*(t.half() for t in qkv()))
    return onepass.attention(replace(quantized, **changes))


ROWS = torch.randn(2, 6, 2, 8)
TABLES = {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}
LONG = dict.fromkeys(("k_cache", "v_cache"), torch.zeros(1, 1, 1, 8).expand(2, 64 * MAX_SPLITS_BY_SIZE + 1, 2, 8))

VALUE_ERRORS = [
    (lambda: flash_attn_3.flash_attn_with_kvcache(*(t[0] for t in qkv())), "q: expected 4 dimensions, got 3"),
    (
        lambda: flash_attn_3.flash_attn_qkvpacked_func(torch.randn(2, 6, 5, 8), num_heads_q=2),
        "qkv: expected 2 heads of q and as many of k as of v, got 5",
    ),
    (lambda: fa4_pages(ROWS[0], ROWS), "q: expected 4 dimensions, got 3 in shape"),
    (lambda: fa4_pages(ROWS, ROWS[0]), "k: expected 4 dimensions, got 3 in shape"),
    (lambda: backward_of_fa3(softmax_lse=torch.zeros(2, 6, 2)), "softmax_lse: expected shape .*, one for each row"),
    (lambda: backward_of_fa3(dout=torch.zeros(2, 6, 2, 4)), "dout: expected shape"),
    (
        lambda: flash_attn_3.flash_attn_combine(torch.zeros(2, 2, 2, 2), torch.zeros(2, 2)),
        "lse_partial: expected 3 or 4",
    ),
    (lambda: rotary.apply_rotary_emb(ROWS[0], torch.ones(9, 4), torch.ones(9, 4)), "x: expected 4 dimensions"),
    (
        lambda: sdpa.scaled_dot_product_attention(ROWS, torch.randn(3, 6, 2, 8), torch.randn(3, 6, 2, 8)),
        "query, key, value: expected dimensions before the last two that broadcast",
    ),
    (lambda: plan(group=object()), "num_ranks: expected None together with a group, got both"),
    (lambda: plan(rank=2), "rank: expected one below num_ranks = 2, got 2"),
    (lambda: plan(timeout=0.0), "timeout: expected seconds above 0, got 0.0"),
    (lambda: plan(head_dim=0), "head_dim: expected at least 1, got 0"),
    (lambda: plan(chunks=0), "chunks: expected at least 1, got 0"),
    (lambda: plan(num_heads_kv=3), "num_heads_q: expected a multiple of num_heads_kv = 3, got 2"),
    (lambda: plan([0]), "tokens: expected offsets that begin with 0 and do not fall"),
    (lambda: plan([1, 5]), "tokens: expected offsets that begin with 0 and do not fall"),
    (lambda: plan([0, 5, 4]), "tokens: expected offsets that begin with 0 and do not fall"),
    (lambda: plan([0, 0]), r"tokens: expected at least 1 token, got offsets \(0, 0\)"),
    (lambda: plan(engine="head"), "engine: expected 'heads', 'keys', a number of ranks or None, got 'head'"),
    (lambda: on_one_rank(k=torch.randn(2, 7, 2, 8)), "k: expected .*, with the 8 tokens that rank 0 owns"),
    (lambda: decoded_on_one_rank(q=torch.randn(2, 1, 4, 8)), "q: expected the plan's 2 heads, got 4"),
    (lambda: decoded_on_one_rank(q=torch.randn(1, 2, 8)), "q: expected 4 dimensions, got shape"),
    (
        lambda: decoded_on_one_rank(k_cache=torch.randn(2, 7, 2, 8), v_cache=torch.randn(2, 7, 2, 8)),
        "k_cache: expected room for the 8 tokens that rank 0 owns, got 7 rows",
    ),
    (lambda: vllm_cache.keys_and_values(torch.zeros(3, 4, 2, 8), 8, False), r"kv_cache: expected \(blocks, 2, block"),
    (lambda: decoded(k_cache=ROWS.to(E4M3), v_cache=ROWS.to(E4M3).to("meta")), "v_cache: expected device"),
    (
        lambda: decoded(k_cache=ROWS.to("meta").to(E4M3), v_cache=ROWS.to("meta").to(E4M3)),
        "k_cache: expected device cpu like q, got meta",
    ),
    (lambda: decoded(q=torch.randn(2, 1, 2, 4)), "k_cache: expected head_dim 4 like q, got 8"),
    (
        lambda: decoded(k_cache=ROWS[:, :0], v_cache=ROWS[:, :0], page_table=torch.zeros(2, 1, dtype=INT32)),
        "k_cache: expected pages of at least 1 key",
    ),
    (
        lambda: decoded(**TABLES, rotary_positions_k=torch.zeros(2, 1, dtype=INT32)),
        "rotary_positions_k: expected None without k_new, got Tensor",
    ),
    (
        lambda: decoded(rotary_positions_q=torch.zeros(2, 1, dtype=INT32)),
        "rotary_positions_q: expected None without rotary_cos, got Tensor",
    ),
    (
        lambda: decoded(rotary_cos=torch.ones(0, 4), rotary_sin=torch.ones(0, 4)),
        r"rotary_cos: expected shape \(positions, rotary_dim / 2\) with rotary_dim up to 8, got \(0, 4\)",
    ),
    (lambda: decoded(**LONG, split_size=64), f"split_size: expected at most {MAX_SPLITS_BY_SIZE} splits of the cache"),
    (lambda: packed_decoded(ROWS[0], []), r"cu_seqlens_q: expected shape \(batch \+ 1,\)"),
    (
        lambda: onepass.merge_partials(torch.tensor(1.0), torch.tensor(1.0)),
        r"outs: expected tensors stacked in dimension 0, got shape \(\)",
    ),
    (lambda: quantized_v(v=torch.zeros(2, 6, 8).to(E4M3)), "v: expected"),
    (
        lambda: onepass.warmup(q=(2**30, 2**30, 1, 1), k=(1, 1, 1, 1), v=(1, 1, 1, 1), dtype=torch.half),
        "q: expected a shape",
    ),
]
TYPE_ERRORS = [
    (lambda: plan(keep_gathered=1), "keep_gathered: expected"),
    (lambda: onepass.warmup([{}], q=(1, 1, 1, 8)), "warmup: expected calls, or .* by name, got both: q"),
    (lambda: onepass.warmup(), "warmup: expected calls, or .* by name, got neither"),
    (lambda: onepass.warmup("calls"), "calls: expected the arguments of calls by name, got 'calls'"),
    (
        lambda: decoded(rotary_cos=torch.ones(9, 4).half(), rotary_sin=torch.ones(9, 4).half()),
        "rotary_cos: expected dtype .*float32 like q, or torch.float32, got",
    ),
    (
        lambda: flash_attn.flash_attn_with_kvcache(
            ROWS,
            ROWS,
            ROWS,
            ROWS,
            ROWS,
            rotary_cos=torch.ones(9, 4).int(),
            rotary_sin=torch.ones(9, 4),
            cache_seqlens=0,
        ),
        "rotary_cos: expected floating point on cpu like q, got torch.int32",
    ),
]
UNSUPPORTED = [
    (lambda: differentiated(flash_attn_3.flash_attn_func), "has no backward: its result cannot be differentiated"),
    (lambda: rotary.RotaryEmbedding(8, pos_idx_in_fp32=False), "pos_idx_in_fp32: expected True, got False"),
    (lambda: arch.arch_of_capability(7, 5), "compute capability: expected that of one of .*sm_90a.*, got"),
    (lambda: DecodeConfigSm80(tile_n=24).check(PROBLEM, "sm_80"), "tile_n: expected"),
    (lambda: DecodeConfigSm80(early_merge=True).check(PROBLEM, "sm_80"), "early_merge: expected False before Hopper"),
    (lambda: BackwardConfigSm80(vector_adds=True).check(PROBLEM, "sm_80"), "vector_adds: expected False on sm_80"),
    (lambda: BackwardConfigSm80(tile_m=8).check(PROBLEM, "sm_80"), "tile_m"),
    (lambda: ForwardConfigSm80(tile_m=8).check(PROBLEM, "sm_80"), "tile_m"),
    (
        # 144 bytes of q are a multiple of 16, and 72 bytes of the cache are not
        lambda: ForwardConfigSm80().check(replace(PROBLEM, head_dim=72, kv_dtype=E4M3), "sm_90a"),
        "vector_bytes: 16 do not divide rows of head_dim 72",
    ),
    (lambda: ForwardConfigSm90(tile_n=128, q_stages=3).check(PROBLEM), "stages: expected K/V >= 1 and Q 1 or 2, got"),
    (
        lambda: ForwardConfigSm90(tile_n=64, score_buffers=2, overlap_tiles=False).check(PROBLEM),
        "score_buffers: 2 need overlap_tiles",
    ),
    (
        lambda: ForwardConfigSm90(tile_n=64, two_level_sums=True, score_buffers=2).check(PROBLEM),
        "two_level_sums: needs score_buffers=1",
    ),
]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        *((ValueError, *case) for case in VALUE_ERRORS),
        *((TypeError, *case) for case in TYPE_ERRORS),
        *((NotImplementedError, *case) for case in UNSUPPORTED),
    ],
    ids=lambda x: x[:60] if isinstance(x, str) else "",
)
def test_refused(error, call, message):
    with pytest.raises(error, match=message):
        call()


def test_a_plan_of_this_process_needs_a_process_group():
    with pytest.raises(RuntimeError, match=r"group: expected an initialized torch\.distributed, or num_ranks"):
        distributed.plan(16, num_heads_q=2, num_heads_kv=2, head_dim=8)


def test_a_hint_of_few_queries():
    offsets = torch.tensor([0, 40], dtype=INT32)
    assert [few_queries(n, offsets) for n in (None, 0, 1, 32, 33)] == [None, 0, 1, 32, None]
    assert few_queries(torch.tensor(3), offsets) is None  # it is not read
