"""Masks as arguments of `attention`, and pictures of masks.

A function of a mask returns the arguments that say it, `key_ranges` (the keys that each query sees) or `query_ranges`
(the queries that see each key), by their names:

    from onepass import masks

    out = onepass.attention(q, k, v, **masks.prefix(seqlen, 100))

A query sees what all arguments of its call leave, so masks combine with causal, windows, lengths and with each other.
Queries are as many as keys, unless a function says otherwise. Ranges are on the device of the tensors that a function
gets, or on `device`, which must be q's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .validation.block_mask import kinds_of

Integers = Sequence[Any] | Tensor
LAST = 2**31 - 1  # the end of an interval without an end


def _ranges(low: Tensor, high: Tensor) -> Tensor:
    """(seqlen,) or (batch, seqlen) each -> (batch or 1, 1, seqlen, 2) int32."""
    ranges = torch.stack(torch.broadcast_tensors(low, high), -1).int()
    return (ranges if ranges.dim() == 3 else ranges[None])[:, None]


# ---------------------------------------------------------------- trees


def tree(parents: Integers, lengths: Integers | None = None, device: torch.device | None = None) -> dict[str, Tensor]:
    """The mask of a tree: each token sees itself, the tokens before it in its node, and its ancestors.

        >>> tree([-1, 0, 1, 0, 3])["query_ranges"][0, 0].tolist()
        [[0, 5], [1, 3], [2, 3], [3, 5], [4, 5]]

    Args:
        parents: (nodes,), or (batch, nodes): the number of each node's parent, -1 for a root. Nodes are in depth-first
            order: the descendants of a node come right after it (`depth_first` brings them into it).
        lengths: in the shape of parents: how many tokens each node has; None = 1. The nodes of all batch entries have
            equally many tokens together.
        device: of the result; None = that of parents.

    Returns: query_ranges, (batch or 1, 1, tokens, 2). No other mask is needed: key j is seen by queries from j on.

    Raises: ValueError for nodes that are not in depth-first order, and for lengths that do not fit.
    """
    numbers = torch.as_tensor(parents)
    device = numbers.device if device is None else device
    rows = (numbers[None] if numbers.dim() == 1 else numbers).tolist()
    ends = torch.tensor([_ends_of_subtrees(row) for row in rows])
    counts = torch.ones_like(ends) if lengths is None else torch.as_tensor(lengths).to("cpu", torch.int64)
    if counts.numel() != ends.numel():
        raise ValueError(f"lengths: expected shape {tuple(numbers.shape)} like parents, got {tuple(counts.shape)}")
    counts = counts.view(ends.shape)
    totals = counts.sum(1)
    if (counts < 0).any() or (totals != totals[:1]).any():
        raise ValueError(
            f"lengths: expected numbers of at least 0 with one sum for all batch entries, got {counts.tolist()}"
        )
    starts = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    token_ends = starts.gather(1, ends)
    high = torch.stack([e.repeat_interleave(n) for e, n in zip(token_ends, counts, strict=True)])
    return {"query_ranges": _ranges(torch.arange(high.shape[1]), high).to(device)}


def _ends_of_subtrees(parents: list[int]) -> list[int]:
    """For each node the number of the first node after its descendants."""
    path: list[int] = []  # from the root to the last node
    ends = [len(parents)] * len(parents)
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = node
        if not path and parent != -1:
            raise ValueError(
                f"parents: expected depth-first order, in which the parent of node {node} is -1, the node before it or "
                f"one of that node's ancestors, got {parent}"
            )
        path.append(node)
    return ends


def depth_first(parents: Integers) -> tuple[Tensor, Tensor]:
    """Nodes in depth-first order, for `tree`: a draft in which nodes are ordered by depth, for example.

        >>> order, parents = depth_first([-1, 0, 0, 1, 2])
        >>> order.tolist(), parents.tolist()
        ([0, 1, 3, 2, 4], [-1, 0, 1, 0, 3])

    Args: parents: (nodes,): the number of each node's parent, -1 for a root; any order.

    Returns: order (nodes,) int64, the old number of each node in the new order, so that `q[:, order]` are its queries;
    and the parents in the new order and numbers.

    Raises: ValueError for parents that are no tree.
    """
    numbers = torch.as_tensor(parents)
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(numbers.tolist()):
        children.setdefault(parent, []).append(node)
    order, waiting = [], children.get(-1, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    if len(order) != numbers.numel():
        raise ValueError(f"parents: expected a way from each node to a root, of parent -1, got {numbers.tolist()}")
    place = {-1: -1} | {node: i for i, node in enumerate(order)}
    moved = [place[parent] for parent in numbers[order].tolist()]
    return torch.tensor(order, device=numbers.device), torch.tensor(moved, device=numbers.device)


def rollouts(prompt: int, lengths: Integers, device: torch.device | None = None) -> dict[str, Tensor]:
    """The mask of a prompt and of answers to it, which follow each other in one sequence: a tree of two levels.

        >>> rollouts(2, [2, 1])["query_ranges"][0, 0].tolist()
        [[0, 5], [1, 5], [2, 4], [3, 4], [4, 5]]

    Args: prompt: tokens of the prompt. lengths: (rollouts,) tokens of each answer.

    Returns: query_ranges, (1, 1, tokens, 2). All is causal, and no answer sees another one.
    """
    counts = torch.as_tensor(lengths)
    device = counts.device if device is None else device
    counts = torch.cat((torch.tensor([prompt]), counts.cpu()))
    return tree([-1] + [0] * (len(counts) - 1), counts, device)


def over_cache(query_ranges: Tensor, cache_seqlens: Tensor, capacity: int) -> dict[str, Tensor]:
    """The mask of new tokens behind the tokens of a cache, for `attention_decode`: a draft that is verified.

        >>> draft = tree([-1, 0, 0])["query_ranges"]
        >>> over_cache(draft, torch.tensor([2]), 6)["query_ranges"][0, 0, 2:5].tolist()
        [[2, 5], [3, 4], [4, 5]]

    Args:
        query_ranges: (batch or 1, num_heads_q or 1, tokens, 2): of the new tokens alone, counted from the first one.
        cache_seqlens: (batch,): the number of keys before the new tokens; all new tokens see all of them.
        capacity: the number of positions of the cache.

    Returns: query_ranges, (batch, num_heads_q or 1, capacity, 2); any for positions behind the new tokens.
    """
    filled = cache_seqlens.view(-1, 1, 1, 1)
    number = torch.arange(capacity, device=filled.device).view(1, 1, -1, 1) - filled  # of a new token
    own = query_ranges.expand(len(cache_seqlens), -1, -1, -1)
    place = number.clamp(0, own.shape[2] - 1).expand(-1, own.shape[1], -1, 2)
    everyone = torch.tensor((0, LAST), device=filled.device)
    return {"query_ranges": torch.where(number < 0, everyone, own.gather(2, place) + filled).int()}


# ---------------------------------------------------------------- runs of tokens


def _runs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of the run of equal neighbors that each token belongs to, and the end of the run."""
    n = numbers.shape[-1]
    i = torch.arange(n, device=numbers.device).expand(numbers.shape)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[..., 1:] = numbers[..., 1:] != numbers[..., :-1]
    first = torch.where(begins, i, 0).cummax(-1).values
    # the next beginning after a token, or n
    after = torch.where(begins, i, n).roll(-1, -1)
    after[..., -1:] = n
    return first, after.flip(-1).cummin(-1).values.flip(-1)


