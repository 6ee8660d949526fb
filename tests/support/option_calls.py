"""Calls with one of the options that few calls have, on any device, for tests of all that surrounds a call."""

from __future__ import annotations

from typing import Any

import torch

import onepass

INT32 = torch.int32
OPTIONS = ("seqstart_k", "key_ranges", "q_positions", "alibi_slopes", "bias", "dropout_p", "all")
FUNCTIONS = ("attention", "attention_varlen", "attention_decode")
# attention_decode has no dropout
CALLS = [(f, o) for f in FUNCTIONS for o in OPTIONS if (f, o) != ("attention_decode", "dropout_p")]
BATCH, ROWS, KEYS, HEADS, HEADS_KV = 2, 70, 150, 4, 2
DROPOUT_P = 0.25


def option_call(
    function: str, option: str, device: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, rows: int = ROWS
) -> dict[str, Any]:
    """The arguments of a causal call by name. Args: function: of FUNCTIONS. option: of OPTIONS; "all": all of them.

    On the "meta" device they have shapes alone. `cache_seqlens` has the lengths of `attention_decode`.
    """
    generator = torch.Generator().manual_seed(0)
    is_packed, is_decode = function == "attention_varlen", function == "attention_decode"
    lead = () if is_packed else (BATCH,)
    if is_packed:
        rows *= BATCH
    keys = KEYS * BATCH if is_packed else KEYS

    def randn(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    k_name, v_name = ("k_cache", "v_cache") if is_decode else ("k", "v")
    found: dict[str, Any] = {
        "q": randn(*lead, rows, HEADS, head_dim),
        k_name: randn(*lead, keys, HEADS_KV, head_dim),
        v_name: randn(*lead, keys, HEADS_KV, head_dim),
        "causal": True,
    }
    if is_packed:
        found["cu_seqlens_q"] = torch.tensor([0, rows // BATCH - 9, rows], dtype=INT32)
        found["cu_seqlens_k"] = torch.tensor([0, KEYS + 30, keys], dtype=INT32)
    if is_decode:
        found["cache_seqlens"] = torch.tensor([KEYS, KEYS - 40], dtype=INT32)

    options: dict[str, Any] = {"seqstart_k": torch.tensor([20, 33], dtype=INT32)}
    low = torch.randint(0, KEYS // 3, (*lead, HEADS, rows, 1), generator=generator)
    options["key_ranges"] = torch.cat([low, low + KEYS // 2], -1).int()
    positions = torch.arange(rows) % ROWS + KEYS // 4
    options["q_positions"] = positions.int().expand(*lead, rows).contiguous()
    options["alibi_slopes"] = torch.rand(HEADS, generator=generator) * 0.1
    num_rows = max(rows, int(positions.max()) + 1) if option == "all" else rows  # rows of a bias are positions there
    options["bias"] = randn(*lead, 1, num_rows, KEYS + 30 if is_packed else KEYS)
    if not is_decode:
        options["dropout_p"] = DROPOUT_P
    found |= options if option == "all" else {option: options[option]}
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in found.items()}


def differentiable(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that have a gradient."""
    return {n: arguments[n] for n in ("q", "k", "v", "alibi_slopes", "bias") if n in arguments}


def run(function: str, arguments: dict[str, Any], seed: int = 0, **options: Any) -> tuple[torch.Tensor, ...]:
    """out, lse and, where tensors require one, their gradients. Args: seed: of torch's generators, for dropout."""
    torch.manual_seed(seed)
    out, lse = getattr(onepass, function)(**arguments, **options, return_lse=True)
    leaves = [t for t in differentiable(arguments).values() if t.requires_grad]
    if not leaves:
        return out, lse
    loss = out.float().sin().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


def with_leaves(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, whose differentiable tensors require a gradient."""
    return arguments | {n: t.detach().requires_grad_() for n, t in differentiable(arguments).items()}
