"""The check of every contender before it is timed: is its result right? Rows are sampled, so that the check is cheap.

For sampled queries, out and dq need one row of the score matrix each. For sampled keys, dk and dv need one column
each, and the row sums of all queries, which are streamed in chunks, so that memory stays linear in the length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..testing.budget import GRADIENT_FACTOR, OUT_FACTOR, Comparison, compare
from ..testing.rounding import rounding_terms
from .cases import Case, Inputs

# A peer that rounds more often than onepass is still a peer: the check is there to find wrong results, which are off by
# orders of magnitude. onepass itself is held to its own budget.
PEER_FACTOR = 8.0
# The number of sampled rows that are judged together: a quarter of the sample, so that a fault in the late rows of a
# causal case, whose values are small, is not measured by the early rows.
SAMPLED_BLOCK = 16
# The number of pairs of a chunk: small enough for a CPU's cache, large enough for a GPU.
_CHUNK_PAIRS = {"cpu": 2**20, "cuda": 2**26}
_MOST_PAIRS = 2**24  # pairs of the largest sample whose rounding is estimated


class Sample(NamedTuple):
    """Rows of one batch entry and kv head (with all query heads that it serves)."""

    batch: int
    kv_head: int
    queries: Tensor
    keys: Tensor


def choose_samples(case: Case, rows: int = 64) -> list[Sample]:
    """Samples of the first and the last batch entry and head: rows at both ends, where masks cut, and in between."""

    def indices(count: int) -> Tensor:
        return torch.linspace(0, count - 1, min(count, rows)).round().long().unique()

    corners = sorted({(0, 0), (case.batch - 1, case.heads_kv - 1)})
    return [Sample(b, h, indices(case.seqlen_q), indices(case.seqlen_k)) for b, h in corners]


def expected_rows(case: Case, inputs: Inputs, sample: Sample, compute_dtype: torch.dtype) -> dict[str, Tensor]:
    """The sampled rows of out, or of dq, dk and dv, by the definition.

    Args:
        compute_dtype: the dtype of every intermediate: float64 for the oracle, the inputs' own for the errors that
            plain PyTorch has.

    Returns: "out" and "dq" as (group, queries, dim), "dk" and "dv" as (keys, dim).
    """
    group = case.heads_q // case.heads_kv
    heads = slice(sample.kv_head * group, (sample.kv_head + 1) * group)
    q, dout = (x[sample.batch, :, heads].transpose(0, 1).to(compute_dtype) for x in (inputs.q, inputs.dout))
    k, v = (x[sample.batch, :, sample.kv_head].to(compute_dtype) for x in (inputs.k, inputs.v))
    scale = case.head_dim**-0.5
    device = q.device
    queries, keys = sample.queries.to(device), sample.keys.to(device)

    def probabilities(rows: Tensor) -> Tensor:
        """(group, rows, seqlen_k); a row that sees no key is all zeros."""
        scores = (q[:, rows] * scale) @ k.T
        if case.causal or case.window is not None:
            hidden = _hidden(case, rows)
            return scores.masked_fill_(hidden, -torch.inf).softmax(-1).masked_fill_(hidden, 0.0)
        return scores.softmax(-1)

    if case.direction == "fwd":
        return {"out": probabilities(queries) @ v}

    # ds = p (dp - delta), dp = dout . v, delta = dout . out
    p = probabilities(queries)
    delta = (dout[:, queries] * (p @ v)).sum(-1, keepdim=True)
    dq = p * (dout[:, queries] @ v.T - delta) @ k * scale

    # sums over chunks are at least in float32, as a single GEMM over all queries would accumulate them
    accum = torch.promote_types(compute_dtype, torch.float32)
    dk = torch.zeros(len(keys), case.head_dim, dtype=accum, device=device)
    dv = torch.zeros(len(keys), case.head_dim_v, dtype=accum, device=device)
    chunk_rows = max(16, _CHUNK_PAIRS.get(device.type, 2**20) // (group * case.seqlen_k))
    for rows in torch.arange(case.seqlen_q, device=device).split(chunk_rows):
        p = probabilities(rows)
        delta = (dout[:, rows] * (p @ v)).sum(-1, keepdim=True)
        p = p[..., keys]
        ds = p * (dout[:, rows] @ v[keys].T - delta)
        dk += torch.einsum("gmn,gmd->nd", ds, q[:, rows]).to(accum) * scale
        dv += torch.einsum("gmn,gmd->nd", p, dout[:, rows]).to(accum)
    return {"dq": dq, "dk": dk.to(compute_dtype), "dv": dv.to(compute_dtype)}


def _hidden(case: Case, rows: Tensor) -> Tensor:
    """A (rows, seqlen_k) mask that is True where the query must not see the key."""
    position = rows[:, None] + (case.seqlen_k - case.seqlen_q)
    j = torch.arange(case.seqlen_k, device=rows.device)[None, :]
    hidden = torch.zeros(len(rows), case.seqlen_k, dtype=torch.bool, device=rows.device)
    if case.causal:
        hidden |= j > position
    left, right = case.window if case.window is not None else (None, None)
    if left is not None:
        hidden |= j < position - left
    if right is not None:
        hidden |= j > position + right
    return hidden


class Oracle:
    """The sampled rows of one case, in float64 and as plain PyTorch computes them in the case's own dtype."""

    def __init__(self, case: Case, inputs: Inputs):
        self.case = case
        self.samples = choose_samples(case)
        plain_dtype = torch.float32 if case.torch_dtype == torch.float64 else case.torch_dtype
        self._exact = [expected_rows(case, inputs, s, torch.float64) for s in self.samples]
        self._plain = [expected_rows(case, inputs, s, plain_dtype) for s in self.samples]
        self._floors = [_floors(case, inputs, s) for s in self.samples]

    def compare(self, results: Mapping[str, Tensor], is_peer: bool) -> list[Comparison]:
        """One Comparison for each tensor of `results` (as `Prepared.results` gives them)."""
        rows = []
        group = self.case.heads_q // self.case.heads_kv
        for name, tensor in results.items():
            factor = PEER_FACTOR if is_peer else OUT_FACTOR if name == "out" else GRADIENT_FACTOR
            actual = []
            for sample in self.samples:
                if name in ("out", "dq"):
                    heads = slice(sample.kv_head * group, (sample.kv_head + 1) * group)
                    picked = tensor[sample.batch, :, heads].transpose(0, 1)[:, sample.queries.to(tensor.device)]
                else:
                    picked = tensor[sample.batch, sample.keys.to(tensor.device), sample.kv_head]
                actual.append(picked)
            exact, plain = (_as_heads([rows[name] for rows in samples]) for samples in (self._exact, self._plain))
            found = [floors[name] for floors in self._floors if name in floors]
            floor = _as_heads(found) if found else 0.0
            rows.append(compare(name, _as_heads(actual), exact, plain, factor, floor, block_rows=SAMPLED_BLOCK))
        return rows


