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
        ({"key_ranges": torch.zeros(1, 1, 6, 2)}, TypeError, "key_ranges: expected int32, got float32"),
        ({"q_positions": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, r"q_positions: .* \(1 or 2, 6\)"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes: expected shape \(4,\), got \(3,\)"),
        ({"alibi_slopes": torch.zeros(4).double()}, TypeError, "alibi_slopes: expected float32, got float64"),
        ({"bias": torch.zeros(3, 4, 6, 6)}, ValueError, r"bias: expected shape \(1 or 2, 1 or 4, 1 or 6, 1 or 6\)"),
        ({"bias": torch.zeros(6, 6).int()}, ValueError, "bias: expected shape"),
        ({"bias": torch.zeros(1, 1, 6, 6).bool()}, TypeError, "bias: expected float64, .* got bool"),
        ({"bias": torch.zeros(1, 1, 6, 6, device="meta")}, ValueError, "bias: expected device cpu like q"),
        ({"bias": torch.zeros(1, 1, 6, 6), "precision": "fp8"}, UnsupportedError, "bias: expected None with precision"),
    ],
)
def test_refusals(options, error, message):
    with pytest.raises(error, match=message):
        onepass.attention(*tensors(), **options)


def test_quantized_calls_have_none():
    quantized = onepass.quantize_fp8(*(t.bfloat16() for t in tensors()))
    with pytest.raises(UnsupportedError, match=r"dropout_p: expected 0\.0 with a QuantizedQKV, got 0\.1"):
        onepass.attention(quantized, dropout_p=0.1)
