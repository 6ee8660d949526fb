"""What each choice of a kernel is worth: the default configuration is timed with others in which one choice is undone.

The setting and the forward's first rows come from Table 2 of FlashAttention-3, arXiv:2407.08608, section 4.2.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends
from ..errors import UnsupportedError
from ..kernels.config import HOPPER
from ..problem import AttentionInputs, AttentionProblem, Mask
from ..testing import results
from ..testing.machine import describe
from ..tuning.timing import Samples
from .cases import Case, Direction
from .peers import Attend, Contender, find_peers
from .rows import Options, new_row
from .run import side_stream, time_contenders, use_device

# Table 2 measures the forward without a mask in fp16.
PAPER_BATCH, PAPER_SEQLEN, PAPER_HEADS, PAPER_HEAD_DIM = 4, 8448, 16, 128
PAPER_CASE = Case.square(PAPER_SEQLEN, PAPER_HEADS, PAPER_HEAD_DIM, batch=PAPER_BATCH, dtype="float16")
FULL = "full configuration"


class PaperRow(NamedTuple):
    """A row of the paper's table, which measures the forward pass."""

    name: str
    tflops: float  # on an H100 SXM5


def _always(problem: AttentionProblem, config: Any) -> bool:
    return True


class Switch(NamedTuple):
    """One choice of a configuration that can be undone.

    Attributes:
        field: a field of the configuration. There is no row for a field that the configuration does not have (yet).
        off: the value without the choice. Values above it count as "on": True over False, 3 stages over 2.
        label: the name of the row.
        also: other fields that make no sense without the choice, and their values without it.
        matters: whether the choice changes anything for this problem and configuration.
    """

    field: str
    off: Any
    label: str
    also: Mapping[str, Any] = {}
    matters: Callable[[AttentionProblem, Any], bool] = _always
    paper: PaperRow | None = None


def _has_several_warpgroups(problem: AttentionProblem, config: Any) -> bool:
    return config.num_warpgroups > 1


def _has_growing_tiles(problem: AttentionProblem, config: Any) -> bool:
    return problem.mask.window_right is not None and problem.mask.window_left is None


def _has_background_rows(problem: AttentionProblem, config: Any) -> bool:
    return config.rows_in_background(problem)


FORWARD_SM90 = (
    Switch(
        "overlap_gemm_softmax",
        False,
        "no GEMM/softmax overlap in a warpgroup",
        {"overlap_tiles": False, "score_buffers": 1},
        paper=PaperRow("No GEMM-Softmax Pipelining, Warp-Specialization", 582.0),
    ),
    Switch(
        "warp_specialized",
        False,
        "no warp specialization",
        # a warp of the producer draws the tiles, and the other fields depend on loads that run ahead
        {"dynamic_tiles": False, "overlap_tiles": False, "cluster_size": 1, "score_buffers": 1},
        paper=PaperRow("GEMM-Softmax Pipelining, No Warp-Specialization", 570.0),
    ),
    Switch("pingpong", False, "no pingpong between warpgroups", matters=_has_several_warpgroups),
    Switch("overlap_tiles", False, "no overlap across tiles", {"score_buffers": 1}),
    Switch("score_buffers", 1, "2 stages instead of 3"),
    Switch("dynamic_tiles", False, "static order of tiles"),
    Switch("longest_first", False, "not the longest tiles first", matters=_has_growing_tiles),
    Switch("rescale_threshold", 0.0, "rescaling in every step"),
    Switch("q_stages", 1, "one buffer for Q"),
    Switch("num_stages", 2, "two buffers each for K and V"),
    Switch("v_stages", 0, "as many buffers for V as for K"),
    Switch("cluster_size", 1, "each thread block loads its own K and V"),
    Switch("pack_gqa", False, "each query head in tiles of its own"),
)
# Fields that choose a size have no "without".
_SIZES = frozenset({"tile_m", "tile_n", "num_warpgroups"})

