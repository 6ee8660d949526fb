"""What `attention` says about modifiers that it does not take."""

import pytest
import torch

import onepass
from onepass.errors import UnsupportedError


def tensors():
    return (torch.randn(2, 6, 4, 8) for _ in range(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a probability from 0 up to"),
        ({"dropout_p": -0.5}, ValueError, "dropout_p: expected a probability from 0 up to"),
        ({"dropout_p": "much"}, TypeError, "dropout_p"),
        ({"seqstart_k": torch.zeros(3, dtype=torch.int32)}, ValueError, "seqstart_k: expected shape"),
        ({"seqstart_k": torch.zeros(2)}, TypeError, "seqstart_k: expected"),
        ({"seqstart_k": torch.tensor([0, 7], dtype=torch.int32)}, ValueError, r"seqstart_k\[1\]: expected 0 to 6"),
        ({"key_ranges": torch.zeros(1, 1, 6, dtype=torch.int32)}, ValueError, "key_ranges: expected shape"),
        ({"key_ranges": torch.zeros(1, 1, 6, 2)}, TypeError, "key_ranges: expected dtype int32, got float32"),
        ({"query_ranges": torch.zeros(1, 1, 5, 2).int()}, ValueError, r"query_ranges: .* \(1 or 2, 1 or 4, 6, 2\)"),
        ({"query_ranges": torch.zeros(1, 1, 6, 2).long()}, TypeError, "query_ranges: expected dtype int32, got int64"),
        ({"query_ranges": torch.zeros(1, 1, 6, 2, device="meta").int()}, ValueError, "query_ranges: expected device"),
        ({"query_ranges": torch.zeros(1, 1, 6, 2).int(), "precision": "fp8"}, UnsupportedError, "query_ranges: expec"),
        ({"q_positions": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, r"q_positions: .* \(1 or 2, 6\)"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes: expected shape \(4,\), got \(3,\)"),
        ({"alibi_slopes": torch.zeros(4).double()}, TypeError, "alibi_slopes: expected dtype float32, got float64"),
        ({"bias": torch.zeros(3, 4, 6, 6)}, ValueError, r"bias: expected shape \(1 or 2, 1 or 4, 1 or 6, 1 or 6\)"),
        ({"bias": torch.zeros(6, 6).int()}, ValueError, "bias: expected shape"),
        (
            {"bias": torch.zeros(1, 1, 0, 6), "q_positions": torch.zeros(1, 6, dtype=torch.int32)},
            ValueError,
            r"bias: expected at least 1 row with q_positions, got shape \(1, 1, 0, 6\)",
        ),
        ({"bias": torch.zeros(1, 1, 6, 6).bool()}, TypeError, "bias: expected dtype float64, .* got bool"),
        ({"bias": torch.zeros(1, 1, 6, 6, device="meta")}, ValueError, "bias: expected device cpu like q"),
        ({"bias": torch.zeros(1, 1, 6, 6), "precision": "fp8"}, UnsupportedError, "bias: expected None with precision"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        onepass.attention(*tensors(), **options)


def test_refusals_of_packed_sequences():
    """The rows of query_ranges are those of k, which has others than q."""
    q, k, v = torch.randn(6, 4, 8), *torch.randn(2, 9, 4, 8)
    offsets = {"cu_seqlens_q": torch.tensor([0, 6]).int(), "cu_seqlens_k": torch.tensor([0, 9]).int()}
    onepass.attention_varlen(q, k, v, **offsets, query_ranges=torch.zeros(4, 9, 2).int())
    for shape in ((4, 6, 2), (1, 1, 9, 2)):
        with pytest.raises(ValueError, match=r"query_ranges: expected shape \(1 or 4, 9, 2\), got"):
            onepass.attention_varlen(q, k, v, **offsets, query_ranges=torch.zeros(shape).int())


def decode(**options):
    q, k, v = tensors()
    return onepass.attention_decode(q, k, v, cache_seqlens=torch.tensor([6, 3], dtype=torch.int32), **options)


def decode_packed(**options):
    pages = {"page_table": torch.zeros(2, 3, dtype=torch.int32)}
    q, k, v = tensors()
    offsets = torch.tensor([0, 1, 5], dtype=torch.int32)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    return onepass.attention_decode(q[0], k, v, cache_seqlens=lengths, cu_seqlens_q=offsets, **pages, **options)


INT32 = torch.int32
TABLES = {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.zeros(9, 4)}
NEW = {"k_new": torch.zeros(2, 3, 4, 8), "v_new": torch.zeros(2, 3, 4, 8)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seqstart_k": torch.zeros(3, dtype=INT32)}, ValueError, "seqstart_k: expected shape"),
        ({"seqstart_k": torch.tensor([0, 4], dtype=INT32)}, ValueError, r"seqstart_k\[1\]: expected 0 to 3, the keys"),
        ({"seqstart_k": torch.tensor([-1, 0], dtype=INT32)}, ValueError, r"seqstart_k\[0\]: expected 0 to 6, the keys"),
        ({"key_ranges": torch.zeros(2, 4, 5, 2, dtype=INT32)}, ValueError, r"\(1 or 2, 1 or 4, 6, 2\), got \(2, 4, 5"),
        ({"key_ranges": torch.zeros(1, 1, 6, 2).long()}, TypeError, "key_ranges: expected dtype int32, got int64"),
        ({"query_ranges": torch.zeros(2, 3, 6, 2, dtype=INT32)}, ValueError, r"query_ranges: .* \(1 or 2, 1 or 4, 6"),
        ({"q_positions": torch.zeros(6, dtype=INT32)}, ValueError, r"q_positions: expected shape \(1 or 2, 6\), got"),
        ({"alibi_slopes": torch.zeros(1, 4)}, ValueError, r"alibi_slopes: expected shape \(2, 4\), got \(1, 4\)"),
        ({"bias": torch.zeros(1, 1, 1, 5)}, ValueError, r"1 or 6, 1 or 6\), got \(1, 1, 1, 5\)"),
        ({"bias": torch.zeros(1, 1, 1, 6, device="meta")}, ValueError, "bias: expected device cpu like q, got meta"),
        ({"rotary_positions_q": torch.zeros(2, 6, dtype=INT32)}, ValueError, "expected None without rotary_cos, got T"),
        (TABLES | {"rotary_positions_q": torch.zeros(2, 5, dtype=INT32)}, ValueError, r"q: .* \(1 or 2, 6\), got"),
        (
            TABLES | {"rotary_positions_q": torch.zeros(1, 6)},
            TypeError,
            "rotary_positions_q: expected dtype int32, got float",
        ),
        (TABLES | {"rotary_positions_k": torch.zeros(1, 3, dtype=INT32)}, ValueError, "expected None without k_new"),
        (TABLES | NEW | {"rotary_positions_k": torch.zeros(2, 4, dtype=INT32)}, ValueError, r"k: .* \(1 or 2, 3\)"),
        ({"dropout_p": 0.1}, TypeError, "dropout_p: it is an argument of attention"),
    ],
)
def test_refusals_over_a_cache(options, error, message):
    with pytest.raises(error, match=message):
        decode(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seqstart_k": torch.zeros(6, dtype=INT32)}, r"seqstart_k: expected shape \(2,\)"),
        ({"key_ranges": torch.zeros(1, 1, 6, 2, dtype=INT32)}, r"key_ranges: expected shape \(1 or 4, 6, 2\)"),
        ({"query_ranges": torch.zeros(1, 18, 2, dtype=INT32)}, r"query_ranges: .* \(1 or 2, 1 or 4, 18, 2\), got"),
        ({"q_positions": torch.zeros(1, 6, dtype=INT32)}, r"q_positions: expected shape \(6,\), got \(1, 6\)"),
        ({"bias": torch.zeros(1, 6, 6)}, r"bias: expected shape \(1 or 4, 1 or 6, 1 or 18\), got \(1, 6, 6\)"),
        ({"bias": torch.zeros(1, 1, 6, 18)}, r"bias: expected shape \(1 or 4, 1 or 6, 1 or 18\)"),
    ],
)
def test_refusals_over_a_cache_with_packed_queries(options, message):
    with pytest.raises(ValueError, match=message):
        decode_packed(**options)


def test_quantized_calls_have_none():
    quantized = onepass.quantize_fp8(*(t.bfloat16() for t in tensors()))
    with pytest.raises(UnsupportedError, match=r"dropout_p: expected 0\.0 with a QuantizedQKV, got 0\.1"):
        onepass.attention(quantized, dropout_p=0.1)
