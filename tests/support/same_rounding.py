"""Comparison of two ways of rounding to e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from onepass.quantization.layout import keys_first
from onepass.validation.fp8 import QuantizedQKV

NAN_CODE = 0x7F
# Sums in another order, whose last bits tensor cores truncate, differ by up to about 2^-18 of the largest term. So do
# scales, and a value that lies as near to the middle between two e4m3 numbers, 2^-4 apart, rounds the other way.
SCALE_OFF = 2.0**-17
SHARE_OFF = 1e-3


def assert_same_rounding(
    actual: QuantizedQKV,
    expected: QuantizedQKV,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    same_means: bool = True,
) -> None:
    """Assert that q, k, v and their descales agree up to the order of sums, in whichever layout v lies.

    Tensors that were not rotated agree bit for bit, if the same means were subtracted. Rotated ones may differ by one
    e4m3 number here and there. Rows behind the last packed sequence are not compared, but in `actual` they are 0.

    Raises: AssertionError.
    """
    is_exact = same_means or actual.v_mean is None
    for name, cu_seqlens in (("q", cu_seqlens_q), ("k", cu_seqlens_k), ("v", cu_seqlens_k)):
        codes, expected_codes = (_rows(x, name, cu_seqlens).view(torch.uint8) for x in (actual, expected))
        if cu_seqlens is not None:
            total = int(cu_seqlens[-1])
            assert (codes[total:] == 0).all(), f"{name}: not 0 past the last sequence"
            codes, expected_codes = codes[:total], expected_codes[:total]
        _compare(name, codes, expected_codes, is_exact and (name == "v" or expected.rotation is None))
        descales = getattr(actual, f"{name}_descale"), getattr(expected, f"{name}_descale")
        tolerance = 0.0 if is_exact and (name == "v" or expected.rotation is None) else SCALE_OFF
        torch.testing.assert_close(*descales, rtol=tolerance, atol=0.0)


def _rows(quantized: QuantizedQKV, name: str, cu_seqlens: Tensor | None) -> Tensor:
    if name == "v" and quantized.v_keys_last:
        return keys_first(quantized.v, quantized.k.shape[-3], cu_seqlens)
    return getattr(quantized, name)


def _compare(name: str, codes: Tensor, expected: Tensor, is_exact: bool) -> None:
    is_nan = expected & NAN_CODE == NAN_CODE
    assert torch.equal(codes & NAN_CODE == NAN_CODE, is_nan), f"{name}: NaN at other elements"
    if is_exact:
        assert torch.equal(codes.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0)), f"{name}: other bits"
        return
    # codes as integers in the order of their values, with -0 = 0
    a, b = (torch.where(c >= 128, 128 - c.int(), c.int()).masked_fill(is_nan, 0) for c in (codes, expected))
    units = (a - b).abs()
    assert units.numel() == 0 or units.max() <= 1, f"{name}: {units.max()} units apart"
    off = int((units > 0).sum())
    assert off <= 1 + SHARE_OFF * units.numel(), f"{name}: {off} of {units.numel()} values differ"
