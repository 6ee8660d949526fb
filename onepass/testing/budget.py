"""How far from float64 a result may be. The budget comes from the data: no tolerance is picked by hand.

Each tensor has to pass two tests.

The largest error: an output may be off by at most `factor` times the error of dense attention in plain PyTorch in the
inputs' own dtype, plus one rounding of the largest value in that dtype. The factor is 2 for out and 3 for gradients.
Random problems, which meet degenerate cases, and problems of few values, which plain PyTorch may get right by chance,
add the floor of `rounding.py`.

The scale: the largest error belongs to one of the largest values, so that rows of small values (with a causal mask all
late rows) could be off by a tenth unseen. Roundings average out over the many values of a block, a wrong factor does
not. So the projection <x, ref> / <ref, ref> of each block of rows and each head has to be 1 within `SCALE_BARS`, plus
what independent errors of the elements would do to it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference

OUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0

# By how much the projection may differ from 1: half of the fault that must be found wherever it sits. Right results
# stay far below: within a tenth of it in 16 bits, within a hundredth in float32. No user of float64 could tell 1e-9
# from 0, but its sums are that good.
SCALE_BARS = {torch.bfloat16: 4e-3, torch.float16: 1.2e-3, torch.float32: 4e-4, torch.float64: 1e-10}
# Rows of a block. At head_dim 64 it has 4096 values, over which errors of 1 % average out to 0.02 %.
BLOCK_ROWS = 64


class Scale(NamedTuple):
    """The error of the scale of a block of rows against the oracle: <x, ref> / <ref, ref> - 1.

    Attributes:
        error: the error of the block that came closest to its budget.
        budget: the error that this block may have.
        where: the name of this block.
    """

    error: float = 0.0
    budget: float = 0.0
    where: str = ""

    @property
    def ok(self) -> bool:
        return abs(self.error) <= self.budget

    @property
    def share(self) -> float:
        return abs(self.error) / max(self.budget, 1e-300)


class Comparison(NamedTuple):
    """The error of one tensor against float64, with its budget.

    Attributes:
        error, budget, where: the largest error, its limit, and the index of its element.
        rms_error: root mean square of the errors.
        plain_error: the largest error of plain PyTorch.
        scale: the block of rows whose scale came closest to its limit.
    """

    name: str
    error: float
    budget: float
    rms_error: float
    plain_error: float
    where: tuple[int, ...]
    scale: Scale = Scale()

    @property
    def ok(self) -> bool:
        return self.error <= self.budget and self.scale.ok

    @property
    def share(self) -> float:
        """The error as a share of its budget: the worst of several comparisons is the one with the largest."""
        return max(self.error / max(self.budget, 1e-300), self.scale.share)

    def __str__(self) -> str:
        sign = "<=" if self.error <= self.budget else ">"
        largest = (
            f"{self.name}: max error {self.error:.3e} {sign} budget {self.budget:.3e} "
            f"(plain {self.plain_error:.3e}, rms {self.rms_error:.3e}), worst at {self.where}"
        )
        if self.scale.ok:
            return largest
        return f"{largest}; scale off by {self.scale.error:+.3e} > {self.scale.budget:.3e} in {self.scale.where}"


def _worst(error: Tensor) -> tuple[float, tuple[int, ...]]:
    if error.numel() == 0:
        return 0.0, ()
    flat, where = int(error.argmax()), []
    worst = float(error.flatten()[flat])
    for size in reversed(error.shape):
        flat, i = divmod(flat, size)
        where.append(i)
    return worst, tuple(reversed(where))


def compare(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    plain: Tensor,
    factor: float = OUT_FACTOR,
    floor: float | Tensor = 0.0,
    block_rows: int = BLOCK_ROWS,
) -> Comparison:
    """Compare with the float64 oracle: the largest error and the scale of each block of rows.

    Args:
        actual: the result under test, in its own dtype: (..., rows, heads, dim), (rows, dim) or one vector.
        oracle: float64, same shape.
        plain: dense PyTorch in `actual`'s dtype, same shape; for float64, which has no oracle above it, in float32,
            and its error is scaled down by the ratio of the two roundings.
        factor: multiplies plain PyTorch's error. A factor larger than onepass has, which peers get, widens the bar of
            the scale, too.
        floor: what rounding alone may do where terms cancel (`rounding_terms` times the accumulation's epsilon), for
            each element or for all.
        block_rows: rows of a block whose scale is judged; fewer where rows are a sample of many.
    Returns: Comparison. Its `ok` is False, too, where NaN or inf stand at other elements than the oracle's.

    Raises: AssertionError if the shapes differ.
    """
    if actual.shape != oracle.shape:
        raise AssertionError(f"{name}: expected shape {tuple(oracle.shape)}, got {tuple(actual.shape)}")
    eps = torch.finfo(actual.dtype).eps
    scale = eps / torch.finfo(plain.dtype).eps if actual.dtype == torch.float64 else 1.0
    step = torch.finfo(actual.dtype).smallest_normal * eps
    bar = SCALE_BARS[actual.dtype] * max(1.0, factor / GRADIENT_FACTOR)
    actual, oracle, plain = (x.detach().double().cpu() for x in (actual, oracle, plain))
    floors = torch.as_tensor(floor, dtype=torch.float64).detach().cpu()
    both_special = ~oracle.isfinite() & ((actual == oracle) | (actual.isnan() & oracle.isnan()))
    error = torch.where(both_special, 0.0, (actual - oracle).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)
    finite = oracle.isfinite()
    largest = float(oracle[finite].abs().max()) if finite.any() else 0.0
    plain_errors = torch.where(finite & plain.isfinite(), scale * (plain - oracle).abs(), 0.0)
    plain_error = float(plain_errors.max()) if plain_errors.numel() else 0.0
    worst, where = _worst(error)
    rms = float(error.square().mean().sqrt()) if error.numel() else 0.0
    budget = factor * plain_error + eps * largest + (float(floors.max()) if floors.numel() else 0.0)
    # an error that is no number fails the test of the largest error
    known = finite & error.isfinite()
    values = torch.where(known, oracle, 0.0)
    # independent errors: those of plain PyTorch, and a whole unit for the rounding, which is four times its deviation
    deviation = plain_errors + eps * values.abs()
    # values below the distance of a dtype's numbers around 0 may be lost
    lost = values.abs().clamp(max=step)
    off = worst_scale(torch.where(known, actual - oracle, 0.0), values, deviation, floors, lost, bar, block_rows)
    return Comparison(name, worst, budget, rms, plain_error, where, off)


def worst_scale(
    error: Tensor,
    oracle: Tensor,
    deviation: Tensor,
    floor: Tensor,
    lost: Tensor,
    bar: float,
    block_rows: int = BLOCK_ROWS,
) -> Scale:
    """The block of rows whose projection on the oracle differs most from 1, as a share of its budget.

    Blocks are block_rows rows of one head (the last one up to twice as many), then all rows of one head, then the whole
    tensor: larger blocks find smaller faults where values are few.

    Noise is the deviation of the projection for errors that do not depend on one another. It is large by itself where a
    block has no values by which a projection could be judged (terms cancel, few elements).

    Args:
        error: actual - oracle, float64 like all others, (..., rows, heads, dim), (rows, dim) or one vector.
        oracle: same shape.
        deviation: the deviation of the error of each element, independent of all others.
        floor: the deviation of an error that may hit all elements of a row alike; broadcast to the same shape.
        lost: what may be missing from each element, in all of them alike.
        bar: by how much every block may be off in addition to its noise.
    """
    if not oracle.numel() or not (unit := float(oracle.abs().max())):
        return Scale()
    # in units of the largest value, so that no square leaves float64; a block 1e-100 below it has nothing to project on
    scaled = [_as_rows(x.expand(oracle.shape) / unit) for x in (error, oracle, deviation, floor, lost)]
    error, oracle, deviation, floor, lost = scaled
    row_sums = [
        (error * oracle).sum(-1),
        oracle.square().sum(-1),
        (deviation * oracle).square().sum(-1) + (floor * oracle.abs()).sum(-1).square(),
        (lost * oracle.abs()).sum(-1),
    ]
    _, rows, heads = row_sums[0].shape
    # the rows that would be a short last block belong to the one before
    block_of_row = (torch.arange(rows) // block_rows).clamp(max=max(rows // block_rows - 1, 0))
    blocks = [x.new_zeros(len(x), int(block_of_row[-1]) + 1, heads).index_add(1, block_of_row, x) for x in row_sums]
    levels = [blocks, [x.sum((0, 1), keepdim=True) for x in blocks], [x.sum().view(1, 1, 1) for x in blocks]]

    found = Scale()
    for sums in levels:
        along, squares, noise, lost = sums
        unjudged = squares == 0
        squares = squares.masked_fill(unjudged, 1.0)
        off = (along / squares).masked_fill(unjudged, 0.0)
        allowed = bar + (noise.sqrt() + lost) / squares
        _, (entry, block, head) = _worst(off.abs() / allowed)
        scale = Scale(float(off[entry, block, head]), float(allowed[entry, block, head]))
        if scale.share >= found.share:
            block_indices = (block_of_row == block).nonzero().flatten()
            words = [f"entry {entry}"] if sums is blocks and len(blocks[0]) > 1 else []
            words += [f"rows {int(block_indices[0])} to {int(block_indices[-1])}" if sums is blocks else "all rows"]
            words += [f"head {head}" if off.shape[2] == heads else "all heads"]
            found = scale._replace(where=", ".join(words))
    return found


def _as_rows(x: Tensor) -> Tensor:
    """A tensor of any shape that `compare` takes as (entries, rows, heads, dim)."""
    if x.dim() < 2:
        return x.reshape(1, 1, 1, -1)
    if x.dim() == 2:
        return x[None, :, None]
    return x.reshape(-1, *x.shape[-3:])


class FP8Budget(NamedTuple):
    """The float64 oracle of an FP8 call, and how far each element of out and lse may be off.

    Attributes:
        oracle: attention of the dequantized tensors.
        out, lse: the largest errors, with the shapes of the oracle's out and lse.
        row_floor: the deviation of each row's product with the oracle, with the shape of lse.
        lost: what sums of the scores may lose of each element of out, all in one direction, with the shape of out.
    """

    oracle: reference.Reference
    out: Tensor
    lse: Tensor
    row_floor: Tensor
    lost: Tensor

    def scale(self, out: Tensor) -> Scale:
        """The block of rows of a result that is worst in scale, judged as in `compare`."""
        oracle, lost, row_floor = (x.cpu() for x in (self.oracle.out, self.lost, self.row_floor))
        # a floor of each element whose product with the oracle is the row's
        sizes = oracle.abs().sum(-1)
        floor = (row_floor.mT / sizes.where(sizes > 0, torch.inf))[..., None]
        rounding = torch.finfo(out.dtype).eps * oracle.abs()
        return worst_scale(out.double().cpu() - oracle, oracle, rounding, floor, lost, FP8_SCALE_BAR)


# An FP8 tensor core sums 32 products and the accumulator, and cuts all of them off below this share of the largest.
FP8_STEP = 32
FP8_CUT = 2.0**-12
# Each row's largest probabilities make most of its noise, and a block may be a single row with a single one.
FP8_DEVIATIONS = 4.0
# By how much a block of rows may be off in scale in addition to its noise: sums of P V in two levels lose up to 0.35 %.
FP8_SCALE_BAR = 1e-2
# The least and the largest quotient of a P that is computed by integers (p_codes of ForwardConfigSm90) and the exact P.
# The code u of P = 2^k (1 + m / 8) stands for all P with 8 log2(P) + 0.035 from u to u + 1.
P_OF_CODES = 2 ** -((1 - 0.035) / 8), max((1 + m / 8) / 2 ** ((m - 0.035) / 8) for m in range(8))
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
    p_codes: bool = False,
    **options: Any,
) -> FP8Budget:
    """The budget of an FP8 call: what rounding P to e4m3 does, and with short_sums what tensor cores of Hopper add.

    A probability is rounded by at most 2^-4 of itself, or below e4m3's normal numbers by 2^-10 where its row's largest
    is 2^p_exponent, both before its product with v. (The running row max that P refers to is at most the final one.)
    With v_scale, P is multiplied with it, too, and then with v / v_scale.

    P by integers: each P has a factor between the two of `P_OF_CODES`, a and b, and in the sum of the row as well. So
    with weights f p, and with any constant c, out is off by sum((f - c) p (v - out)) / sum(f p). For c in the middle
    this is at most (b - a) / (2 a) times sum(p |v - out|). In the sum of the row, p of less than 2^-14 has up to
    2^-13 of error. lse is off by log(b) or -log(a), if all keys have the same factor.

    Short sums: for e4m3 operands these tensor cores align 32 products and the accumulator with the largest of them and
    cut what is more than 13 bits below (MMA-Sim, arXiv:2511.10909; see tensor_cores.py). So each step of 32 columns
    loses what its products have below 2^-12 of the largest (a bit more, since the descales are no powers of two), and
    as much again of the accumulator. A row's lse moves by the mean of what its scores move by, weighted by its
    probabilities. P V is summed over the keys of one step only (`two_level_sums`). It loses up to 0.03 percent by the
    same rule (128 keys, V of mean 1), and has no term but the 2^-4 of the rounding of P.

    Args:
        q, k, v: dequantized, dense, with the columns of q and k in the order in which they are summed.
        v_scale: the scale of each row of v that the kernel has in P: (batch, seqlen_k, num_heads_kv, 1) or ().
        p_exponent: see above.
        p_codes: whether P is computed by integers.
        options: the options of `attention`.
    """
    oracle = reference.attention(q, k, v, **options)
    batch, seqlen_k, heads_kv, head_dim = k.shape
    identity = torch.eye(seqlen_k, dtype=torch.float64, device=k.device)
    # the probabilities: attention with the identity for v
    p = reference.attention(q, k, identity[None, :, None].expand(batch, -1, heads_kv, -1), **options).out.transpose(
        1, 2
    )
    group = q.shape[2] // max(1, heads_kv)
    v = v.double().repeat_interleave(group, 2).transpose(1, 2)
    with_out, v = oracle.out.transpose(1, 2) @ v.mT, v.abs()  # (.., seqlen_q, keys)
    scale = torch.ones(1, dtype=torch.float64, device=v.device) if v_scale is None else v_scale.double()
    scale = scale.expand(batch, seqlen_k, heads_kv, 1).repeat_interleave(group, 2).transpose(1, 2)  # (.., keys, 1)
    smallest = (p * scale.mT).amax(-1, keepdim=True) * 2.0 ** (-10 - p_exponent)
    lse = torch.zeros_like(oracle.lse)
    relative, of_smallest = 2.0**-4, (v / scale).sum(2, keepdim=True).amax(-1, keepdim=True)
    error = (p * relative) @ v + smallest * of_smallest
    if p_codes:
        out, (least, largest) = oracle.out.transpose(1, 2), P_OF_CODES
        relative = (largest - least) / 2
        in_sum = smallest / 8 * (1 / scale).sum(2, keepdim=True)
        error = (relative * (p @ v + out.abs()) + smallest * 1.125 * of_smallest + in_sum * out.abs()) / least
        with_out = with_out - out.square().sum(-1, keepdim=True)
        lse = lse - math.log(least) + in_sum[..., 0] / least
    lost = torch.zeros_like(error)
    # each rounding of P is uniform in its bounds: a root of 3 below them
    step = (p * relative).maximum(smallest / scale.mT)
    row_floor = FP8_DEVIATIONS * 3**-0.5 * (step * with_out).square().sum(-1).sqrt()
    if short_sums:
        softmax_scale = abs(options.get("softmax_scale") or head_dim**-0.5)
        cut = softmax_scale * _cut_scores(q, k.repeat_interleave(group, 2))
        moved = (p * cut).sum(-1)
        lse = lse + moved
        lost = (p * (cut + moved[..., None])) @ v
        error = error + lost
    rounding = torch.finfo(out_dtype).eps * oracle.out.abs() + 1e-5 * (v.amax() if v.numel() else 1.0)
    return FP8Budget(
        oracle, 1.01 * error.transpose(1, 2) + rounding, 1.01 * lse + FP32_LSE, row_floor, lost.transpose(1, 2)
    )


def _cut_scores(q: Tensor, k: Tensor) -> Tensor:
    """How much of q.k tensor cores may truncate, (batch, heads, seqlen_q, seqlen_k)."""
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


def compare_gradients(
    name: str, actual: Tensor, oracle: Tensor, plain: Tensor, floor: float | Tensor = 0.0
) -> Comparison:
    """`compare` with the gradients' factor."""
    return compare(name, actual, oracle, plain, GRADIENT_FACTOR, floor)


def compare_lse(actual: Tensor, oracle: Tensor) -> Comparison:
    """Compare lse, which may be off by 1e-4 + 1e-5 |lse| (1e-11 + 1e-12 |lse| in float64) and has the oracle's -inf."""
    absolute, relative = (1e-11, 1e-12) if actual.dtype == torch.float64 else (1e-4, 1e-5)
    actual, oracle = actual.detach().double().cpu(), oracle.detach().double().cpu()
    both_special = ~oracle.isfinite() & ((actual == oracle) | (actual.isnan() & oracle.isnan()))
    allowed = absolute + relative * oracle.abs().nan_to_num(0.0, 0.0, 0.0)
    error = torch.where(both_special, 0.0, (actual - oracle).abs()).nan_to_num(torch.inf, torch.inf, torch.inf)
    share, where = _worst(error / allowed)
    rms = float(error.square().mean().sqrt()) if error.numel() else 0.0
    # in units of each element's tolerance
    return Comparison("lse (share of its tolerance)", share, 1.0, rms, 0.0, where)
