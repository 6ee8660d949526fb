"""`attention` over sequences whose tokens are spread over ranks: messages travel while other heads are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..api.attention import AttentionOutput, autocast_inputs
from ..geometry import philox
from . import checks
from .agreement import needs_gradient
from .exchange import Message, Pending, add_up, exchange, take_from_first
from .local import LocalCalls, Options, TermGradients, Terms, accum_dtype, counts_rows
from .plan import ContextPlan, Route
from .schedule import Step


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
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: str | None = None,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Exact self-attention of this rank's queries over the keys of all ranks. Every rank of the plan's group calls it.

    The result is that of `onepass.attention` (or `attention_varlen`, for a plan of packed sequences) on all tokens,
    with the plan's causal and window. Each rank computes softmax rows over all of their keys, so no partial results are
    rounded, and dk and dv are summed over ranks in float32.

    Args:
        q: (batch, plan.num_local_tokens, num_heads_q, head_dim), for packed sequences without batch: the tokens of
            `plan.tokens()`.
        k, v: (batch, plan.num_local_tokens, num_heads_kv, head_dim or head_dim_v), likewise.
        plan: made by `onepass.distributed.plan`.
        sinks, seqused_k, seqstart_k, key_ranges, alibi_slopes, bias: as of `onepass.attention` for all tokens, equal on
            all ranks. Their gradients are sums over all ranks, equal on all of them.
        dropout_p: the state of the first rank's generator decides for all ranks, and the random bits are those of one
            device in that state.
        softcap, softmax_scale, deterministic, return_lse, precision, backend: as of `onepass.attention`.

    Returns: out, in q's shape with head_dim_v in place of head_dim, or AttentionOutput(out, lse) with lse
    (batch, num_heads_q, plan.num_local_tokens), or (num_heads_q, plan.num_local_tokens) for packed sequences.

    Raises: TypeError, ValueError or NotImplementedError before any message is sent, with what was expected and given,
    and then RuntimeError on the ranks that compare this call; RuntimeError on all ranks if their arguments differ.
    """
    q, k, v = autocast_inputs(q, k, v)
    terms = Terms(sinks, seqused_k, seqstart_k, key_ranges, alibi_slopes, bias)
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
    if options.dropout_p:
        state = philox.random_state(q.device)
        if plan.num_ranks > 1:
            take_from_first(state, plan.group)
        terms = terms._replace(dropout_state=state)
    variant = plan.for_call(counts_rows(options, terms), terms.seqused_k is not None, options.precision is not None)
    is_recorded = any(t is not None and needs_gradient(t) for t in (q, k, v, sinks, alibi_slopes, bias))
    call = Call(variant, options, terms, is_recorded)
    out, lse = _Attention.apply(q, k, v, sinks, alibi_slopes, bias, call)
    return AttentionOutput(out, lse) if return_lse else out


HEADS_AT_A_TIME = 8  # in `row_stats`, so that float32 copies of few heads are in memory


@dataclass
class Call:
    """A call, beside q, k and v. Attributes: is_recorded: there may be a backward."""

    plan: ContextPlan
    options: Options
    terms: Terms
    is_recorded: bool = False