BACKWARD_SM90 = (
    Switch("tile_m", 64, "query blocks of 64 rows"),
    Switch("pingpong", False, "no turns between warpgroups"),
    Switch(
        "dynamic_tiles",
        False,
        "static order of tiles, rows in kernels before and after",
        # the warp that draws tiles counts those that are done
        {"background_rows": False},
    ),
    Switch("longest_first", False, "not the longest tiles first", matters=_has_growing_tiles),
    Switch("q_stages", 2, "two buffers for Q"),
    Switch("do_stages", 1, "one buffer for dO"),
    Switch("background_rows", False, "rows in kernels before and after", matters=_has_background_rows),
    Switch("private_dq", False, "sums of dQ shared by all thread blocks"),
    Switch("by_gradient", False, "dK and dV in the same warpgroup"),
)


class Row(NamedTuple):
    """A configuration of the table.

    Attributes:
        changes: fields that differ from the full configuration.
        refusal: why the kernel does not take it; None if it does.
    """

    label: str
    config: Any
    changes: dict[str, Any]
    paper: PaperRow | None
    refusal: str | None


class Rows(NamedTuple):
    """The rows of the table, and for the label of each switch that has no row, the reason."""

    rows: list[Row]
    absent: dict[str, str]


class Step(NamedTuple):
    """A step on the road from a simple kernel to the full configuration.

    Attributes:
        changes: fields that differ from the step before.
        final: names of the fields that have the values of the full configuration from here on.
    """

    label: str
    changes: Mapping[str, Any]
    final: tuple[str, ...] = ()


# The road leads from the first kernel of a course to one that is tuned. Its last step, to the full configuration, adds
# lazy rescaling and the order of tiles.
ROAD_SM80 = (
    Step(
        "1 64 x 64 tiles, 4 warps, load and compute in turns",
        {
            "tile_m": 64,
            "tile_n": 64,
            "num_warps": 4,
            "num_stages": 1,
            "prefetch": False,
            "swizzle": False,
            "fragments_ahead": False,
            "fold_scale": False,
            "q_in_registers": False,
            "rescale_threshold": 0.0,
            "longest_first": False,
            "pack_gqa": False,
        },
    ),
    Step("2 swizzled shared memory", {"swizzle": True}),
    Step("3 K and V loaded ahead, two buffers", {"prefetch": True, "num_stages": 2}),
    Step("4 fragments loaded between the math", {"fragments_ahead": True}),
    Step("5 scale folded into exp2", {"fold_scale": True}),
    Step("6 tile shapes", {}, ("tile_m", "tile_n", "num_warps", "num_stages", "q_in_registers")),
)


def road(problem: AttentionProblem, full: Any, steps: tuple[Step, ...], arch: str) -> Rows:
    """The full configuration, then the steps that lead to it, each on top of the ones before it."""
    found = Rows([_row(problem, full, FULL, {}, None, arch)], {})
    config = full
    for step in steps:
        changes = {**step.changes, **{name: getattr(full, name) for name in step.final}}
        following = replace(config, **changes)
        changes = {name: value for name, value in changes.items() if getattr(config, name) != value}
        if following == config:
            found.absent[step.label] = "changes nothing here"
            continue
        config = following
        found.rows.append(_row(problem, config, step.label, changes, None, arch))
    return found


def rows(problem: AttentionProblem, full: Any, switches: tuple[Switch, ...], arch: str = HOPPER) -> Rows:
    """The full configuration, then each of its switches off.

    A field that the switches do not name gets a row, too, if it has a default: a new boolean is turned off, any other
    field goes back to its default.
    """
    values = asdict(full)
    found = Rows([_row(problem, full, FULL, {}, PaperRow("FlashAttention-3", 661.0), arch)], {})
    known = _SIZES | {switch.field for switch in switches}
    for switch in (*switches, *_unnamed(full, known)):
        if switch.field not in values:
            found.absent[switch.label] = f"the kernel has no switch {switch.field} yet"
        elif not values[switch.field] > switch.off:
            found.absent[switch.label] = "off in the full configuration already"
        elif not switch.matters(problem, full):
            found.absent[switch.label] = "changes nothing here"
        else:
            wanted = {switch.field: switch.off, **switch.also}
            changes = {name: value for name, value in wanted.items() if name in values and values[name] != value}
            found.rows.append(_row(problem, replace(full, **changes), switch.label, changes, switch.paper, arch))
    return found


