"""Shared by the GPU tests: where they run, cases as values, calls made harder, and the check of their results.

    python -m pytest -m gpu tests/gpu                               on a Hopper GPU
    ONEPASS_TEST_BACKEND=sm80 python -m pytest -m gpu tests/gpu     the Ampere kernels, on any GPU that has them
    ONEPASS_TEST_DEVICE=cpu python -m pytest -m gpu tests/gpu       the same tests of the tiled backend, smaller

The last command needs no GPU. It is for work on the tests: they can be seen to pass, and to fail when a fault is
planted.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from random_calls import fenced, random_call
from torch import Tensor

import onepass
from onepass.dispatch import backends
from onepass.testing.budget import compare
from onepass.testing.inputs import Call

DEVICE = os.environ.get("ONEPASS_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
BACKEND = os.environ.get("ONEPASS_TEST_BACKEND", "sm90") if ON_GPU else "tiled"
if BACKEND == "sm80":
    backends.WITH_KERNELS = ("sm80",)  # the choice of a GPU before Hopper
IS_READY = not ON_GPU or (
    torch.cuda.is_available()
    and (
        torch.cuda.get_device_capability() == (9, 0)
        if BACKEND == "sm90"
        else torch.cuda.get_device_capability() >= (8, 0)
    )
)
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason=f"needs a GPU for {BACKEND}")]

BF16, FP16 = torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (37, 21)},
    "left": {"window": (100, None)},
    "right": {"window": (None, 40)},
    "causal window": {"causal": True, "window": (70, None)},
    "keys before": {"window": (None, -50)},
    "keys behind": {"window": (-50, None)},
    "some keys before": {"window": (100, -20)},
    "some keys behind": {"window": (-20, 100)},
}


def size(on_gpu: int, on_cpu: int) -> int:
    return on_gpu if ON_GPU else on_cpu


def lengths_tensor(values: Sequence[int], device: str = DEVICE) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths: Iterable[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


# ---------------------------------------------------------------- calls


class GpuCall(Call):
    """A call that is made harder without changing its answer.

    Everything that no kernel may read is NaN during the call: keys past `seqused_k` and before `seqstart_k`, rows past
    the last packed sequence, the fences around every tensor, and all memory that is allocated without values, outputs
    included.
    """

    def run(self, **extra: Any) -> onepass.AttentionOutput:
        # autograd refuses a saved tensor that has been written to since
        is_training = any(t.requires_grad for t in self.tensors.values())
        with nan_in(() if is_training else self.unseen()), poisoned_memory():
            return super().run(deterministic=False, **extra)

    def unseen(self) -> Iterator[Tensor]:
        """The slices of q, k and v that the call may not read."""
        q, k, v = self.tensors.values()
        used, starts = self.options.get("seqused_k"), None
        if self.is_packed:
            starts = self.options["cu_seqlens_k"].tolist()
            yield q[int(self.options["cu_seqlens_q"][-1]) :]
            yield from (t[starts[-1] :] for t in (k, v))
        if used is not None:
            for b, n in enumerate(used.tolist()):
                yield from (t[b, n:] if starts is None else t[starts[b] + n : starts[b + 1]] for t in (k, v))
        for b, n in enumerate(self.options["seqstart_k"].tolist() if "seqstart_k" in self.options else ()):
            yield from (t[b, :n] if starts is None else t[starts[b] : starts[b] + n] for t in (k, v))


@contextlib.contextmanager
def nan_in(views: Iterable[Tensor]) -> Iterator[None]:
    """Fill these views with NaN, and restore their values afterwards."""
    saved = [(view, view.clone()) for view in views]
    for view, _ in saved:
        view.fill_(NAN)
    yield
    for view, values in saved:
        view.copy_(values)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Make torch.empty and its kin return NaN (the largest integer), as torch documents for its deterministic mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a deterministic form warn
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """On a GPU, raise where the host waits for the device."""
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Case:
    """A call without its data. Tuples of lengths are packed sequences; `used` is seqused_k."""

    seqlen_q: int | tuple[int, ...]
    seqlen_k: int | tuple[int, ...]
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 64
    head_dim_v: int | None = None
    dtype: torch.dtype = BF16
    batch: int = 1
    used: tuple[int, ...] | None = None
    slack: int = 0  # rows that belong to no sequence
    sinks: bool = False
    scale: float = 1.0  # multiplies the values of q
    options: dict = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        def lengths(n):
            return str(n) if isinstance(n, int) or len(n) < 5 else f"{len(n)} of {sum(n)}"

        words = [
            f"q {lengths(self.seqlen_q)} k {lengths(self.seqlen_k)}",
            f"b{self.batch}",
            "h{}:{}".format(*self.heads),
        ]
        words += [f"d{self.head_dim}" + ("" if self.head_dim_v is None else f":{self.head_dim_v}")]
        words += ["fp16"] if self.dtype == FP16 else []
        words += [f"used {lengths(self.used)}"] if self.used is not None else []
        words += [f"slack {self.slack}"] if self.slack else []
        words += ["sinks"] if self.sinks else []
        words += [f"times {self.scale:g}"] if self.scale != 1.0 else []
        return " ".join(words + [f"{name}={value}" for name, value in self.options.items()])

    def call(self, device: str = DEVICE) -> GpuCall:
        generator = torch.Generator().manual_seed(0)
        options = dict(self.options)
        leading_q, leading_k = (self.batch, self.seqlen_q), (self.batch, self.seqlen_k)
        if isinstance(self.seqlen_q, tuple):
            options["cu_seqlens_q"] = lengths_tensor(offsets(self.seqlen_q), device)
            options["cu_seqlens_k"] = lengths_tensor(offsets(self.seqlen_k), device)
            leading_q, leading_k = (sum(self.seqlen_q) + self.slack,), (sum(self.seqlen_k) + self.slack,)
        if self.used is not None:
            options["seqused_k"] = lengths_tensor(self.used, device)
        if self.sinks:
            options["sinks"] = 2 * torch.randn(self.heads[0], generator=generator).to(device)

        def rows(leading: tuple[int, ...], heads: int, head_dim: int) -> Tensor:
            return fenced((*leading, heads, head_dim), self.dtype, device, generator)

        q = rows(leading_q, self.heads[0], self.head_dim)
        k = rows(leading_k, self.heads[1], self.head_dim)
        v = rows(leading_k, self.heads[1], self.head_dim_v or self.head_dim)
        return GpuCall({"q": q.mul_(self.scale), "k": k, "v": v}, options)

    def tensors(self) -> dict[str, Tensor]:
        return self.call().tensors


def case(seqlen_q, seqlen_k, *, options: dict | None = None, **fields: Any) -> Case:
    """Make a Case; keywords that it has no field for become options of the call."""
    known = {name: fields.pop(name) for name in list(fields) if name in Case.__dataclass_fields__}
    return Case(seqlen_q, seqlen_k, **known, options={**(options or {}), **fields})


@dataclass(frozen=True)
class RandomCase:
    """A call of `random_call`."""

    seed: int
    dtype: torch.dtype | None = None
    max_seqlen: int = 160
    with_modifiers: bool = False

    def __str__(self) -> str:
        return f"seed {self.seed}{' with modifiers' if self.with_modifiers else ''}"

    def call(self, device: str = DEVICE) -> GpuCall:
        call = random_call(self.seed, device, self.max_seqlen, self.dtype, self.with_modifiers, for_kernels=True)
        return GpuCall(call.tensors, call.options, call.seed)


def cases(values: Iterable[Any], name: str = "case") -> pytest.MarkDecorator:
    """Parametrize a test by cases, whose kernels are compiled ahead of time."""
    return pytest.mark.parametrize(name, list(values), ids=str)


def check(call: Call, gradients: bool = False, with_floor: bool = False) -> None:
    """Assert that the backend under test takes the call, and that its results are within their error budgets."""
    assert_taken(call)
    call.check(gradients, with_floor)


def assert_taken(call: Call) -> None:
    """Assert that the call is supported and that the backend under test is chosen for it."""
    support = onepass.supports(**call.tensors, **call.options)
    assert support.ok, f"{call}: {support.reason}"
    assert support.backend == BACKEND, f"{call}: {support.reason}"


def run_as_user(call: Call) -> onepass.AttentionOutput:
    """Run the call as a user does: without NaN in unseen rows and without poisoned memory."""
    return Call(call.tensors, call.options).run()


def assert_rounded_alike(actual: Tensor, other: Tensor) -> None:
    """Two results of one computation, each of which is rounded to its dtype and adds up probabilities that are.

    Args: actual, other: (.., rows, heads, dim). Raises: AssertionError if one is off by more than both roundings.
    """
    row = compare("out", actual, other.double(), other, floor=torch.finfo(other.dtype).eps * other.abs().double())
    assert row.ok, str(row)


def bits(t: Tensor) -> Tensor:
    """View a tensor as integers, so that NaN equals NaN and 0 differs from -0."""
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def same_bits(a: Iterable[Tensor], b: Iterable[Tensor]) -> bool:
    """Compare two sequences of tensors, for example two pairs of (out, lse), bit for bit."""
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
