"""One pass of one problem on the GPU, with any configuration: random data, the launch, its results and its sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..kernels.config import LaunchConfig
from ..kernels.heuristics.tuned import Direction
from ..problem import AttentionInputs, AttentionProblem
from .timing import CudaSampler, Sampler, input_copies

MAX_COPIES = 4  # copies of the inputs hold memory besides the results of every configuration


class Launches:
    """The launches of one problem.

    Use them on a stream that is not the default one: calls are captured.
    """

    def __init__(self, direction: Direction, backend: str, problem: AttentionProblem, device: torch.device) -> None:
        self.direction, self.backend, self.problem, self.device = direction, backend, problem, device
        self._pool = torch.cuda.graph_pool_handle()
        copies = min(MAX_COPIES, input_copies(num_bytes(problem)))
        self._inputs = [random_inputs(problem, device, seed) for seed in range(copies)]
        self._contexts: Sequence[tuple[Any, ...]] = [()] * copies
        if direction == "bwd":
            forward = dispatch.prepare(backend, problem, device)
            self._contexts = [self._context_of_backward(forward, inputs) for inputs in self._inputs]

    def _context_of_backward(self, forward: backends.Forward, inputs: AttentionInputs) -> tuple[Any, ...]:
        """out and lse of a forward pass, a random dout, and no dlse."""
        out, lse = forward(inputs)
        return out, lse, torch.randn_like(out), None

    def _run(self, config: LaunchConfig) -> Callable[[int], tuple[Tensor, ...]]:
        """A function that launches with one of the copies of the inputs, by its index, and returns the results."""
        run: Callable[..., tuple[Tensor, ...]]
        if self.direction == "fwd":
            run = dispatch.prepare(self.backend, self.problem, self.device, config)
        else:
            module = dispatch.load_backward(self.backend, self.problem)
            run = module.prepare(self.problem, self.device, False, config)
        return lambda i: run(self._inputs[i], *self._contexts[i])

    def results(self, config: LaunchConfig) -> dict[str, Tensor]:
        """The results by name: out and lse, or the gradients of q, k and v."""
        names = ("out", "lse") if self.direction == "fwd" else ("dq", "dk", "dv")
        found = self._run(config)(0)
        torch.cuda.synchronize(self.device)
        return dict(zip(names, found, strict=False))

    def sampler(self, config: LaunchConfig) -> Sampler:
        run = self._run(config)
        return CudaSampler([lambda i=i: run(i) for i in range(len(self._inputs))], pool=self._pool)  # type: ignore[misc]


def num_bytes(problem: AttentionProblem) -> int:
    """The bytes of q, k and v."""
    sequences = 1 if problem.is_packed else problem.batch
    q = problem.seqlen_q * problem.num_heads_q * problem.head_dim
    kv = problem.seqlen_k * problem.num_heads_kv * (problem.head_dim + problem.head_dim_v)
    return problem.dtype.itemsize * sequences * (q + kv)


def random_inputs(problem: AttentionProblem, device: torch.device | str, seed: int = 0) -> AttentionInputs:
    """Tensors of a call of this problem: standard normal, and lengths of packed sequences that differ."""
    generator = torch.Generator(device).manual_seed(seed)
    batch = () if problem.is_packed else (problem.batch,)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(problem.dtype)

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lengths_k = (
        uneven_lengths(problem.seqlen_k, problem.batch) if problem.is_packed else [problem.seqlen_k] * problem.batch
    )
    return AttentionInputs(
        normal(*batch, problem.seqlen_q, problem.num_heads_q, problem.head_dim),
        normal(*batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        normal(*batch, problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v),
        normal(problem.num_heads_q) if problem.has_sinks else None,
        int32([0, *accumulate(uneven_lengths(problem.seqlen_q, problem.batch))]) if problem.is_packed else None,
        int32([0, *accumulate(lengths_k)]) if problem.is_packed else None,
        int32(lengths_k) if problem.has_seqused_k else None,
    )


def uneven_lengths(total: int, count: int) -> list[int]:
    """`count` lengths that sum to `total`, from half their mean to one and a half times it, in a scattered order."""
    weights = [0.5 + (i * 0.618034) % 1 for i in range(count)]
    ends = [round(total * end / sum(weights)) for end in accumulate(weights)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def difference(results: dict[str, Tensor], expected: dict[str, Tensor]) -> str | None:
    """Why the results differ by more than another configuration of the same problem may cause; None if they do not.

    Only roundings may differ: the elements of a row by 4 units of the row's largest element (by 64 in float32, whose
    sums are as coarse as its results), and lse, which is float32, by 1e-4 + 1e-5 |lse|.
    """
    for name, tensor in results.items():
        reference = expected[name]
        if tensor.shape != reference.shape or tensor.dtype != reference.dtype:
            return f"{name}: {tuple(tensor.shape)} {tensor.dtype}, not {tuple(reference.shape)} {reference.dtype}"
        a, b = tensor.float(), reference.float()
        if name == "lse":
            allowed = 1e-4 + 1e-5 * b.abs().nan_to_num(0, 0, 0)
        else:
            units = 4 if tensor.dtype.itemsize == 2 else 64
            allowed = units * torch.finfo(tensor.dtype).eps * b.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        error = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs()).nan_to_num(math.inf, math.inf)
        share = float((error / (allowed + torch.finfo(torch.float32).tiny)).max()) if error.numel() else 0.0
        if not share <= 1:
            return f"{name}: differs from the heuristics' by {float(error.max()):.3g}, {share:.3g} of what it may"
    return None
