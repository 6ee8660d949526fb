"""One attention layer of a Llama-3-8B shape, forward and backward, compared with torch's SDPA and the naive form.

The same layer with a window follows, as of Gemma or Mistral, where SDPA needs a mask and computes every pair.

Every result is compared with float64, computed for all query rows of some heads: float64 for all heads would take
longer than everything else.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass

from .. import reference
from ..bench.memory import peak_of
from ..testing import Comparison, compare, compare_gradients
from ..testing.machine import counted

GIB = 2**30
NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM = 32, 8, 128
GROUP = NUM_HEADS_Q // NUM_HEADS_KV
CHECKED_KV_HEADS = (0, NUM_HEADS_KV - 1)  # with their query heads: a quarter of the layer
WINDOW = 256  # keys that a query sees, its own included
MAX_NAIVE_BYTES = 8 * GIB
# The number of (num_heads_q, seqlen, seqlen) matrices that the naive form holds at once, in its backward:
# probabilities, their gradient and the gradient of the scores. It was measured at seqlen 1024 to 4096.
NAIVE_MATRICES = 3

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Report = Callable[[str], None]


class Inputs(NamedTuple):
    """q, k, v, (1, seqlen, num_heads, head_dim), and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, seqlen: int, device: torch.device) -> Inputs:
        """Normal values from a fixed seed; float32 on the CPU, bfloat16 on a GPU."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        generator = torch.Generator().manual_seed(0)
        heads = NUM_HEADS_Q, NUM_HEADS_KV, NUM_HEADS_KV, NUM_HEADS_Q
        tensors = (torch.randn(1, seqlen, n, HEAD_DIM, generator=generator).to(device, dtype) for n in heads)
        q, k, v, dout = tensors
        return cls(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


class Results(NamedTuple):
    """Output and gradients of one run, or of the checked heads of one run."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    def select_kv_heads(self, kv_heads: tuple[int, ...]) -> Results:
        """Only these kv heads and the query heads that they serve."""
        heads_q = [GROUP * g + i for g in kv_heads for i in range(GROUP)]
        heads_kv = list(kv_heads)
        return Results(
            self.out[:, :, heads_q], self.dq[:, :, heads_q], self.dk[:, :, heads_kv], self.dv[:, :, heads_kv]
        )


@dataclass
class Row:
    """The figures of one contender, which the table shows.

    Attributes:
        peak_extra_bytes: memory taken beyond the inputs by one forward and backward, its results included.
        errors: largest difference from float64 in out, dq, dk, dv of the checked heads.
        within_budget: whether all errors are within their budgets; see `testing.budget`.
        note: why there are no figures, if there are none.
    """

    name: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_extra_bytes: int | None = None
    errors: dict[str, float] = field(default_factory=dict)
    within_budget: bool | None = None
    note: str = ""

    @property
    def total_ms(self) -> float:
        """Forward and backward, of a row that was timed."""
        assert self.forward_ms is not None
        assert self.backward_ms is not None
        return self.forward_ms + self.backward_ms


@dataclass
class LayerReport:
    """The measurements, and their conditions.

    Attributes:
        results_bytes: size of out, dq, dk and dv, which every contender has to hold.
        load_average: processes that wanted a core in the minute before, on Linux and macOS; else 0.
        repeats: timed runs of each contender; the best one counts.
        budget: errors that onepass is allowed: 2 times (gradients: 3 times) that of dense PyTorch in the same dtype
            plus one rounding of the largest value.
        window_rows, window_budget: of the layer with a window.
    """

    device: str
    dtype: str
    seqlen: int
    checked_kv_heads: tuple[int, ...]
    results_bytes: int
    load_average: float
    repeats: int = 0
    rows: list[Row] = field(default_factory=list)
    budget: dict[str, float] = field(default_factory=dict)
    window_rows: list[Row] = field(default_factory=list)
    window_budget: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether onepass ran and is within the budget. The others are there to compare with."""
        mine = [row for row in (*self.rows, *self.window_rows) if row.name == "onepass"]
        return bool(mine) and all(row.within_budget for row in mine)

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes leave no core free: a tiled GEMM, which waits for several threads, suffers most."""
        return self.load_average >= (os.cpu_count() or 1)

    def as_dict(self) -> dict:
        return asdict(self) | {"ok": self.ok}