def documents(numbers: Tensor) -> dict[str, Tensor]:
    """Documents in one sequence, none of which sees another. Packed sequences (`attention_varlen`) are faster.

        >>> documents(torch.tensor([0, 0, 7, 7, 7]))["key_ranges"][0, 0].tolist()
        [[0, 2], [0, 2], [2, 5], [2, 5], [2, 5]]

    Args: numbers: (seqlen,) or (batch, seqlen) integers: neighbors with equal numbers belong to one document.

    Returns: key_ranges, (batch or 1, 1, seqlen, 2). With causal=True each document is causal.
    """
    return {"key_ranges": _ranges(*_runs(numbers))}


def chunks(seqlen: int, size: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """Attention within chunks of `size` tokens, as in some layers of Llama 4 (with causal=True).

        >>> chunks(5, 2)["key_ranges"][0, 0].tolist()
        [[0, 2], [0, 2], [2, 4], [2, 4], [4, 5]]

    Returns: key_ranges, (1, 1, seqlen, 2).
    """
    i = torch.arange(seqlen, device=device)
    first = i - i % size
    return {"key_ranges": _ranges(first, (first + size).clamp(max=seqlen))}


def prefix(seqlen: int, length: int | Tensor, device: torch.device | None = None) -> dict[str, Tensor]:
    """A prefix that all tokens see, and causal attention after it (prefix LM).

        >>> prefix(4, 2)["key_ranges"][0, 0].tolist()
        [[0, 2], [0, 2], [0, 3], [0, 4]]

    Args: length: of the prefix; an int, or (batch,) integers.

    Returns: key_ranges, (batch or 1, 1, seqlen, 2), which say all: causal=True would make the prefix causal.
    """
    if isinstance(length, Tensor):
        device, length = length.device, length.view(-1, 1)
    high = torch.arange(1, seqlen + 1, device=device).clamp(min=length)
    return {"key_ranges": _ranges(torch.zeros_like(high), high)}


def images(numbers: Tensor, window: int | None = None) -> dict[str, Tensor]:
    """Causal text in which the tokens of an image see each other in both directions, as in Gemma 3.

        >>> images(torch.tensor([-1, 0, 0, -1]))["key_ranges"][0, 0].tolist()
        [[0, 1], [0, 3], [0, 3], [0, 4]]

    Args:
        numbers: (seqlen,) or (batch, seqlen) integers: the image that each token belongs to, below 0 for text.
            Neighbors with equal numbers are one image.
        window: a token also sees only this many tokens before it, and its image.

    Returns: key_ranges, (batch or 1, 1, seqlen, 2), which say all: causal=True would make images causal.
    """
    i = torch.arange(numbers.shape[-1], device=numbers.device)
    first, end = _runs(numbers)
    is_image = numbers >= 0
    high = torch.where(is_image, end, i + 1)
    low = torch.zeros_like(high)
    if window is not None:
        low = torch.where(is_image, torch.minimum(first, i - window), i - window).clamp(min=0)
    return {"key_ranges": _ranges(low, high)}


def block_diffusion(seqlen: int, block: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """The mask of training a block diffusion model: noisy tokens, followed by the same tokens without noise.

        >>> block_diffusion(4, 2)["query_ranges"][0, 0].tolist()
        [[0, 2], [0, 2], [2, 4], [2, 4], [2, 8], [2, 8], [4, 8], [4, 8]]

    A noisy token sees the noisy tokens of its block and the clean tokens of the blocks before it. A clean token sees
    the clean tokens of its block and of the blocks before it.

    Args: seqlen: tokens of each half; q, k and v have 2 * seqlen rows. block: tokens of a block.

    Returns: key_ranges and query_ranges, (1, 1, 2 * seqlen, 2) each. Noisy queries see two intervals of keys, which
    key_ranges alone cannot say.

    Source: Block Diffusion, arXiv:2503.09573, section 5.1 and appendix B.6.
    """
    i = torch.arange(seqlen, device=device)
    first = i - i % block
    end = (first + block).clamp(max=seqlen)
    whole = torch.full_like(i, 2 * seqlen)
    by_query = torch.cat((first, torch.full_like(i, seqlen))), torch.cat((seqlen + first, seqlen + end))
    by_key = torch.cat((first, end)), torch.cat((end, whole))
    return {"key_ranges": _ranges(*by_query), "query_ranges": _ranges(*by_key)}


def from_flashmask(
    startend_row_indices: Tensor, causal: bool, num_heads_q: int | None = None, seqlen_q: int | None = None
) -> dict[str, Tensor]:
    """The mask of FlashMask (`paddle.nn.functional.flashmask_attention`), which states the hidden rows of each column.

        >>> from_flashmask(torch.tensor([2, 4, 4, 4]).view(1, 1, 4, 1), causal=True)["query_ranges"][0, 0].tolist()
        [[0, 2], [1, 4], [2, 4], [3, 4]]

    Args:
        startend_row_indices: (batch or 1, num_heads_kv or 1, seqlen_k, 1, 2 or 4) integers. With causal, rows r1 <= i
            (up to r2, if there is one) and the rows above the diagonal are hidden. Else rows r1 <= i and i < r2 are
            hidden, or of four numbers r1 <= i < r2 and r3 <= i < r4.
        causal: as it was passed to FlashMask.
        num_heads_q: of the call; it must be given where a column has another mask for each head of k.
        seqlen_q: None = seqlen_k.

    Returns: query_ranges, (batch or 1, num_heads_q or 1, seqlen_k, 2), with the causal mask in them.

    Raises: ValueError for a key that is seen by queries before and after hidden ones: two intervals. The host waits
    for the device.
    """
    given = startend_row_indices
    columns = given.shape[-1] if given.dim() == 4 else 0
    if columns not in ((1, 2) if causal else (2, 4)):
        expected = f"(batch, heads, seqlen_k, {'1 or 2' if causal else '2 or 4'})"
        raise ValueError(f"startend_row_indices: expected {expected} with causal={causal}, got {tuple(given.shape)}")
    rows = given.shape[2] if seqlen_q is None else seqlen_q
    starts, stops = torch.zeros_like(given[..., 0]), torch.full_like(given[..., 0], rows)
    diagonal = torch.arange(given.shape[2], device=given.device).to(given.dtype).expand(starts.shape)
    has_end = columns == (2 if causal else 4)
    below = given[..., 0], given[..., 1] if has_end else stops
    above = (starts, diagonal) if causal else (given[..., -2] if has_end else starts, given[..., -1])
    hidden = [(a.clamp(0, rows), b.clamp(0, rows)) for a, b in (below, above)]
    hidden = [(a, torch.maximum(a, b)) for a, b in hidden]
    low, high = starts, stops
    for _ in hidden:  # what one interval leaves may begin or end where the other one hides
        for a, b in hidden:
            low, high = torch.where((a <= low) & (low < b), b, low), torch.where((a < high) & (high <= b), a, high)
    (a, b), (c, d) = hidden
    both = (torch.minimum(b, d) - torch.maximum(a, c)).clamp(min=0)
    is_wrong = (high - low).clamp(min=0) != rows - (b - a) - (d - c) + both
    if is_wrong.any():
        entry, head, key = is_wrong.nonzero()[0].tolist()
        raise ValueError(
            "startend_row_indices: expected each key to be seen by one interval of queries, got "
            f"{given[entry, head, key].tolist()} for key {key} (batch entry {entry}, head {head})"
        )
    if num_heads_q is not None and given.shape[1] > 1:
        low, high = (t.repeat_interleave(num_heads_q // given.shape[1], 1) for t in (low, high))
    return {"query_ranges": torch.stack((low, torch.maximum(low, high)), -1).int()}


# ---------------------------------------------------------------- pictures


def visible_pairs(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    **tensors: Tensor,
) -> Tensor:
    """The pairs that a mask leaves, for tests and pictures: it takes memory for each pair.

        >>> visible_pairs(3, causal=True)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Args:
        seqlen_k: None = seqlen_q.
        tensors: seqused_k, seqstart_k, key_ranges, query_ranges, q_positions and bias, as for `onepass.attention`.

    Returns: (batch or 1, num_heads_q or 1, seqlen_q, seqlen_k) bool.
    """
    from . import reference
    from .problem import Mask

    batch = max((len(t) for t in tensors.values()), default=1)
    device = next((t.device for t in tensors.values()), None)
    q, k = (torch.empty(batch, 1, n, 0, device=device) for n in (seqlen_q, seqlen_q if seqlen_k is None else seqlen_k))
    return reference.pairs_of(q, k, Mask.from_options(causal, window), **tensors).visible  # type: ignore[arg-type]


def occupancy(visible: Tensor, tile: tuple[int, int]) -> Tensor:
    """Which tiles of a mask are empty (0), partial (1) or full (2): full tiles need no mask, empty ones no work.

        >>> occupancy(visible_pairs(6, causal=True), (2, 2))[0, 0].tolist()
        [[1, 0, 0], [2, 1, 0], [2, 2, 1]]

    Args: visible: (.., seqlen_q, seqlen_k) bool. tile: queries and keys of a tile.

    Returns: (.., ceil(seqlen_q / tile[0]), ceil(seqlen_k / tile[1])) int8.
    """
    return kinds_of(visible, tile)


def draw(
    path: str | Path,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    tile: tuple[int, int] = (128, 128),
    entry: int = 0,
    head: int = 0,
    **mask: Any,
) -> None:
    """Write a picture of a mask: its pairs, and which tiles are empty, partial and full. It needs matplotlib.

        masks.draw("prefix.png", 4096, **masks.prefix(4096, 1000))

    Args:
        path: of the PNG file.
        tile: queries and keys of a tile.
        entry, head: of the call, where masks differ.
        mask: causal, window, and the tensors of `visible_pairs`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    visible = visible_pairs(seqlen_q, seqlen_k, **mask)
    visible = visible[min(entry, len(visible) - 1), min(head, visible.shape[1] - 1)].cpu()
    tiles = occupancy(visible, tile)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = (visible, ["#ffffff", "#2f6fb3"]), (tiles, ["#ffffff", "#f2c14e", "#2f6fb3"])
    for ax, (values, colors) in zip(axes, panels, strict=True):
        extent = (0, visible.shape[1], visible.shape[0], 0)
        ax.imshow(
            values, cmap=ListedColormap(colors), vmin=0, vmax=len(colors) - 1, extent=extent, interpolation="nearest"
        )
        ax.set(xlabel="keys", ylabel="queries")
    counts = torch.bincount(tiles.flatten().int(), minlength=3).tolist()
    axes[0].set_title(f"{visible.float().mean():.1%} of the pairs", fontsize=10)
    axes[1].set_title(f"tiles of {tile[0]} x {tile[1]}: {counts[2]} full, {counts[1]} partial", fontsize=10)
    figure.savefig(path, dpi=120, facecolor="white", metadata={"Software": None}, format="png")
