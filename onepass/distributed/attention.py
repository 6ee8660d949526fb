"""`attention` over sequences whose tokens are spread over ranks: messages travel while other heads are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..api import attention as api
from ..api.attention import AttentionOutput
from ..geometry import philox
from ..ops.autocast import autocast_inputs, without_autocast
from ..validation.modifiers import in_float32
from . import checks, copies
from .agreement import needs_gradient
from .exchange import Pending, add_up, take_from_first, words
from .local import LocalCalls, Options, OutRows, TermGradients, Terms, accum_dtype, counts_rows
from .plan import ContextPlan
from .schedule import Step
from .shipments import Arrivals, KeyGradients, KeyReturn, QueryReturn, Shipment, send_keys, send_queries, start


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: ContextPlan,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Exact self-attention of this rank's queries over the keys of all ranks. Every rank of the group calls this.

    The result is that of `onepass.attention` (or `attention_varlen`, for a plan of packed sequences) on all tokens,
    with the plan's causal and window. Each rank computes softmax rows over all of their keys, so no partial results are
    rounded, and dk and dv are summed over ranks in float32.

    Args:
        q: (batch, plan.num_local_tokens, num_heads_q, head_dim), without the batch for packed sequences: the rows of
            the tokens `plan.tokens()`.
        k, v: (batch, plan.num_local_tokens, num_heads_kv, head_dim or head_dim_v): the rows of the same tokens.
        plan: made by `onepass.distributed.plan`.
        sinks, seqused_k, seqstart_k, key_ranges, query_ranges, alibi_slopes, bias: as in `onepass.attention` for all
            tokens, equal on all ranks. Their gradients are sums over all ranks, and equal on all ranks.
        dropout_p: the state of the first rank's generator decides for all ranks, and the random bits are those of one
            device in that state.
        softcap, softmax_scale, deterministic, return_lse, precision, backend: as in `onepass.attention`.

    Returns: out, in q's shape with head_dim_v columns, or AttentionOutput(out, lse) with lse
    (batch, num_heads_q, plan.num_local_tokens), or (num_heads_q, plan.num_local_tokens) for packed sequences.

    Raises: TypeError, ValueError or NotImplementedError before any message is sent, with what was expected and given;
    the ranks that compare their call with the refused one raise RuntimeError. RuntimeError on all ranks if their
    arguments differ.
    """
    q, k, v = autocast_inputs(q, k, v)
    alibi_slopes = in_float32(alibi_slopes)
    terms = Terms(sinks, seqused_k, seqstart_k, key_ranges, query_ranges, alibi_slopes, bias)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = checks.check_call(
        plan,
        (q, k, v),
        terms,
        softcap=softcap,
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=return_lse,
        precision=precision,
        backend=backend,
    )
    if plan.num_ranks == 1:
        return _alone(plan, (q, k, v), terms, options, return_lse)
    if options.dropout_p:
        state = philox.random_state(q.device)
        take_from_first(state, plan.group)
        terms = terms._replace(dropout_state=state)
    variant = plan.for_call(counts_rows(options, terms), terms.seqused_k is not None, options.precision is not None)
    is_recorded = any(t is not None and needs_gradient(t) for t in (q, k, v, sinks, alibi_slopes, bias))
    call = Call(variant, options, terms, is_recorded)
    out, lse = _Attention.apply(q, k, v, sinks, alibi_slopes, bias, call)
    return AttentionOutput(out, lse) if return_lse else out


def _alone(
    plan: ContextPlan, tensors: Sequence[Tensor], terms: Terms, options: Options, return_lse: bool
) -> Tensor | AttentionOutput:
    """The ordinary call, whose result is the same bit for bit, where one rank owns all tokens."""
    mask = plan.schedule.mask
    given = {name: t for name, t in terms._asdict().items() if t is not None}
    arguments: dict[str, Any] = {**asdict(options), **given, "return_lse": return_lse}
    arguments["window"] = mask.window_left, mask.window_right
    if not plan.is_packed:
        return api.attention(*tensors, **arguments)
    offsets = plan.on_device("cu_seqlens", tensors[0].device, lambda: checks.offsets(plan, tensors[0].device))
    longest = max(stop - start for start, stop in pairwise(plan.schedule.cu_seqlens))
    arguments |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), longest)
    return api.attention_varlen(*tensors, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **arguments)