def with_onepass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return onepass.attention(q, k, v, causal=True)


def with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook form: all scores of all heads in memory at once."""
    k, v = (x.repeat_interleave(GROUP, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = (q * HEAD_DIM**-0.5) @ k.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def window_with_onepass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return onepass.attention(q, k, v, causal=True, window=(WINDOW - 1, None))


def window_with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = window_mask(q.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@functools.lru_cache(maxsize=1)
def window_mask(seqlen: int, device: torch.device) -> Tensor:
    """The pairs of the window, made once for all layers of a model."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril().triu(1 - WINDOW)


CONTENDERS: dict[str, Attention] = {"onepass": with_onepass, "torch SDPA": with_sdpa, "naive": naive}
WINDOW_CONTENDERS: dict[str, Attention] = {"onepass": window_with_onepass, "torch SDPA": window_with_sdpa}


def naive_bytes(seqlen: int, itemsize: int) -> int:
    """The bytes that the naive form needs beyond its inputs."""
    return NAIVE_MATRICES * NUM_HEADS_Q * seqlen * seqlen * itemsize


def choose_seqlen(device: torch.device, target_s: float) -> int:
    """The length at which forward and backward take about `target_s` here, from the time of a short run.

    The work grows with the square of the length. The length is rounded down to a multiple of 256, within limits that
    keep a very slow or very fast machine at a size that shows something.
    """
    probe, low, high = (1024, 512, 8192) if device.type == "cpu" else (4096, 2048, 32768)
    inputs = Inputs.random(probe, device)
    seconds = min(sum(timed(with_onepass, inputs, device)[1]) for _ in range(3))
    seqlen = int(probe * (target_s / seconds) ** 0.5)
    return min(max(seqlen // 256 * 256, low), high)


def timed(attention: Attention, inputs: Inputs, device: torch.device) -> tuple[Results, tuple[float, float]]:
    """One forward and backward: results, and the seconds that each of the two took."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    out = attention(*inputs[:3])
    middle = now()
    gradients = torch.autograd.grad(out, inputs[:3], inputs.dout)
    return Results(out.detach(), *gradients), (middle - start, now() - middle)


def dense(
    inputs: Inputs,
    kv_heads: tuple[int, ...],
    compute_dtype: torch.dtype,
    tile_m: int = 256,
    window: tuple[int, None] | None = None,
) -> Results:
    """`reference.attention` and its gradients for some heads, in blocks of query rows so that it fits into memory.

    Masks are aligned at the bottom right, so a causal mask over queries [m, m_end) and keys [n, m_end) is right.
    Gradients of k and v are summed over the blocks in float32 at least.
    """
    q, k, v, dout = inputs
    accum_dtype = torch.promote_types(compute_dtype, torch.float32)
    results = []
    for g in kv_heads:
        heads = slice(g * GROUP, (g + 1) * GROUP)
        k_g, v_g = (x[:, :, g : g + 1].detach().to(compute_dtype) for x in (k, v))
        dk, dv = (torch.zeros_like(x, dtype=accum_dtype) for x in (k_g, v_g))
        outs, dqs = [], []
        for m in range(0, q.shape[1], tile_m):
            m_end = min(m + tile_m, q.shape[1])
            keys = slice(0 if window is None else max(0, m - window[0]), m_end)
            block = [q[:, m:m_end, heads].detach().to(compute_dtype), k_g[:, keys], v_g[:, keys]]
            block = [x.requires_grad_() for x in block]
            out = reference.attention(*block, causal=True, window=window, compute_dtype=compute_dtype).out
            dq, dk_block, dv_block = torch.autograd.grad(out, block, dout[:, m:m_end, heads].to(compute_dtype))
            outs.append(out.detach())
            dqs.append(dq)
            dk[:, keys] += dk_block
            dv[:, keys] += dv_block
        results.append((torch.cat(outs, 1), torch.cat(dqs, 1), dk.to(compute_dtype), dv.to(compute_dtype)))
    return Results(*(torch.cat(tensors, 2) for tensors in zip(*results, strict=True)))


def check(actual: Results, oracle: Results, plain: Results) -> list[Comparison]:
    """Compare each result with float64, under the budget that plain PyTorch in the same dtype sets."""
    rows = [compare("out", actual.out, oracle.out, plain.out)]
    for name in ("dq", "dk", "dv"):
        rows.append(compare_gradients(name, getattr(actual, name), getattr(oracle, name), getattr(plain, name)))
    return rows


def available_bytes(device: torch.device) -> int:
    """The memory that can be taken now: the GPU's, or that of this machine or its container, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    available = psutil.virtual_memory().available
    try:  # a container's limit (cgroup v2); "max" or no such file: no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):
        return available
    return min(available, limit - used)


def num_steps(repeats: int) -> int:
    """How often `measure` reports a step."""
    return 2 + (len(CONTENDERS) + len(WINDOW_CONTENDERS)) * (1 + repeats)


def measure(
    report: LayerReport,
    inputs: Inputs,
    device: torch.device,
    repeats: int,
    step: Report,
    max_naive_bytes: int | None = None,
    timing_limit_s: float = 20.0,
) -> None:
    """Fill `report.rows` and `report.window_rows`, one contender after the other.

    An interruption leaves the rows before it. Each contender first runs once to be checked and for its memory, then
    `repeats` times for its time, in turns with the others so that a disturbance hits all of them. The best time counts.

    Args:
        step: called with the name of what comes next.
        max_naive_bytes: the naive form, and SDPA with a mask on a GPU, are left out if they need more; None means half
            of what is free, at most 8 GiB.
        timing_limit_s: no new round of timing starts after so many seconds; a busy machine gets fewer, at least one.
    """
    if max_naive_bytes is None:
        max_naive_bytes = min(MAX_NAIVE_BYTES, available_bytes(device) // 2)
    needed_bytes = naive_bytes(report.seqlen, inputs.q.element_size())
    running = []
    for window, contenders, rows, budget, words in (
        (None, CONTENDERS, report.rows, report.budget, ""),
        ((WINDOW - 1, None), WINDOW_CONTENDERS, report.window_rows, report.window_budget, " with a window"),
    ):
        step(f"float64 of the checked heads{words}")
        oracle, plain = (
            dense(inputs, report.checked_kv_heads, dtype, window=window) for dtype in (torch.float64, inputs.q.dtype)
        )
        for name, attention in contenders.items():
            step(f"{name}{words}: values and memory")
            row = Row(name)
            rows.append(row)
            # with a mask, SDPA on a GPU may have to take the naive form
            is_naive = name == "naive" or (window is not None and name != "onepass" and device.type == "cuda")
            if is_naive and needed_bytes > max_naive_bytes:
                row.note = f"would need {needed_bytes / GIB:.1f} GiB; {max_naive_bytes / GIB:.1f} GiB allowed here"
                continue
            (results, _), peak = peak_of(functools.partial(timed, attention, inputs, device), str(device))
            row.peak_extra_bytes = peak.extra_bytes
            comparisons = check(results.select_kv_heads(report.checked_kv_heads), oracle, plain)
            del results
            row.errors = {c.name: c.error for c in comparisons}
            row.within_budget = all(c.ok for c in comparisons)
            budget.update({c.name: c.budget for c in comparisons})
            running.append((row, attention, words))
    deadline = time.perf_counter() + timing_limit_s
    for i in range(repeats):
        if i and time.perf_counter() > deadline:
            break
        report.repeats = i + 1
        for row, attention, words in running:
            step(f"{row.name}{words}: time, run {i + 1} of {repeats}")
            _, (forward_s, backward_s) = timed(attention, inputs, device)
            row.forward_ms = min(1e3 * forward_s, row.forward_ms or float("inf"))
            row.backward_ms = min(1e3 * backward_s, row.backward_ms or float("inf"))


def prepare(device: torch.device, seqlen: int, checked_kv_heads: tuple[int, ...]) -> LayerReport:
    """A report of the conditions, without measurements."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    values = 2 * seqlen * HEAD_DIM * (NUM_HEADS_Q + NUM_HEADS_KV)  # out, dq and dk, dv
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    )
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    dtype_name = str(dtype).removeprefix("torch.")
    return LayerReport(name, dtype_name, seqlen, checked_kv_heads, values * dtype.itemsize, load_average)
