"""What one rank computes in one step: an ordinary call over the heads, queries and keys that it has there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..namespace import OPERATORS
from ..ops import attention as ops
from ..ops.autocast import without_autocast
from ..ops.quantize import quantized_problem
from ..problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from .exchange import copy, to_device, words
from .layout import Run, visible_keys
from .packed import PackedTables, make_tables
from .plan import ContextPlan
from .schedule import Step


class Terms(NamedTuple):
    """Tensors that every rank has in full, as `onepass.attention` of all tokens takes them.

    Attributes:
        dropout_state: (2,) int64, the same on all ranks.
    """

    sinks: Tensor | None = None
    seqused_k: Tensor | None = None
    seqstart_k: Tensor | None = None
    key_ranges: Tensor | None = None
    query_ranges: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    dropout_state: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The options of a call that are no tensors."""

    softmax_scale: float
    softcap: float | None = None
    deterministic: bool = False
    dropout_p: float = 0.0
    precision: str | None = None
    backend: str | None = None


class DenseCall(NamedTuple):
    """A dense call of a step: the rows of the step's buffers that it reads, and the tokens of these rows.

    Attributes:
        queries, keys: rows of the buffers of q, and of k and v.
        runs: the tokens of the queries. first_key: the token of the first key.
    """

    queries: Run
    keys: Run
    runs: tuple[Run, ...]
    first_key: int

    @property
    def shift(self) -> int:
        """How much later the last query stands than the last key."""
        return (self.runs[-1].stop - self.first_key) - self.keys.size


class OutRows(NamedTuple):
    """What a backward needs to know of out, for each row of q. Tensors have rows first.

    Attributes:
        dout: (rows, batch, heads, head_dim_v). lse: (rows, batch, heads).
        dlse: the gradient of lse, like lse, or None for 0.
        out: like dout. None: the backward runs as if it were 0, and dlse has - dout . out added to it.
    """

    dout: Tensor
    lse: Tensor
    dlse: Tensor | None
    out: Tensor | None

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> OutRows:
        """The tensors by their names. "stats" stands for lse and dlse, in its last dimension, where out is unknown."""
        if "stats" in rows:
            lse, dlse = rows["stats"].unbind(-1)
            return cls(rows["dout"], lse, dlse, None)
        return cls(rows["dout"], rows["lse"], rows.get("dlse"), rows["out"])

    @property
    def known_out(self) -> Tensor:
        return torch.zeros_like(self.dout) if self.out is None else self.out

    def batch_first(self, rows: slice) -> OutRows:
        """The tensors of some rows as a dense call has them."""
        dout, out = (t[rows].transpose(0, 1) for t in (self.dout, self.known_out))
        lse, dlse = (None if t is None else t[rows].permute(1, 2, 0) for t in (self.lse, self.dlse))
        assert lse is not None
        return OutRows(dout, lse, dlse, out)

    def packed(self) -> OutRows:
        """The tensors as a packed call has them."""
        lse, dlse = (None if t is None else t[:, 0].t() for t in (self.lse, self.dlse))
        assert lse is not None
        return OutRows(self.dout[:, 0], lse, dlse, self.known_out[:, 0])


