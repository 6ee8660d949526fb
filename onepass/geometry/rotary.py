"""Rotary positions in PyTorch: pairs of columns, turned by an angle that grows with the position."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, seqlen, num_heads, head_dim) with its first 2 * cos.shape[1] columns turned, pair by pair.

    Args:
        positions: (batch, seqlen), the rows of cos and sin (positions, rotary_dim / 2) to use.
        interleaved: pairs are (0, 1), (2, 3), ..; else (0, d), (1, d + 1), .. with d = rotary_dim / 2.

    Returns: a new tensor, computed in float32 (float64 for float64) and rounded once. Source: RoFormer,
    arXiv:2104.09864, section 3.2.2.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[1]
    cos, sin = (t[positions.clamp(0, t.shape[0] - 1)].to(dtype).unsqueeze(2) for t in (cos, sin))
    turned = x[..., : 2 * half].to(dtype)
    pairs = turned.unflatten(-1, (half, 2) if interleaved else (2, half))
    a, b = pairs.unbind(-1 if interleaved else -2)
    result = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2).flatten(-2)
    return torch.cat((result.to(x.dtype), x[..., 2 * half :]), -1)