def _unnamed(full: Any, known: frozenset[str]) -> list[Switch]:
    switches = []
    for field in fields(full):
        value = getattr(full, field.name)
        off = False if isinstance(value, bool) else field.default
        if field.name not in known and off is not MISSING and value != off:
            label = f"no {field.name}" if off is False else f"{field.name} {off}"
            switches.append(Switch(field.name, off, label))
    return switches


def _row(
    problem: AttentionProblem, config: Any, label: str, changes: dict[str, Any], paper: PaperRow | None, arch: str
) -> Row:
    refusal = None
    try:
        config.check(problem, arch)
    except UnsupportedError as error:
        refusal = str(error)
    return Row(label, config, changes, paper, refusal)


# ---------------------------------------------------------------- kernels

# (problem, inputs, out, lse, dout, dlse, config) -> (dq, dk, dv, dsinks)
Backward = Callable[[AttentionProblem, AttentionInputs, Tensor, Tensor, Tensor, Tensor | None, Any], tuple[Tensor, ...]]


class Kernel(NamedTuple):
    """A kernel whose choices are measured.

    Attributes:
        backend: the name of its backend.
        device: what it runs on, as text.
        default: the configuration that a call of the problem runs with on an architecture.
        forward: the backend's forward with a configuration; None lets the backend choose.
        backward: for a backward kernel, the backend's backward with a configuration. Its forward is not measured.
        steps: the road that is measured instead of the switches, if there is one.
        arch: the architecture that the kernel is compiled for here.
        peers: names of the peers that are timed with it, where they can be imported (see peers.py).
    """

    backend: str
    device: str
    default: Callable[[AttentionProblem, str], Any]
    forward: Callable[[AttentionProblem, AttentionInputs, Any], tuple[Tensor, Tensor]]
    switches: tuple[Switch, ...]
    backward: Backward | None = None
    steps: tuple[Step, ...] = ()
    arch: Callable[[], str] = lambda: HOPPER
    peers: tuple[str, ...] = ()

    def table(self, problem: AttentionProblem) -> Rows:
        """The configurations that are measured: the steps to the full one if the kernel has some, else its switches."""
        arch = self.arch()
        full = self.default(problem, arch)
        return road(problem, full, self.steps, arch) if self.steps else rows(problem, full, self.switches, arch)


def _run(backend: str, direction: Direction) -> Callable[..., Any]:
    """The forward or the backward of a backend's launch module, which is loaded when it is first called."""
    name = "forward" if direction == "fwd" else "backward"

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(getattr(backends.BACKENDS[backend], name)), name)(*arguments)

    return run


def _kernel(backend: str, direction: Direction, switches: tuple[Switch, ...] = (), **more: Any) -> Kernel:
    def default(problem: AttentionProblem, arch: str) -> Any:
        from ..kernels.heuristics import tuned  # not at the top: it needs files and locks that not every system has

        return tuned.choose(direction, backend, problem, arch)

    backward = _run(backend, "bwd") if direction == "bwd" else None
    return Kernel(backend, _DEVICES[backend], default, _run(backend, "fwd"), switches, backward, **more)


_DEVICES = {
    "sm90": "a Hopper GPU (compute capability 9.0)",
    "sm80": "a GPU of compute capability 8.0 or more",
}
_OF_SM80: dict[str, Any] = {
    "arch": functools.partial(backends.arch_of, "sm80"),
    "peers": ("sdpa-flash", "sdpa-efficient"),  # they use the same instructions
}
KERNELS = {
    "sm90": _kernel("sm90", "fwd", FORWARD_SM90),
    "sm80": _kernel("sm80", "fwd", steps=ROAD_SM80, **_OF_SM80),
}
BACKWARD_KERNELS = {
    "sm90": _kernel("sm90", "bwd", BACKWARD_SM90),
    "sm80": _kernel("sm80", "bwd", **_OF_SM80),
}


def kernels(direction: Direction) -> dict[str, Kernel]:
    """The kernels of a pass, by architecture."""
    return KERNELS if direction == "fwd" else BACKWARD_KERNELS


def problem_of(case: Case, device_type: str) -> AttentionProblem:
    return AttentionProblem(
        dtype=case.torch_dtype,
        device_type=device_type,
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        num_heads_q=case.heads_q,
        num_heads_kv=case.heads_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        softmax_scale=case.head_dim**-0.5,
        mask=Mask.from_options(case.causal, case.window),
    )


