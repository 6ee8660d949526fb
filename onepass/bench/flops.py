"""How much work a case is: the only place with formulas of FLOPs and bytes."""

from __future__ import annotations

from ..geometry.block_range import count_visible_pairs
from ..problem import Mask
from .cases import Case


def visible_pairs(case: Case) -> int:
    """Unmasked (query, key) pairs of one head of one batch entry.

    The convention of the papers halves seqlen^2 when causal. Here the pairs are counted exactly; for a square causal
    problem that is seqlen (seqlen + 1) / 2, more than half by the factor 1 + 1 / seqlen.
    """
    mask = Mask.from_options(case.causal, case.window)
    return count_visible_pairs(case.seqlen_q, case.seqlen_k, mask.window_left, mask.window_right)


def flops(case: Case) -> int:
    """Multiplications and additions of the GEMMs over visible pairs; softmax and masks do not count.

    Forward: Q K^T over head_dim, P V over head_dim_v. Backward by recomputation: S, dQ, dK over head_dim and dP, dV
    over head_dim_v, which is 2.5 times the forward if head_dim_v = head_dim.
    """
    pairs = visible_pairs(case) * case.batch * case.heads_q
    return flops_of_pairs(pairs, case.direction, case.head_dim, case.head_dim_v)


def flops_of_pairs(pairs: int, direction: str, head_dim: int, head_dim_v: int) -> int:
    """The FLOPs of visible pairs, summed over heads, in one direction: "fwd" or "bwd"."""
    if direction == "fwd":
        return 2 * pairs * (head_dim + head_dim_v)
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def _tensor_bytes(case: Case) -> dict[str, int]:
    element_bytes = case.torch_dtype.itemsize
    rows_q, rows_kv = case.batch * case.seqlen_q * case.heads_q, case.batch * case.seqlen_k * case.heads_kv
    return {
        "q": rows_q * case.head_dim * element_bytes,
        "k": rows_kv * case.head_dim * element_bytes,
        "v": rows_kv * case.head_dim_v * element_bytes,
        "out": rows_q * case.head_dim_v * element_bytes,
        "lse": rows_q * max(4, element_bytes),  # float32, float64 for float64 inputs
    }


def kv_bytes(case: Case) -> int:
    """The bytes of all keys and values."""
    size = _tensor_bytes(case)
    return size["k"] + size["v"]


def output_bytes(case: Case) -> int:
    """The bytes that the pass has to write: out and lse, or dq, dk and dv."""
    size = _tensor_bytes(case)
    return size["out"] + size["lse"] if case.direction == "fwd" else size["q"] + size["k"] + size["v"]


def bytes_moved(case: Case) -> int:
    """The least memory traffic: each input is read once and each output is written once.

    Forward reads q, k, v and writes out, lse. Backward reads q, k, v, out, lse, dout and writes dq, dk, dv.
    """
    size = _tensor_bytes(case)
    inputs = size["q"] + size["k"] + size["v"]
    if case.direction == "bwd":
        inputs += 2 * size["out"] + size["lse"]  # dout has the size of out
    return inputs + output_bytes(case)


def score_matrix_bytes(case: Case) -> int:
    """The bytes that a materialized score matrix of all heads would take, which one pass avoids."""
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * case.torch_dtype.itemsize
