"""The cases of context_parallel.py."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

from onepass.bench.flops import flops_of_pairs
from onepass.distributed.layout import Run, visible_pairs
from onepass.problem import Mask

KINDS = ("causal", "full", "packed", "window")
HEADS = ((64, 8), (32, 32))
DIRECTIONS = ("fwd", "fwd+bwd")
TOKENS_OF_WINDOWS = 65536  # of all ranks
SHORTEST, LONGEST = 256, 16384  # packed documents


@dataclass(frozen=True)
class ContextCase:
    """Self-attention over tokens that are spread over ranks.

    Attributes:
        kind: "causal", "full", "packed" (causal documents of log-uniform lengths) or "window" (causal).
        tokens: the number of tokens of all ranks.
        window: keys that a query sees, where kind is "window".
    """

    kind: str
    heads_q: int
    heads_kv: int
    tokens: int
    direction: str
    head_dim: int = 128
    window: int = 4096
    document_lengths: tuple[int, int] = (SHORTEST, LONGEST)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.heads_q}/{self.heads_kv} s{self.tokens} {self.direction}"

    @property
    def has_backward(self) -> bool:
        return self.direction != "fwd"

    @property
    def mask_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"causal": self.kind != "full"}
        return options | ({"window": (self.window - 1, 0)} if self.kind == "window" else {})

    @property
    def offsets(self) -> list[int]:
        """Where documents begin, and the number of tokens. Equal in every process."""
        if self.kind != "packed":
            return [0, self.tokens]
        generator, offsets = random.Random(0), [0]
        low, high = (math.log(length) for length in self.document_lengths)
        while offsets[-1] < self.tokens:
            length = round(math.exp(generator.uniform(low, high)))
            offsets.append(min(self.tokens, offsets[-1] + length))
        return offsets

    @property
    def flops(self) -> int:
        mask = Mask.from_options(self.mask_options["causal"], self.mask_options.get("window"))
        pairs = visible_pairs(Run(0, self.tokens), self.offsets, mask) * self.heads_q
        directions = ("fwd", "bwd") if self.has_backward else ("fwd",)
        return sum(flops_of_pairs(pairs, direction, self.head_dim, self.head_dim) for direction in directions)


def cases(num_ranks: int) -> list[ContextCase]:
    """The cases on GPUs, with 8k and 16k tokens a rank."""
    found = []
    for kind, (heads_q, heads_kv) in itertools.product(KINDS, HEADS):
        sizes = [TOKENS_OF_WINDOWS] if kind == "window" else [8192 * num_ranks, 16384 * num_ranks]
        found += [ContextCase(kind, heads_q, heads_kv, *what) for what in itertools.product(sizes, DIRECTIONS)]
    return found


def smoke_cases(num_ranks: int) -> list[ContextCase]:
    """Cases that a CPU computes at once; the tokens of the last case do not divide evenly among the ranks."""
    heads = (8, 2), (4, 4), (8, 2), (4, 4)
    tokens = [48 * num_ranks] * 3 + [48 * num_ranks + 1]
    return [
        ContextCase(kind, *of_case, size, direction, 16, window=24, document_lengths=(4, 60))
        for kind, of_case, size, direction in zip(KINDS, heads, tokens, ("fwd+bwd", "fwd") * 2, strict=True)
    ]