@dataclass
class Call:
    """A call without its q, k and v. Attributes: is_recorded: whether there may be a backward."""

    plan: ContextPlan
    options: Options
    terms: Terms
    is_recorded: bool = False


class _Attention(torch.autograd.Function):
    """A call as an operation of autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, bias: Any, call: Call) -> Any:
        ctx.set_materialize_grads(False)
        plan = call.plan
        pipeline = Pipeline(call, rows_first(q, plan), rows_first(k, plan), rows_first(v, plan))
        out, lse = pipeline.forward()
        out = batch_first(out, plan)
        # the graph holds these tensors for the backward: autograd frees them, and notices changes in place
        ctx.plan, ctx.options = plan, call.options
        ctx.has_gradient = tuple(t is not None and t.requires_grad for t in (sinks, slopes, bias))
        ctx.save_for_backward(q, k, v, out, lse, *call.terms, *(t for kept in pipeline.received if kept for t in kept))
        lse = lse.permute(1, 2, 0) if not plan.is_packed else lse[:, 0].t()
        return out, lse.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        dout, dlse = gradients
        if dout is None and dlse is None:
            return (None,) * 7
        q, k, v, out, lse, *kept = ctx.saved_tensors
        plan, terms = ctx.plan, Terms(*kept[: len(Terms._fields)])
        call = Call(plan, ctx.options, terms)
        pipeline = Pipeline(call, *(rows_first(t, plan) for t in (q, k, v)))
        if plan.keep_gathered:
            received = iter(kept[len(Terms._fields) :])
            pipeline.received = list(zip(received, received, received, strict=True))
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, sums = pipeline.backward(out_rows(call, out, dout, lse, dlse), ctx.has_gradient)
        found: list[Tensor | None] = [batch_first(t, plan) for t in (dq, dk, dv)]
        for total, t in zip(sums, (terms.sinks, terms.alibi_slopes, terms.bias), strict=True):
            if total is None:
                found.append(None)
                continue
            add_up(total, plan.group)
            assert t is not None
            found.append(total.to(t.dtype))
        return (*found, None)


def rows_first(t: Tensor, plan: ContextPlan) -> Tensor:
    """(batch, seqlen, heads, dim), or (total, heads, dim), as (rows, batch, heads, dim): a view."""
    return t.unsqueeze(1) if plan.is_packed else t.transpose(0, 1)


def batch_first(t: Tensor, plan: ContextPlan) -> Tensor:
    """The inverse of `rows_first`, contiguous."""
    return (t.squeeze(1) if plan.is_packed else t.transpose(0, 1)).contiguous()


HEADS_AT_A_TIME = 16  # in `out_rows`, so that memory holds float32 sums or copies of these heads alone


def out_rows(call: Call, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> dict[str, Tensor]:
    """What a backward needs of out, as `OutRows.of` takes it, with rows first.

    Args: lse: with rows first; all others: as the call has them.
    """
    plan = call.plan
    out, dout = rows_first(out, plan), rows_first(dout, plan)
    if dlse is not None:
        dlse = dlse.t()[:, None] if plan.is_packed else dlse.permute(2, 0, 1)
    if not queries_travel(plan):
        found = {"dout": dout, "lse": lse, "out": out}
        return found if dlse is None else {**found, "dlse": dlse}
    # dout . out travels instead of out: one number instead of head_dim_v
    stats = lse.new_empty((*lse.shape, 2))
    stats[..., 0] = lse
    for first in range(0, lse.shape[2], HEADS_AT_A_TIME):
        heads = slice(first, first + HEADS_AT_A_TIME)
        delta = dots(dout[:, :, heads], out[:, :, heads], lse.dtype)
        if call.terms.sinks is not None:  # out of a row that saw a sink alone is 0, whatever dout is
            delta = torch.where((out[:, :, heads] != 0).any(-1), delta, 0.0)
        stats[:, :, heads, 1] = -delta
    if dlse is not None:
        stats[..., 1] += dlse
    return {"dout": dout, "stats": stats}


def dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums of a * b over the last dimension, in this dtype: (rows, batch, heads).

    In 16 bits on a GPU, tensor cores multiply all heads of a row by each other, and the diagonal is kept. That reads a
    and b once: 0.07 ms for 8192 rows of 32 heads of 128 on an H100, where copies in float32 take 0.49 ms.
    """
    with without_autocast(a.device.type):
        if not a.is_cuda or a.element_size() != 2:
            return torch.linalg.vecdot(a.to(dtype), b.to(dtype))
        products = torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT, out_dtype=dtype)
    return products.diagonal(dim1=1, dim2=2).unflatten(0, a.shape[:2])