class _Attention(torch.autograd.Function):
    """The gradients of a call."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Any, slopes: Any, bias: Any, call: Call) -> Any:
        ctx.set_materialize_grads(False)
        plan = call.plan
        pipeline = Pipeline(call, rows_first(q, plan), rows_first(k, plan), rows_first(v, plan))
        out, lse = pipeline.forward()
        out = batch_first(out, plan)
        # what is kept for the backward goes with the graph: autograd frees it, and notices changes in place
        ctx.plan, ctx.options = plan, call.options
        ctx.has_gradient = tuple(t is not None and t.requires_grad for t in (sinks, slopes, bias))
        ctx.save_for_backward(q, k, v, out, lse, *call.terms, *(t for pair in pipeline.received if pair for t in pair))
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
            pipeline.received = list(zip(received, received, strict=True))
        dout = torch.zeros_like(out) if dout is None else dout
        stats = row_stats(call, out, dout, lse, dlse)
        dq, dk, dv, sums = pipeline.backward(rows_first(dout, plan), stats, ctx.has_gradient)
        found: list[Tensor | None] = [batch_first(t, plan) for t in (dq, dk, dv)]
        for total, t in zip(sums, (terms.sinks, terms.alibi_slopes, terms.bias), strict=True):
            if total is None:
                found.append(None)
                continue
            if plan.num_ranks > 1:
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


def row_stats(call: Call, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """(rows, batch, heads, 2): lse, and the gradient of lse less dout . out, all that a backward needs of out."""
    plan = call.plan
    out, dout = rows_first(out, plan), rows_first(dout, plan)
    stats = lse.new_empty((*lse.shape, 2))
    stats[..., 0] = lse
    for first in range(0, lse.shape[2], HEADS_AT_A_TIME):
        heads = slice(first, first + HEADS_AT_A_TIME)
        delta = torch.linalg.vecdot(dout[:, :, heads].to(lse.dtype), out[:, :, heads].to(lse.dtype))
        if call.terms.sinks is not None:  # out of a row that saw a sink alone is 0, whatever dout is
            delta = torch.where((out[:, :, heads] != 0).any(-1), delta, 0.0)
        stats[:, :, heads, 1] = -delta
    if dlse is not None:
        stats[..., 1] += dlse.t()[:, None] if plan.is_packed else dlse.permute(2, 0, 1)
    return stats


class Pipeline:
    """The steps of a call on this rank. Tensors have rows first: (rows, batch, heads, dim).

    Messages of the next step are sent before a step is computed, and its results are sent back while the next one is.
    """

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor):
        self.call, self.plan, self.q, self.k, self.v = call, call.plan, q, k, v
        self.steps = self.plan.schedule.steps
        self.received: list[tuple[Tensor, Tensor] | None] = [None] * len(self.steps)
        self.accum = accum_dtype(q.dtype)

    def local(self, step: Step) -> LocalCalls:
        return LocalCalls(self.plan, step, self.call.options, self.call.terms, self.head_dim)

    # ---------------------------------------------------------------- forward

    def forward(self) -> tuple[Tensor, Tensor]:
        """out (rows, batch, heads, head_dim_v) and lse (rows, batch, heads) of this rank's queries."""
        self.head_dim = self.q.shape[-1]
        rows, batch = self.q.shape[:2]
        heads = self.plan.schedule.num_heads_q
        out = self.q.new_empty((rows, batch, heads, self.v.shape[-1]))
        lse = self.q.new_empty((rows, batch, heads), dtype=self.accum)
        coming, going = self._inputs_of(0), []
        for i, step in enumerate(self.steps):
            q, kv = coming.wait()
            if i + 1 < len(self.steps):
                coming = self._inputs_of(i + 1)
            if self.call.is_recorded and self.plan.keep_gathered:
                self.received[i] = q, kv
            if q.shape[2]:
                results = self.local(step).forward(q, kv)
            else:
                results = q.new_empty((*q.shape[:3], out.shape[-1])), q.new_empty(q.shape[:3], dtype=self.accum)
            going.append(QueryReturn(self.plan, step, results))
            if len(going) > 1:  # the step before has had this one's time
                going.pop(0).add_to((out, lse))
        for last in going:
            last.add_to((out, lse))
        return out, lse

    def _inputs_of(self, index: int) -> Coming:
        step = self.steps[index]
        kept = self.received[index]
        if kept is not None:
            return Coming([], list(kept))
        schedule, plan = self.plan.schedule, self.plan
        queries = send_queries(plan, step, self.q)

        def keys_of(rank: int) -> Tensor:
            heads = schedule.heads_kv(step, rank)
            return torch.cat((self.k[:, :, heads], self.v[:, :, heads]), -1)

        return Coming.of(queries, send_keys(plan, step, keys_of))

    # ---------------------------------------------------------------- backward

    def backward(
        self, dout: Tensor, stats: Tensor, has_gradient: tuple[bool, ...]
    ) -> tuple[Tensor, Tensor, Tensor, TermGradients]:
        """dq, dk, dv, and the gradients of sinks, slopes and bias from this rank's computations."""
        self.head_dim = head_dim = self.q.shape[-1]
        given = self.call.terms.sinks, self.call.terms.alibi_slopes, self.call.terms.bias
        sums = TermGradients(
            *(
                torch.zeros(t.shape, dtype=self.accum, device=t.device) if has and t is not None else None
                for t, has in zip(given, has_gradient, strict=True)
            )
        )
        dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        rows, batch, heads = self.k.shape[:3]
        key_dtype = self.accum if self.plan.schedule.sums_keys() else self.k.dtype
        dkv = self.k.new_zeros((rows, batch, heads, head_dim + self.v.shape[-1]), dtype=key_dtype)

        def start(index: int) -> Coming:
            step = self.steps[index]
            gradients = Coming.of(send_queries(self.plan, step, dout), send_queries(self.plan, step, stats))
            return self._inputs_of(index).joined(gradients)

        coming, going = start(0), []
        for i, step in enumerate(self.steps):
            q, kv, step_dout, step_stats = coming.wait()
            if i + 1 < len(self.steps):
                coming = start(i + 1)
            if q.shape[2]:
                step_dq, step_dkv = self.local(step).backward(q, kv, step_dout, step_stats, sums)
            else:
                step_dq, step_dkv = torch.empty_like(q), torch.empty_like(kv, dtype=key_dtype)
            going.append((QueryReturn(self.plan, step, (step_dq,)), KeyReturn(self.plan, step, step_dkv)))
            if len(going) > 1:
                self._add(going.pop(0), dq, dkv)
        for last in going:
            self._add(last, dq, dkv)
        dk, dv = (t.to(self.k.dtype) for t in dkv.split((head_dim, self.v.shape[-1]), -1))
        return dq, dk, dv, sums

    @staticmethod
    def _add(returns: tuple[QueryReturn, KeyReturn], dq: Tensor, dkv: Tensor) -> None:
        returns[0].add_to((dq,))
        returns[1].add_to(dkv)


