"""The rotation of Q and K: random signs and a Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, seed: int) -> Tensor:
    """x M along the last dimension, with M = diag(signs) H and an orthogonal H of Hadamard blocks.

    The sizes of the blocks are the powers of two that head_dim is the sum of, the largest first. The fast transform
    takes head_dim log2(head_dim) additions per row. M is the same on every device.
    """
    x = x * signs(x.shape[-1], seed, x.device)
    sizes = [2**i for i in reversed(range(x.shape[-1].bit_length())) if x.shape[-1] & 2**i]
    return torch.cat([_hadamard(piece) for piece in x.split(sizes, -1)], -1)


def signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """(head_dim,) float32 of 1 and -1: bits of a hash (splitmix64) of column and seed.

    In contrast to a random generator, the hash is the same on every device, and torch.compile can trace it.
    """
    x = torch.arange(1, head_dim + 1, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * _signed(factor)
    return 1.0 - 2.0 * (x >> 63 & 1).float()  # without float() the difference would have the default dtype


def _signed(word: int) -> int:
    """A word of 64 bits as a signed integer, as torch stores it."""
    return word - 2**64 if word >= 2**63 else word


def _hadamard(x: Tensor) -> Tensor:
    """x H / sqrt(n) for the last dimension n, a power of two: H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    n, half = x.shape[-1], 1
    while half < n:
        a, b = x.unflatten(-1, (n // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x * n**-0.5