def queries_travel(plan: ContextPlan) -> bool:
    """Whether ranks compute rows of q that other ranks own."""
    return any(step.width > 1 for step in plan.schedule.steps)


class Pipeline:
    """The steps of a call on this rank. Tensors have rows first: (rows, batch, heads, dim).

    While a step is computed, the messages of the next `AHEAD` steps are under way. The results of a step are sent back
    while the next step is computed.
    """

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor):
        self.call, self.plan, self.given, self.dtype = call, call.plan, (q, k, v), q.dtype
        self.q, self.k, self.v = (words(t) for t in self.given)
        self.steps = self.plan.schedule.steps
        self.received: list[tuple[Tensor, Tensor, Tensor] | None] = [None] * len(self.steps)
        self.accum = accum_dtype(q.dtype)
        self.copies = copies.of(self.plan.group, self.plan.rank, q.device) if self.plan.transport == "copies" else None
        self.published: dict[str, list[Tensor]] = {}

    @property
    def is_one_step(self) -> bool:
        """Whether one step computes all heads of this rank's own queries, so that its results are those of the call."""
        return len(self.steps) == 1 and self.steps[0].width == 1

    def local(self, step: Step) -> LocalCalls:
        return LocalCalls(self.plan, step, self.call.options, self.call.terms)

    # ---------------------------------------------------------------- forward

    def forward(self) -> tuple[Tensor, Tensor]:
        """out (rows, batch, heads, head_dim_v) and lse (rows, batch, heads) of this rank's queries."""
        self._publish(self._inputs())
        arrivals = Arrivals(self.plan, self._inputs_of, self.copies)
        if self.is_one_step:
            return self._results(0, arrivals)
        q, _, v = self.given
        shape = *q.shape[:2], self.plan.schedule.num_heads_q
        out, lse = q.new_empty((*shape, v.shape[-1])), q.new_empty(shape, dtype=self.accum)
        targets = words(out), lse
        going: list[tuple[QueryReturn, Pending]] = []
        for i, step in enumerate(self.steps):
            results = self._results(i, arrivals)
            returned = QueryReturn(self.plan, step, results, q.device)
            going.append((returned, start(self.plan, q.device, returned)))
            returned.write_own(targets)
            del results  # freed before the next step's tensors are put together
            if i:  # the results of the step before had the time of this step to travel
                self._write(*going.pop(0), targets)
        for last in going:
            self._write(*last, targets)
        return out, lse

    def _results(self, index: int, arrivals: Arrivals) -> tuple[Tensor, Tensor]:
        """out and lse of a step's rows and heads."""
        q, k, v = (t.view(self.dtype) for t in arrivals.wait())
        arrivals.start_next()
        if self.call.is_recorded and self.plan.keep_gathered:
            self.received[index] = q, k, v
        if not q.shape[2]:
            return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3], dtype=self.accum)
        return self.local(self.steps[index]).forward(q, k, v)

    @staticmethod
    def _write(returned: QueryReturn, pending: Pending, targets: tuple[Tensor, Tensor]) -> None:
        returned.write(targets, iter(pending.wait()))

    def _inputs(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v}

    def _publish(self, rows: dict[str, Tensor]) -> None:
        """Let copy engines of other ranks read k and v, and the other rows, too, if ranks share queries in a step."""
        if self.copies is not None:
            names = [name for name in rows if name in ("k", "v") or queries_travel(self.plan)]
            layout = self.plan.schedule.layout
            counts = [layout.count(rank) for rank in range(layout.num_ranks)]
            found = self.copies.publish([rows[name] for name in names], counts)
            self.published = dict(zip(names, found, strict=True))

    def _queries(self, step: Step, name: str, rows: Tensor) -> Shipment:
        return send_queries(self.plan, step, rows, self.published.get(name))

    def _keys(self, step: Step, name: str, rows: Tensor) -> Shipment:
        return send_keys(self.plan, step, rows, self.published.get(name))

    def _inputs_of(self, index: int) -> list[Shipment]:
        """q, k and v of a step."""
        step = self.steps[index]
        kept = self.received[index]
        if kept is not None:
            return [Shipment(t) for t in kept]
        return [self._queries(step, "q", self.q), self._keys(step, "k", self.k), self._keys(step, "v", self.v)]

    # ---------------------------------------------------------------- backward

    def backward(
        self, of_out: dict[str, Tensor], has_gradient: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, Tensor, TermGradients]:
        """dq, dk, dv, and the gradients of sinks, slopes and bias from this rank's computations."""
        given = self.call.terms.sinks, self.call.terms.alibi_slopes, self.call.terms.bias
        sums = TermGradients(
            *(
                torch.zeros(t.shape, dtype=self.accum, device=t.device) if has and t is not None else None
                for t, has in zip(given, has_gradient, strict=True)
            )
        )
        dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.given[1:])
        dq = torch.empty_like(self.given[0], memory_format=torch.contiguous_format) if not self.is_one_step else None
        key_dtype = self.accum if self.plan.schedule.sums_keys() else self.dtype
        targets = () if dq is None else (words(dq),)
        keys = KeyGradients(self.plan, dk, dv, key_dtype)

        gradients = {name: words(t) if t.dim() == 4 else t for name, t in of_out.items()}
        self._publish(gradients if self.received[0] is not None else self._inputs() | gradients)

        def inputs_of(index: int) -> list[Shipment]:
            step = self.steps[index]
            return [*self._inputs_of(index), *(self._queries(step, name, t) for name, t in gradients.items())]

        going: list[tuple[QueryReturn, KeyReturn, Pending]] = []
        arrivals = Arrivals(self.plan, inputs_of, self.copies)
        for i, step in enumerate(self.steps):
            tensors = arrivals.wait()
            q, k, v = (t.view(self.dtype) for t in tensors[:3])
            rows = {name: t.view(of_out[name].dtype) for name, t in zip(gradients, tensors[3:], strict=True)}
            arrivals.start_next()
            if q.shape[2]:
                step_dq, *step_dkv = self.local(step).backward(q, k, v, OutRows.of(rows), sums)
            else:
                step_dq, *step_dkv = torch.empty_like(q), *(torch.empty_like(t, dtype=key_dtype) for t in (k, v))
            if self.is_one_step:
                dq = step_dq
            of_queries = QueryReturn(self.plan, step, (step_dq,) if targets else (), q.device)
            of_keys = KeyReturn(self.plan, step, step_dkv, q.device)
            going.append((of_queries, of_keys, start(self.plan, q.device, of_queries, of_keys)))
            of_queries.write_own(targets)
            of_keys.keep_own()
            del q, k, v, tensors, rows, step_dq, step_dkv
            if i:
                self._add(*going.pop(0), targets, keys)
        for last in going:
            self._add(*last, targets, keys)
        assert dq is not None
        return dq, dk, dv, sums

    @staticmethod
    def _add(
        of_queries: QueryReturn, of_keys: KeyReturn, pending: Pending, targets: Sequence[Tensor], keys: KeyGradients
    ) -> None:
        received = iter(pending.wait())
        of_queries.write(targets, received)
        keys.add(of_keys, received)
