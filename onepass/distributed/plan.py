"""`plan`: which tokens each rank owns, and how attention over all of them is computed."""

from __future__ import annotations

import hashlib
import socket
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..validation.scalars import check_flag, check_int, check_real
from . import agreement, shards
from .choice import Candidate, Engine, Wanted, widths_of
from .cost import Hardware, estimate
from .layout import Run, documents
from .layouts import LayoutName
from .report import report
from .routes import Route
from .schedule import Schedule, Segment, Step, steps_over_heads

Transport = Literal["messages", "copies"]


@dataclass(frozen=True, eq=False)
class ContextPlan:
    """How the tokens of sequences, and attention over them, are spread over the ranks of a process group.

    The function `plan` makes it. A plan holds no tensor that depends on data, and serves every layer and every training
    step with the same sequences.

    Attributes:
        schedule: the tokens of each rank, and the steps of the computation.
        rank: this process's rank in the group.
        is_packed: whether sequences follow each other in one tensor.
        keep_gathered: whether the forward keeps what it has received for the backward, which then does not ask again.
        transport: how q, k and v come to the ranks that compute with them.
    """

    schedule: Schedule
    rank: int
    _group: weakref.ref[Any] | None
    is_packed: bool
    layout_name: LayoutName
    engine: Engine
    head_dim: int
    chunks: int
    keep_gathered: bool
    hardware: Hardware
    timeout: float
    transport: Transport
    control: agreement.Control | None
    _wanted: Wanted = field(repr=False)
    _kept: dict = field(default_factory=dict, repr=False)

    @property
    def group(self) -> Any:
        """The process group, which torch.distributed owns; None for a plan that only describes."""
        return agreement.alive(self._group)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal on ranks whose plans are equal."""
        return hashlib.sha256(repr((self.schedule, self.keep_gathered)).encode()).hexdigest()[:12]

    # ---------------------------------------------------------------- what ranks tell each other

    def agree(self, function: str, values: Mapping[str, Any]) -> None:
        """Compare a call with those of the other ranks, unless the ranks have agreed on this call before.

        Raises: RuntimeError on all ranks if the calls differ.
        """
        if self.control is not None:
            self.control.compare_once(function, values, self.fingerprint, self.timeout)

    def reporting(self, function: str) -> AbstractContextManager[None]:
        """Report an error of the block to the ranks that compare their call with this one."""
        return nullcontext() if self.control is None else self.control.reporting(function)

    # ---------------------------------------------------------------- tokens

    @property
    def num_ranks(self) -> int:
        return self.schedule.layout.num_ranks

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks."""
        return self.schedule.cu_seqlens[-1]

    @property
    def local_runs(self) -> tuple[Run, ...]:
        """The tokens of this rank as runs, start <= t < stop, in the order of its tensors."""
        return self.schedule.layout.runs[self.rank]

    @cached_property
    def num_local_tokens(self) -> int:
        """The number of this rank's tokens."""
        return self.schedule.layout.count(self.rank)

    def tokens(self, device: torch.device | str | None = None) -> Tensor:
        """(num_local_tokens,) int64: the numbers of this rank's tokens among all tokens."""
        ranges = [torch.arange(*run, device=device) for run in self.local_runs]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64, device=device)

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """(num_local_tokens,) int64: where this rank's tokens stand in their sequences, as rotary embeddings count."""
        found = [
            torch.arange(*piece, device=device) - self.schedule.cu_seqlens[number]
            for run in self.local_runs
            for number, piece in documents(run, self.schedule.cu_seqlens)
        ]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=device)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that has all tokens in dimension `dim`. Differentiable.

        Raises: ValueError if the dimension has another size.
        """
        self._check_size("x", x, dim, self.num_tokens)
        return shards.shard(x, dim, self.local_runs)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """All tokens, on every rank, from each rank's own in dimension `dim`. Every rank of the group calls this.

        Differentiable: the gradient of x is the sum of what the ranks have for its tokens. Raises: ValueError if the
        dimension has another size than num_local_tokens; RuntimeError on all ranks if their tensors differ otherwise.
        """
        with self.reporting("unshard"):
            self._check_size("x", x, dim, self.num_local_tokens)
        if self.num_ranks > 1:
            shape = [size for i, size in enumerate(x.shape) if i != dim % x.dim()]
            values = {"dim": dim % x.dim(), "other sizes": tuple(shape), "dtype": str(x.dtype)}
            values |= {"device": x.device.type, "recorded gradient": agreement.needs_gradient(x)}
            self.agree("unshard", values)
        return shards.Gather.apply(x, dim % x.dim(), self.schedule.layout, self.rank, self._group)

    @staticmethod
    def _check_size(name: str, x: Tensor, dim: int, expected: int) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.shape[dim] != expected:
            raise ValueError(f"{name}: expected {expected} tokens in dimension {dim}, got shape {tuple(x.shape)}")

    # ---------------------------------------------------------------- steps; steps of one width have the same rows

    def segments(self, step: Step) -> tuple[Segment, ...]:
        """What this rank computes in a step."""
        return self._once(("segments", step.width), lambda: self.schedule.segments(step, self.rank))

    def query_route(self, step: Step, device: torch.device) -> Route:
        """How rows of q travel in a step."""
        return self._route(("queries", step.width), step, self.schedule.query_pieces, device)

    def key_route(self, step: Step, device: torch.device) -> Route:
        """How rows of k and v travel in a step."""
        return self._route(("keys", step.width), step, self.schedule.key_pieces, device)

    def _route(self, key: Any, step: Step, pieces_of: Any, device: torch.device) -> Route:
        def make() -> Route:
            return Route.of([pieces_of(step, rank) for rank in range(self.num_ranks)], self.rank, device)

        return self.on_device(key, device, make)

    def _once(self, key: Any, make: Any) -> Any:
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
        return found

    def on_device(self, key: Any, device: torch.device, make: Any) -> Any:
        """A value that depends on the plan and the device alone, which is made once and kept."""
        return self._once((key, device), make)

    def for_call(self, counts_rows: bool, counts_from_end: bool, is_fp8: bool) -> ContextPlan:
        """The plan by which a call is computed: this one, or one that gathers what the call needs beyond it.

        Args:
            counts_rows: whether the result of a query depends on its number in its sequence, and on those of keys.
            counts_from_end: whether queries may stand before their own tokens, because of seqused_k.
            is_fp8: whether the call is in FP8, and so takes no modifiers.
        """
        schedule = self.schedule
        # sequences must stay whole where numbers of queries are not their positions, and in packed FP8
        if (self.is_packed and (counts_rows or is_fp8)) or (counts_rows and counts_from_end):
            steps = steps_over_heads(self.num_ranks, schedule.num_heads_q, schedule.num_heads_kv, self.chunks)
            return self._variant(replace(schedule, steps=steps))
        if counts_rows or (counts_from_end and schedule.mask.window_left is not None):
            return self._variant(replace(schedule, from_start=True))
        return self

    def _variant(self, schedule: Schedule) -> ContextPlan:
        return self._once(
            ("variant", schedule.steps, schedule.from_start), lambda: replace(self, schedule=schedule, _kept={})
        )

    # ---------------------------------------------------------------- words

    def candidates(self, hardware: Hardware | None = None) -> list[Candidate]:
        """What each engine would do with the arguments of this plan, "heads" first and "keys" last.

        The plan's own engine is listed as it was planned, whatever the hardware. Args: hardware: None = the plan's own.
        """
        wanted = self._wanted._replace(hardware=hardware or self.hardware)
        found = [wanted.candidate(width) for width in widths_of(None, self.num_ranks)]
        costs = estimate(self.schedule, self.head_dim, wanted.hardware, keep_gathered=self.keep_gathered)
        own = Candidate(self.engine, self.layout_name, self.schedule, self.chunks, costs)
        return [own if candidate.engine == self.engine else candidate for candidate in found]

    def describe(self, hardware: Hardware | None = None) -> str:
        """Work, bytes and balance of each rank, and the estimate of each engine, with the chosen one marked, as text.

        Args:
            hardware: None = the plan's own.
        """
        wanted = self._wanted._replace(hardware=hardware or self.hardware)
        return report(wanted, self.candidates(hardware), self.engine)


def plan(
    tokens: int | Sequence[int] | Tensor,
    group: Any = None,
    *,
    num_heads_q: int,
    num_heads_kv: int,
    head_dim: int = 128,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    layout: LayoutName | None = None,
    engine: Engine | None = None,
    chunks: int | None = None,
    training: bool = True,
    keep_gathered: bool = False,
    transport: Transport = "messages",
    hardware: Hardware | None = None,
    num_ranks: int | None = None,
    rank: int = 0,
    timeout: float = 60.0,
) -> ContextPlan:
    """Plan self-attention over sequences whose tokens are spread over the ranks of a process group.

    Nothing needs to be a multiple of the number of ranks: not the tokens, nor the heads, nor the lengths of packed
    sequences.

    Args:
        tokens: the tokens of the sequence (of each batch entry), or for packed sequences their offsets cu_seqlens, a
            list or a tensor, whose values are read here.
        group: a ProcessGroup, or a one-dimensional DeviceMesh; None = the default group. All of its ranks call `plan`.
        num_heads_q, num_heads_kv: heads of q, and of k and v.
        head_dim: serves the estimate of costs alone; it is the same on all ranks, because it may change the choice of
            engine.
        causal, window: the mask, as in `onepass.attention`.
        layout: "contiguous": each rank owns one run of tokens. "head_tail": rank r owns pieces r and 2 P - 1 - r of 2
            P, which balances a causal mask. "balanced": the ranks own equal numbers of tokens with nearly equal work,
            and sequences stay on one rank where that is possible, so that few keys travel. "cyclic": blocks of 256
            tokens go to one rank after another, so that each shard is the beginning of the shard of a longer
            sequence: a cache grows evenly. None = the best for the engine.
        engine: "heads": each rank gets all queries and keys of some heads (all-to-all). "keys": each rank keeps its
            queries, and gathers the keys and values that they see. A divisor of the number of ranks: so many ranks
            deal the heads among themselves, and gather keys from the others. None = the fastest by the estimate that
            `describe` shows.
        chunks: about how many equal steps the heads are cut into, so that messages of one step travel while another one
            is computed, and only three steps need memory. None = at most 16; the first and the last may be
            shorter: of the ways that are within 2 % of the fastest by the estimate, the one whose largest step is the
            smallest.
        training: True chooses by the time of a forward and a backward, False by the time of a forward alone. Gradients
            work either way.
        keep_gathered: keep received q, k and v until the backward instead of receiving them again.
        transport: how q, k and v travel in `attention`. "messages": operations of the process group. "copies": each GPU
            of one host reads them from the others with its copy engines, through symmetric memory, in which each rank
            keeps a second copy of its q, k and v (with "keys", of k and v). It needs GPUs that can address each other.
            Results and gradients are messages either way.
        hardware: what the estimate assumes of the ranks; None = `Hardware()`, near an H200 with NVLink. With ranks on
            several hosts, give a lower bandwidth.
        num_ranks, rank: without a process group, to describe a plan for another machine.
        timeout: seconds that a rank waits for the others where it compares its arguments with theirs, here and in calls
            with this plan. It may differ between ranks and plans.

    Raises: TypeError or ValueError with what was expected and given, and then RuntimeError on the other ranks;
    RuntimeError on all ranks if their arguments differ, with the first rank that differs and how.
    """
    own_group, control = None, None
    if num_ranks is None:
        own_group = _process_group(group)
        num_ranks, rank = dist.get_world_size(own_group), dist.get_rank(own_group)
        control = agreement.Control.of(own_group) if num_ranks > 1 else None
    elif group is not None:
        raise ValueError("num_ranks: expected None together with a group, got both")
    with nullcontext() if control is None else control.reporting("plan"):
        num_ranks = check_int("num_ranks", num_ranks, "an int of at least 1", least=1)
        rank = check_int("rank", rank, "an int of at least 0", least=0)
        if rank >= num_ranks:
            raise ValueError(f"rank: expected one below num_ranks = {num_ranks}, got {rank}")
        training = check_flag("training", training)
        keep_gathered = check_flag("keep_gathered", keep_gathered)
        if transport not in get_args(Transport):
            raise ValueError(f"transport: expected 'messages' or 'copies', got {transport!r}")
        hardware = Hardware() if hardware is None else hardware
        if not isinstance(hardware, Hardware):
            raise TypeError(f"hardware: expected onepass.distributed.Hardware or None, got {hardware!r}")
        wanted = Wanted.checked(
            tokens, num_heads_q, num_heads_kv, head_dim, causal, window, layout, engine, chunks, num_ranks
        )._replace(training=training, keep_gathered=keep_gathered, hardware=hardware)
        timeout = check_real("timeout", timeout)
        if timeout <= 0:
            raise ValueError(f"timeout: expected seconds above 0, got {timeout}")
    chosen = min((wanted.candidate(width) for width in wanted.widths), key=wanted.seconds)
    made = ContextPlan(
        chosen.schedule,
        rank,
        None if own_group is None else weakref.ref(own_group),
        wanted.is_packed,
        chosen.layout_name,
        chosen.engine,
        wanted.head_dim,
        chosen.chunks,
        keep_gathered,
        hardware,
        timeout,
        transport,
        control,
        wanted,
    )
    if control is not None:
        values = {
            "cu_seqlens": wanted.cu_seqlens,
            "num_heads_q": wanted.num_heads_q,
            "num_heads_kv": wanted.num_heads_kv,
            "head_dim": wanted.head_dim,
            "causal": causal,
            "window": window,
            "layout": layout,
            "engine": engine,
            "chunks": wanted.chunks,
            "training": training,
            "keep_gathered": keep_gathered,
            "transport": transport,
            "hardware": hardware,
            # ranks that run different versions of this library may plan differently from equal arguments
            "tokens and steps": f"{made.layout_name}, {made.engine}, {made.fingerprint}",
        }
        if transport == "copies":
            values["host, for transport 'copies'"] = socket.gethostname()
        control.compare_plans(values, made.fingerprint, timeout)
        control.connect()
    return made


def _process_group(group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("group: expected an initialized torch.distributed, or num_ranks to describe a plan")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a DeviceMesh of one dimension, got {group}; pass mesh['name']")
        return group.get_group()
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh or None, got {group!r}")
    return group