def _floors(case: Case, inputs: Inputs, sample: Sample) -> dict[str, Tensor]:
    """What rounding alone may do to the sampled rows of out and dq, see `rounding_terms`: (group, rows, dim).

    The result is empty for samples of many pairs: among so many values, plain PyTorch's largest error is no matter of
    chance.
    """
    group, device = case.heads_q // case.heads_kv, inputs.q.device
    if group * len(sample.queries) * case.seqlen_k > _MOST_PAIRS:
        return {}
    rows = sample.queries.to(device)
    heads = slice(sample.kv_head * group, (sample.kv_head + 1) * group)
    q, dout = (x[sample.batch][None, rows, heads].detach() for x in (inputs.q, inputs.dout))
    k, v = (x[sample.batch, :, sample.kv_head].detach()[None, :, None] for x in (inputs.k, inputs.v))
    positions = (rows + (case.seqlen_k - case.seqlen_q)).int()[None]
    options: dict[str, Any] = {"causal": case.causal, "window": case.window, "q_positions": positions}
    oracle = reference.attention(q, k, v, compute_dtype=torch.float64, **options)
    terms = rounding_terms(q, k, v, dout, torch.zeros_like(oracle.lse), oracle, **options)
    eps = torch.finfo(torch.promote_types(case.torch_dtype, torch.float32)).eps
    out_eps = torch.finfo(case.torch_dtype).eps
    floors = {
        "out": eps * terms["out"] + terms["out of steps"],
        "dq": eps * terms["dq"] + out_eps * terms["dq of out"] + terms["dq of steps"],
    }
    return {name: floor[0].transpose(0, 1) for name, floor in floors.items()}


def _as_heads(samples: list[Tensor]) -> Tensor:
    """The rows of every sample in the form that `compare` takes: (rows, heads of all samples, dim)."""
    return torch.cat([x.reshape(-1, *x.shape[-2:]) for x in samples]).transpose(0, 1)
