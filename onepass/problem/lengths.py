"""The values of length tensors, read and checked on the host for a backend that works there."""

from __future__ import annotations

import itertools

import torch

from .attention import WORD, AttentionInputs, AttentionProblem
from .decode import DecodeInputs, DecodeProblem, refuse_lengths
from .descales import NAMES, descale_of_keys


def read_offsets(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Offsets of sequences into `total` tokens as a checked list. Raises: ValueError, see `read_lengths`."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    if any(b < a for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name}: expected offsets that never decrease, got {values}")
    if values[-1] > total:
        raise ValueError(f"{name}: expected a last offset of at most {total} tokens, got {values[-1]}")
    return values


def read_lengths(
    problem: AttentionProblem,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> tuple[list[int] | None, list[int] | None, list[int] | None]:
    """The three length tensors as checked lists, for a backend that works on the host.

    Raises: ValueError if offsets do not start at 0, decrease, or pass the end of the tensor, or if seqused_k is
    negative or larger than the sequence it belongs to.
    """
    offsets: list[list[int] | None] = []
    for name, cu_seqlens, total in (
        ("cu_seqlens_q", cu_seqlens_q, problem.seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, problem.seqlen_k),
    ):
        offsets.append(None if cu_seqlens is None else read_offsets(name, cu_seqlens, total))
    used = None if seqused_k is None else seqused_k.tolist()
    if used is not None:
        for i, n in enumerate(used):
            k_offsets = offsets[1]
            longest = problem.seqlen_k if k_offsets is None else k_offsets[i + 1] - k_offsets[i]
            if not 0 <= n <= longest:
                raise ValueError(f"seqused_k[{i}]: expected 0 to {longest}, the keys of the sequence, got {n}")
    return offsets[0], offsets[1], used


def read_starts(
    problem: AttentionProblem, seqstart_k: torch.Tensor | None, cu_k: list[int] | None, used: list[int] | None
) -> list[int] | None:
    """seqstart_k as a checked list; None if there is none. Raises: ValueError, see `read_lengths`.

    Args: cu_k, used: from `read_lengths`.
    """
    if seqstart_k is None:
        return None
    starts = seqstart_k.tolist()
    for b, start in enumerate(starts):
        longest = problem.seqlen_k if cu_k is None else cu_k[b + 1] - cu_k[b]
        longest = longest if used is None else used[b]
        if not 0 <= start <= longest:
            raise ValueError(f"seqstart_k[{b}]: expected 0 to {longest}, the keys of the sequence, got {start}")
    return starts


def refuse_short_bias(
    problem: AttentionProblem, bias: torch.Tensor | None, cu_k: list[int] | None, used: list[int] | None
) -> None:
    """Raise ValueError if the bias of a packed call has fewer columns than a sequence has keys, but more than one.

    Args: cu_k, used: from `read_lengths`.
    """
    if bias is None or cu_k is None or bias.shape[-1] == 1:
        return
    lengths = [b - a for a, b in itertools.pairwise(cu_k)] if used is None else used
    longest = max(lengths, default=0)
    if bias.shape[-1] < longest:
        raise ValueError(
            f"bias: expected at least {longest} columns, the keys of the longest sequence (or 1, for all keys), "
            f"got shape {tuple(bias.shape)}"
        )


def refuse_few_blocks(
    problem: AttentionProblem, inputs: AttentionInputs, cu_q: list[int] | None, cu_k: list[int] | None
) -> None:
    """Raise ValueError if the block_mask of a packed call has too few blocks, or bits, for a sequence.

    Args: cu_q, cu_k: from `read_lengths`.
    """
    if inputs.blocks is None or cu_q is None or cu_k is None:
        return
    kinds, block_size, bits, _ = inputs.blocks
    longest = [max((b - a for a, b in itertools.pairwise(cu)), default=0) for cu in (cu_q, cu_k)]
    for t, sizes, what in ((kinds, block_size, f"blocks of {block_size}"), (bits, (1, WORD), "words of bits")):
        needed = [-(-length // size) for length, size in zip(longest, sizes, strict=True)]
        if t is not None and any(have < least for have, least in zip(t.shape[2:], needed, strict=True)):
            raise ValueError(
                f"block_mask: expected at least {needed[0]} x {needed[1]} {what} for the longest sequences, "
                f"got {t.shape[2]} x {t.shape[3]}"
            )


def read_values(
    problem: AttentionProblem, inputs: AttentionInputs
) -> tuple[list[int] | None, list[int] | None, list[int] | None, list[int] | None]:
    """cu_seqlens_q, cu_seqlens_k, seqused_k and seqstart_k as checked lists; None for those that are not given.

    Raises: ValueError, see `read_lengths`, `read_starts` and `refuse_short_bias`.
    """
    cu_q, cu_k, used = read_lengths(problem, inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k)
    starts = read_starts(problem, inputs.modifiers and inputs.modifiers.seqstart_k, cu_k, used)
    refuse_short_bias(problem, inputs.modifiers and inputs.modifiers.bias, cu_k, used)
    refuse_few_blocks(problem, inputs, cu_q, cu_k)
    return cu_q, cu_k, used, starts


def read_cache_lengths(inputs: DecodeInputs, problem: DecodeProblem) -> list[int]:
    """cache_seqlens as a list, after a check of all values that decide where the call reads and writes.

    Raises: ValueError if a length is negative or leaves no room for the new keys, if a used entry of the page table is
    not a page of the cache, if new keys are written over other keys of the call, if a descale of a key is 0 or not
    finite, if a rotated position is past the end of rotary_cos, if a sequence begins after its end, or if cu_seqlens_q
    is invalid.
    """
    read_query_offsets(inputs)
    lengths = inputs.cache_seqlens.tolist()
    if not lengths:
        return lengths
    refuse_lengths(min(lengths), max(lengths), inputs.capacity, inputs.seqlen_new)
    starts, ends = _read_cache_starts(inputs, lengths), [length + inputs.seqlen_new for length in lengths]
    if inputs.page_table is not None:
        num_pages, page_size = inputs.k_cache.shape[:2]
        table = inputs.page_table.tolist()
        for b, row in enumerate(table):
            # new keys are written even before the start of a sequence
            first = min(starts[b], lengths[b]) // page_size
            used = row[first : -(-(lengths[b] + inputs.seqlen_new) // page_size)]
            wrong = next((page for page in used if not 0 <= page < num_pages), None)
            if wrong is not None:
                name = f"page_table[{b}, {first + used.index(wrong)}]"
                raise ValueError(f"{name}: expected a page 0 to {num_pages - 1} of the cache, got {wrong}")
        hides_keys = problem.attention.mask.window_left is not None or problem.attention.has_key_ranges
        refuse_shared_pages(table, page_size, starts, lengths, ends, hides_keys)
    _refuse_descales(inputs, problem.kv_block, [*map(min, starts, lengths)], ends)
    _check_rotary_rows(inputs, max(lengths) + inputs.seqlen_new)
    return lengths


def refuse_shared_pages(
    table: list[list[int]], page_size: int, starts: list[int], lengths: list[int], ends: list[int], hides_keys: bool
) -> None:
    """Raise ValueError if a new key is written to a row of a page that holds another key of the call.

    Args:
        starts, lengths, ends: of each sequence, its first key, its first new key, and the end of its keys.
        hides_keys: whether a mask hides old keys: a sequence may then write over them, as in a ring of pages.
    """

    def pages(b: int, first: int) -> range:
        return range(first // page_size, -(-ends[b] // page_size) if ends[b] > first else 0)

    # batch entry, number in its row of the table, and in the page: the first row used, the first written, and the end
    uses: dict[int, list[tuple[int, int, int, int, int]]] = {
        row[i]: [] for b, row in enumerate(table) for i in pages(b, lengths[b])
    }
    for b, row in enumerate(table if uses else ()):
        start = min(starts[b], lengths[b])
        for i in pages(b, start):
            if row[i] in uses:
                used, first, end = (min(max(n - i * page_size, 0), page_size) for n in (start, lengths[b], ends[b]))
                uses[row[i]].append((b, i, used, first, end))
    for page, of_page in uses.items():
        written = [use for use in of_page if use[3] < use[4]] if len(of_page) > 1 else []
        for b, i, _, first, end in written:
            for other, j, used, written_to, last in of_page:
                taken = written_to if other == b and hides_keys else used
                if (b, i) != (other, j) and first < last and taken < end:
                    raise ValueError(
                        f"page_table[{b}, {i}]: expected a page with rows {first} to {end - 1} for new keys alone, "
                        f"got page {page}, which is page_table[{other}, {j}], too"
                    )


def _refuse_descales(inputs: DecodeInputs, kv_block: int | None, starts: list[int], ends: list[int]) -> None:
    """Raise ValueError if a descale of keys start <= key < end of a sequence is not a finite number other than 0."""
    for name, descale in zip(NAMES, (inputs.k_descale, inputs.v_descale), strict=True):
        if descale is None:
            continue
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if start == end:
                continue
            step = end if kv_block is None else kv_block
            key = torch.arange(start // step * step, end, step, device=descale.device)
            values = descale_of_keys(descale, inputs, kv_block, torch.full_like(key, b), key)
            wrong = ~values.isfinite() | (values == 0)
            if wrong.any():
                raise ValueError(
                    f"{name}: expected finite numbers other than 0 for the keys of sequence {b}, "
                    f"got {float(values[wrong][0])}"
                )


def _read_cache_starts(inputs: DecodeInputs, lengths: list[int]) -> list[int]:
    """seqstart_k as a checked list; zeros if there is none."""
    if inputs.modifiers is None or inputs.modifiers.seqstart_k is None:
        return [0] * len(lengths)
    starts = inputs.modifiers.seqstart_k.tolist()
    for b, start in enumerate(starts):
        end = lengths[b] + inputs.seqlen_new
        if not 0 <= start <= end:
            raise ValueError(f"seqstart_k[{b}]: expected 0 to {end}, the keys of the sequence, got {start}")
    return starts


def _check_rotary_rows(inputs: DecodeInputs, longest: int) -> None:
    """Check that the rotary tables have a row for each position. Queries before the first key use its row."""
    if inputs.rotary_cos is None:
        return
    needed = longest
    if inputs.rotary_positions is not None:
        ends = [longest if t is None else int(t.max()) + 1 if t.numel() else 0 for t in inputs.rotary_positions]
        needed = max(ends if inputs.seqlen_new else ends[:1])
    if needed > inputs.rotary_cos.shape[0]:
        raise ValueError(
            f"rotary_cos: expected a row for each of the {needed} positions, got {inputs.rotary_cos.shape[0]}"
        )


def read_query_offsets(inputs: DecodeInputs) -> list[int] | None:
    """cu_seqlens_q as a checked list; None if queries are not packed. Raises: ValueError, see `read_lengths`."""
    if inputs.cu_seqlens_q is None:
        return None
    return read_offsets("cu_seqlens_q", inputs.cu_seqlens_q, inputs.q.shape[0])