# ---------------------------------------------------------------- rows to where they are needed


class Coming:
    """Buffers that are being filled."""

    def __init__(self, pending: list[Pending], buffers: list[Tensor]):
        self._pending, self._buffers = pending, buffers

    @classmethod
    def of(cls, *arriving: tuple[Pending, Tensor]) -> Coming:
        return cls([pending for pending, _ in arriving], [buffer for _, buffer in arriving])

    def joined(self, other: Coming) -> Coming:
        return Coming([*self._pending, *other._pending], [*self._buffers, *other._buffers])

    def wait(self) -> list[Tensor]:
        for pending in self._pending:
            pending.wait()
        return self._buffers


def send_queries(plan: ContextPlan, step: Step, rows: Tensor) -> tuple[Pending, Tensor]:
    """Rows (rows, batch, heads, dim) of all heads to the ranks that compute with them, each its heads."""
    own = rows[:, :, plan.schedule.heads_q(step, plan.rank)]
    if step.width == 1:
        return exchange(plan.group, [], []), own
    return _send(plan, plan.query_route(step), lambda rank: rows[:, :, plan.schedule.heads_q(step, rank)], own)


def send_keys(plan: ContextPlan, step: Step, keys_of: Any) -> tuple[Pending, Tensor]:
    """Rows of k and v to the ranks whose queries see them. Args: keys_of: the rows of a rank's heads."""
    route = plan.key_route(step)
    by_heads: dict[tuple[int, int], Tensor] = {}

    def rows_of(rank: int) -> Tensor:
        heads = plan.schedule.heads_kv(step, rank)
        key = heads.start, heads.stop
        if key not in by_heads:
            by_heads[key] = keys_of(rank)
        return by_heads[key]

    return _send(plan, route, rows_of, rows_of(plan.rank))


