"""Run a Hopper kernel with time stamps: the shipped configuration, or one with a choice undone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from onepass.bench.ablation import FULL, kernels, problem_of
from onepass.bench.cases import Case
from onepass.dispatch import attention as dispatch
from onepass.errors import UnsupportedError
from onepass.kernels.compiler import compile
from onepass.kernels.config import HOPPER
from onepass.problem import AttentionInputs, AttentionProblem

from .acts import ROLES, STAMPS_PER_ROLE, Role, roles_of

# rows of the ablation whose timelines differ to the eye
STRUCTURE = {
    "fwd": (
        FULL,
        "no GEMM/softmax overlap in a warpgroup",
        "no pingpong between warpgroups",
        "no overlap across tiles",
        "no warp specialization",
    ),
    "bwd": (FULL, "no turns between warpgroups"),
}
RUNS = 20  # timed runs of each kernel, which give the cost of the stamps


class Timeline(NamedTuple):
    """What thread block 0 did in one run of a kernel.

    Attributes:
        label: the label of the configuration, as in the ablation.
        changes: the fields of the configuration that differ from the full configuration.
        ms, ms_without: median times of a launch with stamps, and of the same configuration without them.
    """

    label: str
    changes: dict[str, Any]
    roles: list[Role]
    ms: float
    ms_without: float

    @property
    def overlaps(self) -> bool:
        """Whether a warpgroup of a forward issues P V together with the next S."""
        return self.changes.get("overlap_gemm_softmax", True)


def refusal(problem: AttentionProblem, direction: str) -> str | None:
    """Why the kernel of a problem cannot be stamped; None if it can."""
    if direction == "bwd" and max(problem.head_dim, problem.head_dim_v) > 128:
        return f"head_dim: expected at most 128 for a backward, got {problem.head_dim}"
    return None


def record(
    case: Case,
    labels: Iterable[str] | None = None,
    device: str = "cuda",
    on_start: Callable[[str], object] | None = None,
) -> list[Timeline]:
    """The timelines of a case, dense and without options.

    Args:
        labels: rows of the ablation; None means the rows of STRUCTURE that the configuration has.
        on_start: called with each label before its kernels are compiled.
    Raises: UnsupportedError if the Hopper kernels do not run the case or a row does not exist; RuntimeError if the
        results with stamps are not those without, bit for bit.
    """
    problem = problem_of(case, torch.device(device).type)
    support = dispatch.choose(problem, "sm90")
    if reason := (None if support.ok else support.reason) or refusal(problem, case.direction):
        raise UnsupportedError(f"no time stamps: {reason}")
    table = {row.label: row for row in kernels(case.direction)["sm90"].table(problem).rows if row.refusal is None}
    wanted = [label for label in STRUCTURE[case.direction] if label in table] if labels is None else list(labels)
    if unknown := [label for label in wanted if label not in table]:
        raise UnsupportedError(f"expected rows of the ablation: {', '.join(table)}; got {', '.join(unknown)}")
    torch.manual_seed(0)
    shapes = (
        (case.batch, case.seqlen_q, case.heads_q, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_kv, case.head_dim),
        (case.batch, case.seqlen_k, case.heads_kv, case.head_dim_v),
    )
    q, k, v = (torch.randn(shape, device=device, dtype=problem.dtype) for shape in shapes)
    inputs = AttentionInputs(q, k, v)
    timelines = []
    for label in wanted:
        if on_start is not None:
            on_start(label)
        timelines.append(_timeline(label, table[label].changes, problem, table[label].config, inputs, case.direction))
    return timelines


def _timeline(
    label: str,
    changes: dict[str, Any],
    problem: AttentionProblem,
    config: Any,
    inputs: AttentionInputs,
    direction: str,
) -> Timeline:
    device = inputs.q.device
    if config.num_warpgroups >= ROLES:  # the stamps of one more would be written past the end
        expected = f"{label}: expected at most {ROLES - 1} consumer warpgroups"
        raise UnsupportedError(f"{expected}, got {config.num_warpgroups}")
    stamps = torch.zeros(ROLES, STAMPS_PER_ROLE, dtype=torch.int64, device=device)
    plain, stamped = (_launches if direction == "fwd" else _backward_launches)(problem, config, inputs, stamps)
    compared = {"out": 0, "lse": 1} if direction == "fwd" else {"dk": 1, "dv": 2}  # sums of dq come in any order
    with_stamps, without = stamped(), plain()
    for name, i in compared.items():
        if not torch.equal(with_stamps[i], without[i]):
            raise RuntimeError(f"{label}: {name} with time stamps is not that without")
    ms, ms_without = [], []
    for _ in range(RUNS):  # in turns
        ms.append(_milliseconds(stamped))
        ms_without.append(_milliseconds(plain))
    stamps.zero_()
    stamped()
    roles = roles_of(stamps.cpu().numpy())
    return Timeline(label, changes, roles, statistics.median(ms), statistics.median(ms_without))


def compile_stamped(request: compile.CompileRequest, address: int) -> Callable:
    """The kernel of a request with time stamps. It is kept in no cache, because the address is compiled in."""
    from .stamps import stamping

    with stamping(address):
        compiled = compile.compile_now(request.arch, request.trace)
    kernel = compiled.__tvm_ffi_object__()

    def launch(*arguments: Any) -> None:
        assert compiled is not None  # it owns the code
        kernel(*arguments)

    return launch


def _launches(problem: AttentionProblem, config: Any, inputs: AttentionInputs, stamps: torch.Tensor) -> tuple:
    from onepass.kernels.launch import forward_sm90 as launch

    plain = launch.prepare(problem, inputs.q.device, config)
    assert isinstance(plain, launch.Launch)
    request = launch.compile_request(problem, config, HOPPER)
    stamped = replace(plain, kernel=compile_stamped(request, stamps.data_ptr()))
    return lambda: plain(inputs), lambda: stamped(inputs)


def _backward_launches(problem: AttentionProblem, config: Any, inputs: AttentionInputs, stamps: torch.Tensor) -> tuple:
    from onepass.kernels.launch import backward_sm90 as launch
    from onepass.kernels.launch import forward_sm90

    out, lse = forward_sm90.forward(problem, inputs)
    dout = torch.randn_like(out)
    plain = launch.prepare(problem, inputs.q.device, False, config)
    assert isinstance(plain, launch.Launch)
    (request,) = (r for r in launch.compile_requests(problem, False, config, HOPPER) if r.name == "backward")
    stamped = replace(plain, main=compile_stamped(request, stamps.data_ptr()))
    return lambda: plain(inputs, out, lse, dout, None), lambda: stamped(inputs, out, lse, dout, None)


def _milliseconds(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
