"""Random arguments that few calls have: ranges of keys and queries, positions, left padding, ALiBi, bias, dropout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NAMES = ("seqstart_k", "key_ranges", "q_positions", "alibi_slopes", "bias", "query_ranges", "dropout_p")
OF_KERNELS = tuple(name for name in NAMES if name != "query_ranges")


def random_modifiers(
    seed: int,
    *,
    dtype: torch.dtype,
    heads: int,
    rows: int,
    lengths: Sequence[int],
    columns: int,
    rows_k: int | None,
    is_packed: bool,
    names: Sequence[str] = NAMES,
) -> dict[str, Any]:
    """Some of the arguments for a call; none for half of the seeds. Equal arguments give equal results.

    Args:
        dtype: of q.
        rows: seqlen_q, or total_q of packed queries.
        lengths: the number of keys of each batch entry or sequence.
        columns: of a bias that has one for each key.
        rows_k: rows of k, total_k of packed sequences; None: the call has a cache of as many keys as columns.
        names: which arguments there may be. The others do not depend on whether query_ranges is among them.
    """
    rng, generator = random.Random(f"{seed}, modifiers"), torch.Generator().manual_seed(seed)
    if rng.random() < 0.5:
        return {}
    first = [name for name in names if name != "query_ranges"]
    chosen = {name for name in first if rng.random() < 0.35} or {rng.choice(first)}
    batch, num_positions = len(lengths), max(rows, columns) + 3
    lead = () if is_packed else (rng.choice([1, batch]),)
    found: dict[str, Any] = {}
    layouts = random.Random(f"{seed}, layouts of modifiers")

    def integers(least: int, below: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(least, below, shape, generator=generator, dtype=torch.int32)

    if "seqstart_k" in chosen:
        starts = [rng.choice([0, rng.randint(0, n), rng.randint(0, n), n]) for n in lengths]
        found["seqstart_k"] = torch.tensor(starts, dtype=torch.int32)
    if "key_ranges" in chosen:
        low = integers(-3, columns + 3, (*lead, rng.choice([1, heads]), rows, 1))
        low = low.sort(-2).values if rng.random() < 0.5 else low  # as of documents
        found["key_ranges"] = torch.cat([low, low + integers(0, columns + 1, low.shape)], -1)
    if "q_positions" in chosen:
        positions = [torch.randperm(num_positions, generator=generator)[:rows] for _ in range(lead[0] if lead else 1)]
        positions = [p.sort().values if rng.random() < 0.5 else p for p in positions]  # as of a shard
        first = layouts.choice([0, 0, -5, num_positions - 4])  # some before all keys, or past the rows of a bias
        found["q_positions"] = torch.stack(positions).int().view(*lead, rows) + first
    if "alibi_slopes" in chosen:
        shape = rng.choice([(heads,), (batch, heads)])
        found["alibi_slopes"] = 0.3 * torch.rand(shape, generator=generator, dtype=torch.float32)
        if layouts.random() < 0.3:
            found["alibi_slopes"] = found["alibi_slopes"] - 0.15  # slopes below 0 favor keys far away
    if "bias" in chosen:
        bias_rows = rng.choice([1, num_positions if "q_positions" in chosen else rows])
        shape = (*lead, rng.choice([1, heads]), bias_rows, rng.choice([1, columns, columns]))
        bias = torch.randn(shape, generator=generator, dtype=torch.float32)
        if rng.random() < 0.4:
            bias[torch.rand(shape, generator=generator, dtype=torch.float32) < 0.3] = -torch.inf
        found["bias"] = bias.to(rng.choice([dtype, dtype, torch.float32]))
    if "dropout_p" in chosen:
        found["dropout_p"] = rng.choice([0.1, 0.5, 0.9])
    own = random.Random(f"{seed}, query ranges")
    if "query_ranges" in names and own.random() < 0.35:
        has_cache = rows_k is None
        lead = () if is_packed and not has_cache else (own.choice([1, batch]),)
        end = columns if has_cache or "q_positions" in found else rows  # of what they count: positions, or rows of q
        low = integers(-3, end + 1, (*lead, own.choice([1, heads]), columns if rows_k is None else rows_k, 1))
        low = low.sort(-2).values if own.random() < 0.5 else low
        found["query_ranges"] = torch.cat([low, low + integers(0, end + 3, low.shape)], -1)
    return {n: _laid_out(layouts, x) if isinstance(x, Tensor) and x.dim() > 1 else x for n, x in found.items()}


def with_layout_on(t: Tensor, device: str) -> Tensor:
    """A copy of a tensor and of its gaps on a device, with equal strides: `Tensor.to` would close the gaps."""
    memory = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return memory.to(device, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def _laid_out(rng: random.Random, t: Tensor) -> Tensor:
    """A tensor of this shape in a random layout: with gaps, dimensions in another order, or broadcast along one."""
    layout = rng.choice(["contiguous", "contiguous", "sliced", "transposed", "broadcast"])
    if layout == "sliced":
        return torch.stack([t, t], -1)[..., 0]
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "broadcast":
        dim = rng.randrange(t.dim() - 1)
        return t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape)
    return t