def _send(plan: ContextPlan, route: Route, rows_of: Any, own: Tensor) -> tuple[Pending, Tensor]:
    """Fill this rank's buffer, and other ranks' with rows of this one."""
    buffer = own.new_empty((sum(piece.rows for piece in route.incoming), *own.shape[1:]))
    sends, receives = [], []
    for rank, pieces in route.outgoing:
        rows = rows_of(rank)
        if rank == plan.rank:
            for piece in pieces:
                buffer[piece.row : piece.row + piece.rows] = rows[piece.source_row : piece.source_row + piece.rows]
            continue
        rows = rows.contiguous()
        sends += [Message(rank, rows[piece.source_row : piece.source_row + piece.rows]) for piece in pieces]
    for piece in route.incoming:
        if piece.source != plan.rank:
            receives.append(Message(piece.source, buffer[piece.row : piece.row + piece.rows]))
    return exchange(plan.group, sends, receives), buffer


# ---------------------------------------------------------------- results to where they belong


class QueryReturn:
    """Results of a step's queries, on the way to the ranks that own them."""

    def __init__(self, plan: ContextPlan, step: Step, results: tuple[Tensor, ...]):
        self.plan, self.step, self.results = plan, step, [t.contiguous() for t in results]
        self.buffers: list[list[Tensor]] = []
        sends, receives = [], []
        if step.width > 1:
            route = plan.query_route(step)
            for result in self.results:
                for piece in route.incoming:
                    if piece.source != plan.rank:
                        sends.append(Message(piece.source, result[piece.row : piece.row + piece.rows]))
            for result in self.results:
                for rank, pieces in route.outgoing:
                    heads = plan.schedule.heads_q(step, rank)
                    shape = result.shape[1], heads.stop - heads.start, *result.shape[3:]
                    self.buffers.append([result.new_empty((piece.rows, *shape)) for piece in pieces])
                    if rank != plan.rank:
                        receives += [Message(rank, buffer) for buffer in self.buffers[-1]]
        self.pending = exchange(plan.group, sends, receives)

    def add_to(self, targets: tuple[Tensor, ...]) -> None:
        """Write the results into rows of all heads."""
        self.pending.wait()
        schedule, me = self.plan.schedule, self.plan.rank
        if self.step.width == 1:
            for target, result in zip(targets, self.results, strict=True):
                target[:, :, schedule.heads_q(self.step, me)] = result
            return
        buffers = iter(self.buffers)
        for target, result in zip(targets, self.results, strict=True):
            for rank, pieces in self.plan.query_route(self.step).outgoing:
                heads = schedule.heads_q(self.step, rank)
                for piece, buffer in zip(pieces, next(buffers), strict=True):
                    own = result[piece.row : piece.row + piece.rows] if rank == me else buffer
                    target[piece.source_row : piece.source_row + piece.rows, :, heads] = own


class KeyReturn:
    """Gradients of a step's keys and values, on the way to the ranks that own them."""

    def __init__(self, plan: ContextPlan, step: Step, dkv: Tensor):
        self.plan, self.step, self.dkv = plan, step, dkv.contiguous()
        route = plan.key_route(step)
        self.buffers: list[list[Tensor]] = []
        sends = [
            Message(piece.source, self.dkv[piece.row : piece.row + piece.rows])
            for piece in route.incoming
            if piece.source != plan.rank
        ]
        receives = []
        for rank, pieces in route.outgoing:
            heads = plan.schedule.heads_kv(step, rank)
            shape = dkv.shape[1], heads.stop - heads.start, dkv.shape[3]
            is_own = rank == plan.rank
            self.buffers.append([] if is_own else [dkv.new_empty((piece.rows, *shape)) for piece in pieces])
            receives += [Message(rank, buffer) for buffer in self.buffers[-1]]
        self.pending = exchange(plan.group, sends, receives)

    def add_to(self, target: Tensor) -> None:
        """Add them up, in the order of the ranks, so that sums do not change from run to run."""
        self.pending.wait()
        for (rank, pieces), buffers in zip(self.plan.key_route(self.step).outgoing, self.buffers, strict=True):
            heads = self.plan.schedule.heads_kv(self.step, rank)
            for i, piece in enumerate(pieces):
                own = buffers[i] if buffers else self.dkv[piece.row : piece.row + piece.rows]
                target[piece.source_row : piece.source_row + piece.rows, :, heads] += own
