"""Rounding to e4m3 with descales, in plain PyTorch."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .segments import segments_of

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# The descale of rows that hold zeros only. The Hopper kernel multiplies P by the descale of V's block before it rounds
# P: with 1.0 a block of zeros would leave few bits to the other blocks; with a tiny descale the probabilities of the
# block would be missing from the sum.
SCALE_OF_ZEROS = 2.0**-20
# The rows of a descale with granularity "block": the rows of a Hopper warpgroup, and a divisor of every tile of keys.
SCALE_BLOCK = 64
Q_BLOCK = KV_BLOCK = SCALE_BLOCK
# P = exp(s - row_max) <= 1 is rounded to e4m3 as 256 P. A power of two keeps the largest probability exact, and 256 is
# the largest one below 448. Values of 256 P below 2^-10, probabilities below 4e-6, become 0.
P_SCALE = 256.0

Granularity = Literal["row", "block", "head", "tensor"]
GRANULARITIES = get_args(Granularity)
CANDIDATES = 8  # descales that granularity "row" tries
TINY = torch.finfo(torch.float32).tiny  # scales are at least 2^-126, the smallest float32 that is not subnormal


def round_probabilities_(p: Tensor, scratch: Tensor) -> None:
    """p = e4m3(P_SCALE * p) / P_SCALE in place, for float32 p from 0 to 1 (or NaN), with the same bits as a cast.

    Adding and subtracting 1.5 * 2^23 spacings rounds to a multiple of the spacing, which is 2^-3 of the power of two
    below p, and never less than the spacing of the smallest numbers. On a CPU these five passes take a tenth of the
    time of two casts.

    Args:
        scratch: a float32 tensor in the shape of p.
    """
    torch.clamp(p, min=2.0**-6 / P_SCALE, out=scratch)
    scratch.view(torch.int32).bitwise_and_(0x7F800000)  # the power of two
    scratch.mul_(1.5 * 2.0**20)
    p.add_(scratch).sub_(scratch)


def round_to_e4m3(x: Tensor, granularity: str, block: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (batch or 1, rows, heads, head_dim) float32 as e4m3 of that shape, and its descale in a shape of
    `QuantizedQKV`."""
    is_packed = cu_seqlens is not None
    # e4m3 has no inf; whether a cast turns inf into NaN or 448 depends on the version of torch
    x = torch.where(x.isinf(), torch.nan, x)
    if granularity == "tensor":
        scale = _scale_of(_largest(x).amax() if x.numel() else x.new_zeros(()))
        return (x * scale.reciprocal()).to(E4M3), scale
    rows = {"row": 1, "block": block}.get(granularity)
    index, count = segments_of(x.shape[1], rows, cu_seqlens, x.device)
    shape = x.shape[0], count, x.shape[2]
    if count == 0:  # no row belongs to a sequence, and all have been cleared
        rounded, scales = x.to(E4M3), torch.ones(shape, dtype=torch.float32, device=x.device)
    elif granularity == "row":
        rounded, row_scales = _least_error(x)
        scales = torch.ones(shape, dtype=torch.float32, device=x.device)
        if x.numel():
            scales[:, index] = row_scales
    else:
        scales = torch.zeros(shape, dtype=torch.float32, device=x.device)
        if x.numel():
            at = index[None, :, None].expand(x.shape[:3])
            scales = scales.scatter_reduce_(1, at, _largest(x), "amax", include_self=True)
        scales = _scale_of(scales)
        rounded = (x * scales.reciprocal()[:, index, :, None]).to(E4M3)
    if rows is None:  # (batch, heads)
        return rounded, (scales[0] if is_packed else scales[:, 0]).contiguous()
    scales = scales.transpose(1, 2).contiguous()
    return rounded, scales[0] if is_packed else scales


def _largest(x: Tensor) -> Tensor:
    """The largest finite magnitude of each row. NaN and inf must not reach a descale, which other rows share."""
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1)


def _scale_of(largest: Tensor) -> Tensor:
    # multiplied by a reciprocal, as in the kernels
    return torch.where(largest > 0, largest * (1.0 / E4M3_MAX), SCALE_OF_ZEROS).clamp(min=TINY)


def _least_error(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row in e4m3, and the descale (batch, rows, heads) with the least squared error of several candidates.

    The relative error of a value falls by half from one power of two to the next, so the position of a row's values
    between powers of two matters: CANDIDATES descales are tried at equal ratios over a factor of 2. Each is then
    fitted, descale = x.y / y.y.
    """
    smallest = _scale_of(_largest(x))[..., None]
    best_error = torch.full_like(smallest, torch.inf)
    best, best_scale = torch.zeros_like(x, dtype=E4M3), smallest
    for i in range(CANDIDATES):
        rounded = (x / (smallest * 2 ** (i / CANDIDATES))).to(E4M3)
        y = rounded.float()
        scale = (torch.linalg.vecdot(x, y) / torch.linalg.vecdot(y, y).clamp(min=TINY))[..., None]
        # a row of zeros, or one with NaN
        scale = torch.where(scale.isfinite() & (scale > 0), scale, smallest)
        error = (x - y * scale).square().sum(-1, keepdim=True)
        is_better = (error < best_error) | (i == 0)
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        # torch.where does not take e4m3
        best = torch.where(is_better, rounded.view(torch.uint8), best.view(torch.uint8)).view(E4M3)
    return best, best_scale[..., 0]