class TermGradients(NamedTuple):
    """The sums of the gradients of terms, in the shapes of the terms, float32 or float64; None: the term has none."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None


class LocalCalls:
    """The calls of one step on one rank.

    Buffers have rows first: q (rows, batch, heads, head_dim), k and v (rows, batch, kv heads, head_dim or head_dim_v).
    """

    def __init__(self, plan: ContextPlan, step: Step, options: Options, terms: Terms):
        self.plan, self.step, self.options, self.terms = plan, step, options, terms
        schedule = plan.schedule
        self.heads = schedule.heads_q(step, plan.rank)
        self.mask, self.sums_keys = schedule.mask, schedule.sums_keys()
        self.documents: Tensor | None = None  # for a packed call, the number of each segment's sequence
        self.counts_rows = counts_rows(options, terms)
        self.needs_positions = terms.alibi_slopes is not None or terms.seqstart_k is not None or self.counts_rows

    # ---------------------------------------------------------------- forward and backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out (rows, batch, heads, head_dim_v) and lse (rows, batch, heads)."""
        if self.plan.is_packed:
            inputs, mask = self._packed_inputs(q, k, v)
            out, lse = self._run(inputs, mask)
            return out[:, None], lse.t()[:, None]
        calls = self._dense_calls()
        if len(calls) == 1:  # it has all rows
            out, lse = self._run(*self._dense_inputs(calls[0], q, k, v))
            return out.transpose(0, 1), lse.permute(2, 0, 1)
        out = q.new_empty((*q.shape[:3], v.shape[-1]))
        lse = q.new_empty(q.shape[:3], dtype=accum_dtype(q.dtype))
        for call in calls:
            own_out, own_lse = self._run(*self._dense_inputs(call, q, k, v))
            copy(words(out[slice(*call.queries)]), words(own_out.transpose(0, 1)))
            lse[slice(*call.queries)] = own_lse.permute(2, 0, 1)
        return out, lse

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, of_out: OutRows, sums: TermGradients
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv. dk and dv are in float32 where the plan adds up several of them.

        Args: sums: the tensors that the gradients of terms are added to.
        """
        key_dtype = accum_dtype(q.dtype) if self.sums_keys else k.dtype
        if self.plan.is_packed:
            inputs, mask = self._packed_inputs(q, k, v)
            dq, dk, dv, *terms = self._run_backward(inputs, mask, of_out.packed(), sums)
            self._add_terms(sums, terms, None)
            return dq[:, None], dk[:, None].to(key_dtype), dv[:, None].to(key_dtype)
        calls = self._dense_calls()
        is_whole = len(calls) == 1 and calls[0].keys.size == k.shape[0]
        if not is_whole:
            dq = torch.empty_like(q)
            dk, dv = (torch.zeros_like(t, dtype=key_dtype) for t in (k, v))
        for call in calls:
            rows, keys = slice(*call.queries), slice(*call.keys)
            inputs, mask = self._dense_inputs(call, q, k, v)
            own_dq, own_dk, own_dv, *terms = self._run_backward(inputs, mask, of_out.batch_first(rows), sums)
            self._add_terms(sums, terms, call)
            own_dq, own_dk, own_dv = (t.transpose(0, 1) for t in (own_dq, own_dk, own_dv))
            if is_whole:
                return own_dq, own_dk.to(key_dtype), own_dv.to(key_dtype)
            copy(words(dq[rows]), words(own_dq))
            dk[keys] += own_dk
            dv[keys] += own_dv
        return dq, dk, dv

    def _add_terms(self, sums: TermGradients, found: Sequence[Tensor | None], call: DenseCall | None) -> None:
        dsinks, dslopes, dbias = found
        if sums.sinks is not None and dsinks is not None:
            sums.sinks[self.heads] += dsinks
        if sums.alibi_slopes is not None and dslopes is not None:
            own = sums.alibi_slopes[..., self.heads]
            if self.documents is not None and own.dim() == 2:
                own.index_add_(0, self.documents, dslopes.to(own.dtype))
            else:
                own += dslopes
        if sums.bias is not None and dbias is not None:
            own = sums.bias[(None,) * (4 - sums.bias.dim())] if call is not None else sums.bias
            own = _heads(own, -3, self.heads)
            if call is not None and own.shape[-1] > 1:
                own = own[..., call.first_key : call.first_key + call.keys.size]
            own += dbias

    # ---------------------------------------------------------------- inputs

    def _dense_calls(self) -> list[DenseCall]:
        """A call for each segment, or for each run of queries of a segment where calls take no positions (FP8).

        A call ends with tiles that do not keep all multiprocessors busy, so one call of two runs is better than two.
        """
        found = []
        for segment in self.plan.segments(self.step):
            row = segment.query_row
            takes_positions = self.options.precision is None
            for runs in [segment.runs] if takes_positions else [(run,) for run in segment.runs]:
                keys = self._keys_of(runs, segment.keys)
                key_row = segment.key_row + keys.start - segment.keys.start
                queries = Run(row, row + sum(run.size for run in runs))
                found.append(DenseCall(queries, Run(key_row, key_row + keys.size), runs, keys.start))
                row = queries.stop
        return found

    def _keys_of(self, runs: Sequence[Run], keys: Run) -> Run:
        """The keys of a segment that some of its runs of queries may see."""
        # a call of several runs needs the keys of all of them, and columns may count from the segment's first key
        if len(runs) > 1 or self.counts_rows or self.terms.seqused_k is not None:
            return keys
        return visible_keys(runs[0], keys, self.mask)

    def _dense_inputs(self, call: DenseCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionInputs, Mask]:
        rows, keys = slice(*call.queries), slice(*call.keys)
        total, count = self.plan.num_tokens, call.keys.size
        q, k, v = q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        used = self.terms.seqused_k
        is_whole = call.queries.size == count == total
        positions = None
        mask = self.mask
        is_permuted = len(call.runs) > 1 and not mask.is_full
        if not is_whole and (is_permuted or self.needs_positions or used is not None):
            positions = self.plan.on_device(
                ("positions", call.runs, call.first_key), q.device, lambda: self._positions(call, q.device)
            )
            if used is not None:
                positions = positions + (used[:, None] - total).clamp(max=0)
        elif call.shift:
            mask = _shifted(mask, call.shift)
        used = None if used is None else (used - call.first_key).clamp(0, count)
        starts = self.terms.seqstart_k
        starts = None if starts is None else (starts - call.first_key).clamp(0, count)
        ranges = self.terms.key_ranges
        if ranges is not None:
            ranges = _heads(ranges, 1, self.heads)
            ranges = torch.cat([ranges[:, :, slice(*run)] for run in call.runs], 2) - call.first_key
        of_keys = self.terms.query_ranges
        if of_keys is not None:
            of_keys = _heads(of_keys, 1, self.heads)[:, :, call.first_key : call.first_key + count]
            # how many rows of the call stand before each end: its runs of queries ascend
            before = [(of_keys - run.start).clamp(0, run.size) for run in call.runs]
            of_keys = torch.stack(before).sum(0, dtype=torch.int32)
        slopes = self.terms.alibi_slopes
        slopes = None if slopes is None else slopes[..., self.heads]
        bias = self.terms.bias
        if bias is not None:
            bias = bias[(None,) * (4 - bias.dim())]
            bias = _heads(bias, 1, self.heads)
            if bias.shape[-1] > 1:
                bias = bias[..., call.first_key : call.first_key + count]
        state = self.terms.dropout_state
        modifiers = Modifiers(starts, ranges, positions, slopes, bias, of_keys, state)
        return self._inputs(q, k, v, None, None, used, modifiers), mask

    @staticmethod
    def _positions(call: DenseCall, device: torch.device) -> Tensor:
        """(1, queries) int32: where the queries of a call stand among its keys."""
        numbers = torch.cat([torch.arange(*run, dtype=torch.int32) for run in call.runs])
        return to_device(numbers[None] - call.first_key, device)

    def _packed_inputs(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[AttentionInputs, Mask]:
        """One call, in which each segment is a sequence."""
        tables = self.plan.on_device(("packed", self.step.width), q.device, lambda: self._tables(q.device))
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        terms, documents, rows = self.terms, tables.documents, tables.row_segments
        self.documents = documents
        used, starts, slopes, bias = terms.seqused_k, terms.seqstart_k, terms.alibi_slopes, terms.bias
        positions = None
        if not tables.is_whole and (
            not (tables.are_aligned or self.mask.is_full) or self.needs_positions or used is not None
        ):
            positions = tables.positions
            if used is not None:
                positions = positions + (used - tables.lengths).clamp(max=0)[documents][rows]
        used, starts = (
            None if t is None else (t[documents] - tables.first_keys).clamp(min=0).minimum(tables.key_counts)
            for t in (used, starts)
        )
        ranges = terms.key_ranges
        if ranges is not None:
            ranges = _heads(ranges, 0, self.heads)[:, tables.tokens] - tables.first_keys[rows][None, :, None]
        if slopes is not None:
            slopes = slopes[..., self.heads]
            slopes = slopes[documents] if slopes.dim() == 2 else slopes
        bias = None if bias is None else _heads(bias, 0, self.heads)
        of_keys = terms.query_ranges
        if of_keys is not None:
            of_keys = tables.rows_of_queries(_heads(of_keys, 0, self.heads), k.shape[0])
        modifiers = Modifiers(starts, ranges, positions, slopes, bias, of_keys, terms.dropout_state)
        return self._inputs(q, k, v, tables.cu_seqlens_q, tables.cu_seqlens_k, used, modifiers), self.mask

    def _tables(self, device: torch.device) -> PackedTables:
        return make_tables(self.plan, self.step, device)

    def _inputs(self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used: Any, modifiers: Modifiers) -> AttentionInputs:
        sinks = None if self.terms.sinks is None else self.terms.sinks[self.heads]
        given = None if all(t is None for t in modifiers) else modifiers
        return AttentionInputs(q, k, v, sinks, cu_q, cu_k, used, given)

    # ---------------------------------------------------------------- calls

    def _problem(self, inputs: AttentionInputs, mask: Mask) -> AttentionProblem:
        options = self.options
        problem = AttentionProblem.of(
            inputs,
            softmax_scale=options.softmax_scale,
            mask=mask,
            softcap=options.softcap,
            deterministic=options.deterministic,
            dropout_p=options.dropout_p,
        )
        if options.dropout_p:
            problem = replace(problem, first_head=self.heads.start, all_heads=self.plan.schedule.num_heads_q)
        return problem

    def _run(self, inputs: AttentionInputs, mask: Mask) -> tuple[Tensor, Tensor]:
        problem, device = self._problem(inputs, mask), inputs.q.device
        if self.options.precision is not None:
            forward = dispatch.require(quantized_problem(problem, exact_lse=True), self.options.backend, None, device)
            options = ops.options_of(problem, dispatch.require(problem, self.options.backend, None, device))
            return OPERATORS.attention_fp8(*inputs[:7], *options, forward, True)
        name = dispatch.require(problem, self.options.backend, None, device)
        with without_autocast(problem.device_type):
            return dispatch.prepare(name, problem, device)(inputs)

    def _run_backward(
        self,
        inputs: AttentionInputs,
        mask: Mask,
        of_out: OutRows,
        sums: TermGradients,
    ) -> tuple:
        """dq, dk, dv, dsinks, dslopes and dbias, None where there is none."""
        problem, device = self._problem(inputs, mask), inputs.q.device
        constant_slopes = problem.has_alibi and sums.alibi_slopes is None
        constant_bias = problem.has_bias and sums.bias is None
        problem = replace(
            problem, constant_slopes=constant_slopes, constant_bias=constant_bias, float32_dkv=self.sums_keys
        )
        name = dispatch.require(problem, self.options.backend, None, device)
        module = dispatch.load_backward(name, problem)
        with without_autocast(problem.device_type):
            dlse = None if of_out.dlse is None else of_out.dlse.contiguous()
            found = module.gradients(problem, inputs, of_out.out, of_out.lse.contiguous(), of_out.dout, dlse)
        dq, dk, dv, dsinks, *terms = (*found, None, None)[:6]
        return dq, dk, dv, (None if inputs.sinks is None else dsinks), *terms


def counts_rows(options: Options, terms: Terms) -> bool:
    """Whether the result of a query depends on its number, because of random bits or of rows of a bias."""
    bias = terms.bias
    return options.dropout_p > 0 or (bias is not None and bias.dim() > 1 and bias.shape[-2] > 1)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _shifted(mask: Mask, shift: int) -> Mask:
    """The mask of queries of which the last one stands `shift` keys later than the last key."""
    left = None if mask.window_left is None else mask.window_left - shift
    return Mask(left, None if mask.window_right is None else mask.window_right + shift)


def _heads(t: Tensor, dim: int, heads: slice) -> Tensor:
    """Some heads of a tensor, or the whole tensor if it has one entry for all heads."""
    return t if t.shape[dim] == 1 else t.narrow(dim, heads.start, heads.stop - heads.start)
