"""How far from float64 a result may be. The budget comes from the data: no tolerance is picked by hand.

An output may be off by at most `factor` times the error of plain dense PyTorch computed in the inputs' own dtype,
plus one rounding of the largest value in that dtype: factor 2 for out, 3 for gradients. Random problems, which meet
degenerate cases, and problems of few values, of which plain PyTorch may get all right by chance, add the floor of
`rounding.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference

OUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0


class Comparison(NamedTuple):
    """Error of one tensor against float64, beside what it was allowed."""

    name: str
    error: float
    budget: float
    rms_error: float
    plain_error: float
    where: tuple[int, ...]

    @property
    def ok(self) -> bool:
        return self.error <= self.budget

    @property
    def share(self) -> float:
        """The error as a share of its budget: the worst of several comparisons is the one with the largest."""
        return self.error / max(self.budget, 1e-300)

    def __str__(self) -> str:
        sign = "<=" if self.ok else ">"
        return (
            f"{self.name}: max error {self.error:.3e} {sign} budget {self.budget:.3e} "
            f"(plain {self.plain_error:.3e}, rms {self.rms_error:.3e}), worst at {self.where}"
        )


def _worst(error: Tensor) -> tuple[float, tuple[int, ...]]:
    if error.numel() == 0:
        return 0.0, ()
    flat = int(error.argmax())
    return float(error.flatten()[flat]), tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))


def compare(
    name: str, actual: Tensor, oracle: Tensor, plain: Tensor, factor: float = OUT_FACTOR, floor: float = 0.0
) -> Comparison:
    """Compare with the float64 oracle under the budget of `factor` times the plain error plus one rounding.

    Args:
        actual: the result under test, in its own dtype.
        oracle: float64, same shape.
        plain: dense PyTorch in `actual`'s dtype, same shape; for float64, which has no oracle above it, in float32,
            and its error is scaled down by the ratio of the two roundings.
        floor: what rounding alone may do where terms cancel (`rounding_terms` times the accumulation's epsilon).
    Returns: Comparison; `.ok` is False also where the places of NaN or inf differ from the oracle's.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name}: expected shape {tuple(oracle.shape)}, got {tuple(actual.shape)}")
    eps = torch.finfo(actual.dtype).eps
    scale = eps / torch.finfo(plain.dtype).eps if actual.dtype == torch.float64 else 1.0
    actual, oracle, plain = (x.detach().double().cpu() for x in (actual, oracle, plain))
    both_special = ~oracle.isfinite() & ((actual == oracle) | (actual.isnan() & oracle.isnan()))
    error = torch.where(both_special, 0.0, (actual - oracle).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)
    finite = oracle.isfinite()
    largest = float(oracle[finite].abs().max()) if finite.any() else 0.0
    plain_errors = (plain - oracle).abs()[finite & plain.isfinite()]
    plain_error = scale * float(plain_errors.max()) if plain_errors.numel() else 0.0
    worst, where = _worst(error)
    rms = float(error.square().mean().sqrt()) if error.numel() else 0.0
    return Comparison(name, worst, factor * plain_error + eps * largest + floor, rms, plain_error, where)


class FP8Budget(NamedTuple):
    """The float64 oracle of an FP8 call, and how far each element of out and lse may be off."""

    oracle: reference.Reference
    out: Tensor
    lse: Tensor


# Below which part of the largest of 32 products and the accumulator an FP8 tensor core cuts all of them off.
FP8_STEP = 32
FP8_CUT = 2.0**-12
FP32_LSE = 2e-4  # exponentials, sums and the logarithm in float32, with fast instructions


def fp8_budget(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out_dtype: torch.dtype,
    *,
    short_sums: bool = False,
    v_scale: Tensor | None = None,
    p_exponent: int = 8,
    **options: Any,
) -> FP8Budget:
    """The budget of an FP8 call: what rounding P to e4m3 does, and with short_sums what tensor cores of Hopper add.

    A probability is rounded by at most 2^-4 of itself, or below e4m3's normal numbers by 2^-10 where its row's largest
    is 2^p_exponent, both before its product with v. (The running maximum that P refers to is at most the final one.)
    With v_scale, P has it too, and stands before the product with v / v_scale.

    Short sums: for e4m3 operands these tensor cores align 32 products and the accumulator with the largest of them and
    cut what is more than 13 bits below (DeepSeek-V3, arXiv:2412.19437, section 3.5.2, finds about 14 bits in all). So
    each step of 32 columns loses what its products have below 2^-12 of the largest (the descales are no powers of two:
    a bit more), and as much again of the accumulator. A row's lse moves by the mean of what its scores move by, with
    its probabilities for weights. What P V loses is small beside the rounding of P and has no term.

    Args:
        q, k, v: dequantised, dense, with the columns of q and k in the order in which they are summed.
        v_scale: of each row of v, what the kernel has in P: (batch, seqlen_k, num_heads_kv, 1) or ().
        options: as for `attention`.
    """
    oracle = reference.attention(q, k, v, **options)
    batch, seqlen_k, heads_kv, head_dim = k.shape
    identity = torch.eye(seqlen_k, dtype=torch.float64, device=k.device)
    # the probabilities: attention with the identity for v
    p = reference.attention(q, k, identity[None, :, None].expand(batch, -1, heads_kv, -1), **options).out.transpose(
        1, 2
    )
    group = q.shape[2] // max(1, heads_kv)
    v = v.double().repeat_interleave(group, 2).transpose(1, 2).abs()
    scale = torch.ones(1, dtype=torch.float64, device=v.device) if v_scale is None else v_scale.double()
    scale = scale.expand(batch, seqlen_k, heads_kv, 1).repeat_interleave(group, 2).transpose(1, 2)  # (.., keys, 1)
    smallest = (p * scale.mT).amax(-1, keepdim=True) * 2.0 ** (-10 - p_exponent)
    error = (p * 2.0**-4) @ v + smallest * (v / scale).sum(2, keepdim=True).amax(-1, keepdim=True)
    lse = torch.zeros_like(oracle.lse)
    if short_sums:
        softmax_scale = abs(options.get("softmax_scale") or head_dim**-0.5)
        cut = softmax_scale * _cut_scores(q, k.repeat_interleave(group, 2))
        lse = (p * cut).sum(-1)
        error = error + (p * (cut + lse[..., None])) @ v
    rounding = torch.finfo(out_dtype).eps * oracle.out.abs() + 1e-5 * (v.amax() if v.numel() else 1.0)
    return FP8Budget(oracle, 1.01 * error.transpose(1, 2) + rounding, 1.01 * lse + FP32_LSE)


def _cut_scores(q: Tensor, k: Tensor) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k): how much of q.k tensor cores may cut off."""
    q, k = (x.double().transpose(1, 2) for x in (q, k))
    return torch.cat([_cut_rows(rows, k) for rows in q.split(32, 2)], 2)


def _cut_rows(q: Tensor, k: Tensor) -> Tensor:
    total = cut = q.new_zeros(*q.shape[:3], k.shape[2])
    for q_step, k_step in zip(q.split(FP8_STEP, -1), k.split(FP8_STEP, -1), strict=True):
        products = q_step[..., :, None, :] * k_step[..., None, :, :]
        unit = FP8_CUT * torch.maximum(products.abs().amax(-1), total.abs())
        lost = torch.fmod(products, unit[..., None].clamp(min=torch.finfo(torch.float64).tiny)).sum(-1)
        total = total + products.sum(-1)
        cut = cut + lost.abs() + unit
    return cut


def compare_gradients(name: str, actual: Tensor, oracle: Tensor, plain: Tensor, floor: float = 0.0) -> Comparison:
    """`compare` with the gradients' factor."""
    return compare(name, actual, oracle, plain, GRADIENT_FACTOR, floor)


def compare_lse(actual: Tensor, oracle: Tensor) -> Comparison:
    """lse: within 1e-4 + 1e-5 |lse| (1e-11 + 1e-12 |lse| in float64), and -inf where the oracle has it."""
    absolute, relative = (1e-11, 1e-12) if actual.dtype == torch.float64 else (1e-4, 1e-5)
    actual, oracle = actual.detach().double().cpu(), oracle.detach().double().cpu()
    both_special = ~oracle.isfinite() & ((actual == oracle) | (actual.isnan() & oracle.isnan()))
    allowed = absolute + relative * oracle.abs().nan_to_num(0.0, 0.0, 0.0)
    error = torch.where(both_special, 0.0, (actual - oracle).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)
    share, where = _worst(error / allowed)
    rms = float(error.square().mean().sqrt()) if error.numel() else 0.0
    # in units of what each element is allowed
    return Comparison("lse (share of its tolerance)", share, 1.0, rms, 0.0, where)
