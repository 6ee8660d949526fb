"""The effect that one rounding of every intermediate can have: the floor under error budgets in degenerate cases.

Where terms cancel (one key: ds = p (dp - delta) = 0 whatever the data), plain PyTorch may be exact by luck, and a
multiple of its error is no budget. The floor then comes from the terms before they cancel: the sum of their absolute
values, each off by one rounding of the accumulation dtype. A wrong mask, scale or head is off by orders of magnitude
more, and so are TF32 or bfloat16 products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..problem import Mask

TERMS = "alibi_slopes", "bias"  # that are added to scores
PAIR_OPTIONS = (  # of `reference.pairs_of`
    "seqused_k",
    "seqstart_k",
    "key_ranges",
    "query_ranges",
    "query_ranges_of_positions",
    "block_mask",
    "q_positions",
    "dropout_p",
    "dropout_state",
    "first_entry",
)
# Kernels compute 2^x and the logarithm of a sum with ex2.approx and lg2.approx, each off by up to 2^-22, which is two
# roundings of float32 (PTX ISA). The functions of a CPU are off by about one rounding.
GPU_EXPONENTIAL = 4


def rounding_terms(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, oracle: reference.Reference, **options
) -> dict[str, Tensor]:
    """Sums of absolute terms in out and all gradients of one dense call, for each element or row of elements.

    All gradients but dv are made from delta = dout . out, and out has been rounded to its dtype. The errors of this
    rounding are larger, but independent of one another: "dq of out" and so on are the roots of the sums of their
    squares, times 2, for one rounding of out. They show where one probability of a row is close to 1 and all others are
    close to 0.

    "dv of steps" and so on are what float16 loses of small probabilities and of ds before a matrix product: below its
    normal numbers its numbers are equally far apart.

    Args: those of `reference.attention`, the gradients of out and lse, and the oracle's result for the call. Without
        these gradients the terms are those in out alone.

    Returns: float64 tensors that broadcast to out, dq, dk, dv, and dsinks, dalibi_slopes and dbias if they exist.
    """
    num_heads_q, head_dim = q.shape[2:]
    group = num_heads_q // max(1, k.shape[2])
    scale = abs(options.get("softmax_scale") or head_dim**-0.5)
    softcap, sinks = options.get("softcap"), options.get("sinks")
    step = torch.finfo(q.dtype).smallest_normal * torch.finfo(q.dtype).eps
    q, k, v, out = (x.detach().double().transpose(1, 2) for x in (q, k, v, oracle.out))
    lse = oracle.lse.detach().double()[..., None]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = Mask.from_options(options.get("causal", False), options.get("window"))
    terms_of = {n: options[n].detach().double().requires_grad_() for n in TERMS if options.get(n) is not None}
    pair_options = {n: options.get(n) for n in PAIR_OPTIONS} | terms_of
    pairs = reference.pairs_of(q, k, mask, **{n: value for n, value in pair_options.items() if value is not None})
    is_empty = lse == -torch.inf
    lse = torch.where(is_empty, 0.0, lse)

    s = q @ k.mT * (options.get("softmax_scale") or head_dim**-0.5)
    s_terms = scale * q.abs() @ k.abs().mT
    if softcap is not None:
        s, s_terms = softcap * torch.tanh(s / softcap), s_terms.clamp(max=2 * softcap)
    if pairs.terms is not None:
        s, s_terms = s + pairs.terms.detach(), s_terms + pairs.terms.detach().abs()
    p = torch.where(pairs.visible, torch.exp(s - lse), 0.0)
    # relative error of p: the absolute error of the exponent s - lse, and that of exponential and logarithm
    p_terms = p * ((GPU_EXPONENTIAL if q.is_cuda else 1) + s_terms + lse.abs())
    kept = 1.0 if pairs.kept is None else pairs.kept
    # what the rounding of probabilities to a step loses
    lost = p.clamp(max=step)
    terms = {"out": (p_terms * kept) @ v.abs(), "out of steps": (lost * kept) @ v.abs()}
    if dout is None or dlse is None:
        return {name: x.transpose(1, 2) for name, x in terms.items()}

    dout, dlse = dout.detach().double().transpose(1, 2), dlse.detach().double()[..., None]
    dp, delta = dout @ v.mT * kept, (dout * out).sum(-1, keepdim=True) - dlse
    dp_terms, delta_terms = dout.abs() @ v.abs().mT * kept, (dout * out).abs().sum(-1, keepdim=True) + dlse.abs()
    ds_terms = p * (dp_terms + delta_terms) + p_terms * (dp - delta).abs()
    delta_terms = torch.where(is_empty, 0.0, delta_terms)

    def over_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2) if group else x

    # the error of delta, and so of each ds / p in its row
    delta_of_out = torch.where(is_empty, 0.0, (dout * out).square().sum(-1, keepdim=True).sqrt())
    ds_of_out = p * delta_of_out

    lost_ds = (p * (dp - delta)).abs().clamp(max=step)  # ds are rounded to a step, too

    terms |= {
        "dq": scale * ds_terms @ k.abs(),
        "dk": scale * over_group(ds_terms.mT @ q.abs()),
        "dv": over_group((p_terms * kept).mT @ dout.abs()),
        "dq of out": 2 * scale * (ds_of_out @ k).abs(),  # one error for the whole row
        "dk of out": 2 * scale * over_group(ds_of_out.square().mT @ q.square()).sqrt(),
        "dq of steps": scale * lost_ds @ k.abs(),
        "dk of steps": scale * over_group(lost_ds.mT @ q.abs()),
        "dv of steps": over_group((lost * kept).mT @ dout.abs()),
    }
    terms = {name: x.transpose(1, 2) for name, x in terms.items()}
    if sinks is not None:
        sink = sinks.detach().double()[None, :, None, None]
        p_sink = torch.where(is_empty, 0.0, torch.exp(sink - lse))
        # a sink of -inf: 0 * inf
        p_sink_terms = torch.where(p_sink == 0, 0.0, p_sink * (1 + sink.abs() + lse.abs()))
        terms["dsinks"] = (p_sink_terms * delta_terms).sum((0, 2, 3))
        terms["dsinks of out"] = 2 * (p_sink * delta_of_out).square().sum((0, 2, 3)).sqrt()
    for name, t in terms_of.items():
        assert pairs.terms is not None
        # an element of them adds to many scores: what it multiplies there is the derivative of the sum of all scores
        factor = pairs.distance if name == "alibi_slopes" else 1
        for label, summed in (("", ds_terms), (" of out", factor * ds_of_out.square())):
            weights = summed.expand(torch.broadcast_shapes(summed.shape, pairs.terms.shape))
            (found,) = torch.autograd.grad((pairs.terms * weights).sum(), t, retain_graph=True)
            terms[f"d{name}{label}"] = found.abs() if not label else 2 * found.abs().sqrt()
    return terms


def floor_of_out(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, oracle: reference.Reference, **options) -> Tensor:
    """The error that rounding alone may cause in each element of out of one dense call.

    Problems of few values need it, too: there the largest error of plain PyTorch may be small by chance, while another
    order of the same sums, which another processor's matrix product has, is off by its rounding.

    Args:
        dtype: the dtype of the call under test.
        q, k, v, options: the arguments of `reference.attention`.
        oracle: its result for them.
    """
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    terms = rounding_terms(q.to(dtype), k, v, None, None, oracle, **options)
    return eps * terms["out"] + terms["out of steps"]
