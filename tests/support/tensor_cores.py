"""A model in torch of how Hopper's tensor cores sum products of e4m3 numbers, for tests and docs/kernels/fp8.md."""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 32  # products of one instruction
KEPT_BITS = 13  # below the largest one's first


def e4m3_matmul(a: Tensor, b: Tensor, sum_length: int | None = None) -> Tensor:
    """a @ b as the FP8 tensor cores of Hopper compute it.

    Each instruction takes 32 products and the sum so far, aligns all 33 with the largest of them, truncates what lies
    more than 13 bits below the first bit of the largest (towards zero) and adds the rest exactly. So a sum of many
    products of one sign loses more of each new product the larger it has become, and stops growing in the end.

    Args:
        a: (rows, n) values of e4m3, in any floating-point dtype.
        b: (n, columns) values of e4m3, in any floating-point dtype.
        sum_length: the number of products that one accumulator gets, a multiple of 32; the sums of several
            accumulators are added in float64. None means one accumulator for all products.

    Returns: (rows, columns) float64.

    Source: MMA-Sim, arXiv:2511.10909, which found the rule by experiments. An H200 agrees to 4 digits
    (docs/kernels/fp8.md).
    """
    a, b = a.double(), b.double()
    n = a.shape[1]
    result = a.new_zeros(a.shape[0], b.shape[1])
    for start in range(0, n, sum_length or max(n, 1)):
        end = min(n, start + (sum_length or n))
        total = torch.zeros_like(result)
        for i in range(start, end, STEP):
            products = a[:, i : min(i + STEP, end), None] * b[None, i : min(i + STEP, end)]
            largest = torch.maximum(products.abs().amax(1), total.abs())
            unit = torch.exp2(torch.frexp(largest)[1].double() - 1 - KEPT_BITS)
            total = (total / unit).trunc() * unit + ((products / unit[:, None]).trunc() * unit[:, None]).sum(1)
        result += total
    return result