def refusal(kernel: Kernel, case: Case, device: str) -> str | None:
    """Why the kernel cannot be measured on this device; None if it can."""
    if device.startswith("cuda"):
        use_device(device)
    elif kernel.device != device:
        return f"expected {kernel.device}, got {device}; torch sees {torch.cuda.device_count()} GPUs"
    support = dispatch.choose(problem_of(case, device.partition(":")[0]), kernel.backend)
    return None if support.ok else support.reason


# ---------------------------------------------------------------- measuring


@dataclass
class Report(results.Report):
    """A results file with one row, whose contenders are configurations.

    The row also has "configurations", one for each line of the table in its order, "absent" (switches without a line,
    and why), and "peers" (contenders that are not ours). Each contender has "relative_speed": how many times as fast as
    the full configuration it is.
    """

    @property
    def row(self) -> dict[str, Any]:
        return self.rows[0]

    @property
    def wrong(self) -> list[dict[str, Any]]:
        """The row if any configuration failed its check or did not run."""
        return [row for row in self.rows if row["failed"]]


def ablate(
    case: Case,
    kernel: Kernel,
    options: Options,
    path: Path | None = None,
    on_check: Callable[[str], object] | None = None,
    on_round: Callable[[int], object] | None = None,
) -> Report:
    """Check each configuration against attention in PyTorch, then time the ones that are right, in turns.

    Args:
        path: where the JSON goes; None keeps it in memory.
        on_check: called with the label of each configuration before its check.
        on_round: called with the number of rounds that are done.
    Returns: Report. After Ctrl-C its figures come from the rounds that were finished.
    """
    problem = problem_of(case, options.device_type)
    table = kernel.table(problem)
    row = new_row("ablation", "time", case, kernel.backend)
    row["configurations"] = [_about(entry, case) for entry in table.rows]
    row["absent"] = table.absent
    header = {
        **describe(options.device),
        "sets": ["ablation"],
        "rounds": options.rounds,
        "time_budget_s": options.time_budget_s,
    }
    report = Report(header, path, rows=[row])

    def checked(label: str) -> None:
        report.save()  # with the result of the configuration before
        if on_check is not None:
            on_check(label)

    def timed(samples: Samples) -> None:
        if on_round is not None:
            on_round(samples.rounds)
        _fill_relative_speed(row, samples)

    with report.recording(), side_stream(options):
        contenders = [_contender(entry, kernel, problem) for entry in table.rows]
        rivals = find_peers(options.device, kernel.peers).present
        row["peers"] = list(rivals)
        contenders += rivals.values()
        time_contenders(row, case, contenders, options, on_check=checked, on_round=timed)
    return report


def _contender(row: Row, kernel: Kernel, problem: AttentionProblem) -> Contender:
    return Contender(row.label, attend_with(kernel, problem, row.config), lambda case: row.refusal)


def attend_with(kernel: Kernel, problem: AttentionProblem, config: Any) -> Attend:
    """Attention with this configuration of the forward or, for a backward kernel, of the backward alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
        if kernel.backward is not None:
            return _Attention.apply(q, k, v, kernel, problem, config)
        return kernel.forward(problem, AttentionInputs(q, k, v), config)[0]

    return attend


class _Attention(torch.autograd.Function):
    """Attention with the default forward and a configuration of the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, *problem_and_config: Any) -> Tensor:
        out, lse = kernel.forward(problem_and_config[0], AttentionInputs(q, k, v), None)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = kernel, *problem_and_config
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        kernel, problem, config = ctx.arguments
        gradients = kernel.backward(problem, AttentionInputs(q, k, v), out, lse, dout, None, config)
        return *gradients[:3], None, None, None


def _about(row: Row, case: Case) -> dict[str, Any]:
    paper = row.paper if case.direction == "fwd" else None
    return {
        "label": row.label,
        "changes": row.changes,
        "config": asdict(row.config),
        "paper": paper.name if paper else None,
        "paper_tflops": paper.tflops if paper and case == PAPER_CASE else None,
    }


def _fill_relative_speed(row: dict[str, Any], samples: Samples) -> None:
    if FULL in samples.ms:
        for label in samples.ms:
            row["contenders"][label]["relative_speed"] = samples.speed_ratio(label, FULL)._asdict()
