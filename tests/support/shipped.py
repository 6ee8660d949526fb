"""The rows of the heuristics' tables, with a problem that each was made for."""

from typing import NamedTuple

import torch

from onepass.kernels.config import ForwardConfigSm90
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.problem import AttentionProblem, Mask

CAUSAL = Mask(None, 0)


class ShippedRow(NamedTuple):
    """A row of a table with one of its masks.

    Attributes:
        shortest, longest: the range of lengths that the row is for.
    """

    name: str
    problem: AttentionProblem
    config: ForwardConfigSm90
    shortest: int
    longest: int


def problem(head_dim, head_dim_v, seqlen=512, dtype=torch.bfloat16, mask=CAUSAL, num_heads_kv=4, **options):
    return AttentionProblem(
        dtype=dtype,
        device_type="cuda",
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads_q=4,
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=head_dim**-0.5,
        mask=mask,
        **options,
    )


def _rows():
    for (head_dim, head_dim_v), table in heuristics.FORWARD_SM90.items():
        dims = f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"
        for is_causal in (False, True):
            shortest = 1
            for row in table:
                if row.causal not in (None, is_causal):
                    continue
                bound = f" to {row.up_to}" if row.up_to < heuristics.LONG else f" from {shortest}"
                name = f"{dims}{' causal' if is_causal else ''}{bound}"
                asked = problem(head_dim, head_dim_v, shortest, mask=CAUSAL if is_causal else Mask())
                yield ShippedRow(name, asked, row.config, shortest, row.up_to)
                shortest = row.up_to + 1


ROWS = tuple(_rows())
