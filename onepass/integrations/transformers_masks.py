"""The mask function of the transformers integration: what a mask says beside causal and window, found once a forward.

transformers calls the function before the layers. It may wait for the device once, to learn whether padding is on one
side; the layers then need no mask and wait for nothing. Under torch.compile, and while a CUDA graph is captured, it
does not wait, and its result says of each key whether the key is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask that `attention_forward` cannot know by itself: padding, unused cache slots, packed sequences.

    Args:
        q_length, kv_length: lengths of the attention call; kv_length includes unused slots of a static cache.
        q_offset, kv_offset: positions of the first query and of the first key in the sequence.
        mask_function: the pattern, composed by transformers.
        attention_mask: (batch, tokens seen so far), True = real token, or None.
        kwargs: further arguments of transformers' mask functions, which concern whole masks only.

    Returns: one of these forms. They have four dimensions because transformers passes such a mask on as it is. All but
    the last two are combined with the causal mask and the window that a layer knows.

    - None: every key that causal and window leave is real;
    - int64 (batch_size, 1, 1, 0): every such key is real, and no sequences are packed, so that the layers need not
      read the positions. An attention mask says so; or there is none, no gradient is recorded, and transformers, which
      looks for packed sequences only without a cache, has found none;
    - int64 (batch_size, 1, 1, 1): with a causal mask the first real key of each row; without one the end of the row's
      real keys, which begin at 0;
    - int64 (batch_size, 1, 1, 2): the first real key of each row, and the end of its keys;
    - int32 (1, 1, 1, num_sequences + 1): offsets of packed sequences in the flattened batch;
    - uint8 (batch_size, 1, 1, kv_length): 1 for each real key, where padding lies between real keys, or may lie there;
    - int32 (batch_size, 1, q_length, 2), for more than one query: the start and the end of the keys that each query
      sees, where these are neighbors (chunks of a causal mask, a prefix, blocks). A single query has the fourth form;
    - bool (batch_size, 1, q_length, kv_length): a whole mask, for any other pattern.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(f"attention_mask: expected (batch, tokens), got shape {tuple(attention_mask.shape)}")
    pattern = _recognize(mask_function, kv_offset + kv_length, attention_mask is not None, kwargs)
    if pattern is not None and pattern.sequence_ids is not None:
        ids = pattern.sequence_ids.expand(batch_size, -1)
        if pattern.chunk_size is not None and pattern.positions is not None:
            return _as_form(*_packed_chunks(ids, pattern.positions, pattern.chunk_size))
        return cu_seqlens_of(ids)[None, None, None]
    can_wait = attention_mask is None or _may_wait(attention_mask)
    if pattern is not None and pattern.chunk_size is not None:
        low, high = _chunks(pattern, batch_size, q_length, q_offset, device)
        if attention_mask is None:
            return _as_form(low - kv_offset, high - kv_offset)
        if can_wait:
            is_real = _real_keys(attention_mask, kv_offset, kv_length)
            rows = RealKeys.of(is_real, q_offset + q_length - kv_offset, 0)
            if rows.is_simple.all():
                low = (low - kv_offset).maximum(rows.first[:, None])
                return _as_form(low, (high - kv_offset).minimum(rows.last[:, None]))
    elif pattern is not None:
        # the last causal query stands at the last key, so the slots of a static cache beyond it hold no keys
        end = q_offset + q_length - kv_offset if pattern.is_causal else kv_length
        has_slots = isinstance(end, Tensor) or end < kv_length
        if attention_mask is None:
            first = torch.zeros(batch_size, dtype=torch.int64, device=device)
            if has_slots:
                return _ends(first, end)
            # transformers looks for packed sequences where there is no cache; in training there may be both
            return None if torch.is_grad_enabled() else first[:, None, None, None][..., :0]
        if can_wait and pattern.is_causal:
            found = _left_padding(attention_mask, kv_offset, kv_length, end)
            if found is not None:
                return found
        is_real = _real_keys(attention_mask, kv_offset, kv_length)
        if can_wait:
            rows = RealKeys.of(is_real, end, q_length if pattern.is_causal else 0)
            is_simple, begins_at_0, is_full = torch.stack(
                (rows.is_simple.all(), (rows.first == 0).all(), (rows.last == end).all())
            ).tolist()
            if is_simple and pattern.is_causal:
                if has_slots:
                    return _ends(rows.first, end)
                return rows.first[:, None, None, None][..., : 0 if begins_at_0 else 1]
            if is_simple:
                if begins_at_0:
                    return rows.last[:, None, None, None][..., : 0 if is_full else 1]
                return torch.stack((rows.first, rows.last), -1)[:, None, None]
        if not has_slots:
            return is_real[:, None, None].to(torch.uint8)
    from transformers.masking_utils import sdpa_mask

    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
    attention_mask = None if attention_mask is None else attention_mask.bool()
    kwargs |= {"mask_function": mask_function, "attention_mask": attention_mask}
    # in some versions of transformers q_offset is a tensor
    whole = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **kwargs)  # type: ignore[arg-type]
    return whole if whole is None or not _may_wait(whole) else _without_holes(whole, q_offset + 1 - kv_offset)


def _real_keys(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """(batch, kv_length) bool: the part of the mask of all tokens that belongs to the keys of this call."""
    is_real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    missing = kv_length - is_real.shape[1]
    return torch.nn.functional.pad(is_real, (0, missing)) if missing else is_real


def _left_padding(attention_mask: Tensor, kv_offset: int, kv_length: int, end: int | Tensor) -> Tensor | None:
    """The form of a causal mask whose rows have padding on the left at most; None if a row has padding elsewhere.

    A model that generates asks for every token, mostly with such rows. This function takes two to seven small operators
    for them, where `RealKeys.of` and what follows it take thirty.

    Args: end: the end of the keys; a cache may have room behind it.
    """
    is_real = attention_mask.bool()[:, kv_offset:]
    batch, seqlen = is_real.shape
    if 0 in is_real.shape or seqlen > kv_length or not (isinstance(end, Tensor) or end == seqlen):
        return None
    count = is_real.sum(-1)
    if isinstance(end, Tensor):
        count = torch.where(end == seqlen, count, -1)  # -1 is no count
    counts = count.tolist()
    has_slots = isinstance(end, Tensor) or end < kv_length
    if all(number == seqlen for number in counts):
        return _ends(count - seqlen, seqlen) if has_slots else count.new_empty((batch, 1, 1, 0))
    first = is_real.view(torch.uint8).argmax(-1)
    if any(start + number != seqlen for start, number in zip(first.tolist(), counts, strict=True)):
        return None
    return _ends(first, seqlen) if has_slots else first[:, None, None, None]


class RealKeys(NamedTuple):
    """The first real key of each row and the end of its real keys, (batch,) int64, and whether all between are real.

    In a row without real keys, both are the end of the keys.
    """

    first: Tensor
    last: Tensor
    is_simple: Tensor

    @classmethod
    def of(cls, is_real: Tensor, end: int | Tensor, num_own: int) -> RealKeys:
        """Args: end: the end of the keys. num_own: how many of the last keys are causal queries' own."""
        numbers = torch.arange(is_real.shape[1], device=is_real.device)
        is_real = is_real & (numbers < end)
        count = is_real.sum(-1)
        first = torch.where(is_real, numbers, end).amin(-1)
        last = torch.where(count > 0, torch.where(is_real, numbers + 1, 0).amax(-1), end)
        is_simple = count == last - first
        if num_own:  # causal queries would see padding that follows the last real key and comes before their own
            is_simple &= last > end - num_own
        return cls(first, last, is_simple)


def _ends(first: Tensor, end: int | Tensor) -> Tensor:
    """(batch, 1, 1, 2): first, and one end for all rows."""
    end = end.to(first) if isinstance(end, Tensor) else torch.full_like(first[:1], end)
    return torch.stack((first, end.reshape(-1)[:1].expand_as(first)), -1)[:, None, None]


def _as_form(low: Tensor, high: Tensor) -> Tensor:
    """The form for ranges of keys, low to high, (batch, q_length) each. A range that ends before its start is empty."""
    ranges = torch.stack((low.clamp(min=0).minimum(high), high), -1)[:, None]
    return ranges.to(torch.int64 if low.shape[1] == 1 else torch.int32)


def _chunks(
    pattern: _Pattern, batch_size: int, q_length: int, q_offset: int | Tensor, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """The positions that each query sees, start and end, (batch, q_length) each: its chunk up to the query itself."""
    assert pattern.chunk_size is not None
    position = (torch.arange(q_length, device=device) + q_offset).expand(batch_size, -1)
    in_sequence = position if pattern.left_padding is None else position - pattern.left_padding[:, None]
    return position - in_sequence % pattern.chunk_size, position + 1


def _packed_chunks(sequence_ids: Tensor, positions: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The start and the end of what each query of packed sequences sees, in tokens of the row: its chunk up to itself.

    Args: sequence_ids, positions: (batch, seqlen); positions count within a sequence.
    """
    number = torch.arange(sequence_ids.shape[1], device=sequence_ids.device).expand_as(sequence_ids)
    is_start = torch.nn.functional.pad(sequence_ids.diff(dim=-1) != 0, (1, 0), value=True)
    start = torch.where(is_start, number, 0).cummax(-1).values
    return start.maximum(number - positions % chunk_size), number + 1


def _without_holes(whole: Tensor, own_end: int | Tensor) -> Tensor:
    """A whole mask, (batch, 1, q_length, kv_length), as ranges of keys if each query sees neighbors. One flag is read.

    Args: own_end: the end of the first query's own key. A single query has to see it, since layers count windows from
        the last key of such a form.
    """
    if 0 in whole.shape or whole.shape[1] != 1 or whole.dtype != torch.bool:
        return whole
    seen = whole[:, 0]
    low = seen.view(torch.uint8).argmax(-1)
    high = low + seen.sum(-1)
    is_simple = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0] <= 1
    if seen.shape[1] == 1:
        is_simple &= high == own_end
    return _as_form(low, high) if is_simple.all() else whole


def _may_wait(t: Tensor) -> bool:
    """Whether the host may read a value of this tensor."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def cu_seqlens_of(sequence_ids: Tensor) -> Tensor:
    """Offsets of the runs of equal ids in each row, counted over the flattened batch. The host reads their number."""
    batch, seqlen = sequence_ids.shape
    is_start = torch.ones(batch, seqlen + 1, dtype=torch.bool, device=sequence_ids.device)[:, :seqlen]
    is_start[:, 1:] = sequence_ids.diff(dim=-1) != 0
    starts = is_start.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=batch * seqlen).to(torch.int32)


# ---------------------------------------------------------------- patterns


class _Pattern(NamedTuple):
    is_causal: bool
    sequence_ids: Tensor | None = None  # (batch, seqlen) for packed sequences
    positions: Tensor | None = None  # (batch, seqlen), in packed sequences
    chunk_size: int | None = None  # a query sees keys of its own chunk only
    left_padding: Tensor | None = None  # (batch,): chunks begin behind it


def _recognize(
    mask_function: Callable | None, num_positions: int, has_padding: bool, options: dict[str, Any]
) -> _Pattern | None:
    """The pattern of transformers' composed mask function; None for a pattern that `attention_forward` cannot express.

    Args:
        has_padding: whether there is an attention mask.
        options: the further arguments of `padding_mask`.
    """
    if torch.compiler.is_compiling():
        return _recognize_compiled(mask_function, has_padding, **options)
    found = _Pattern(False)
    has_window = False
    for name, variables in _conditions(mask_function):
        if name == "causal_mask_function":
            found = found._replace(is_causal=True)
        elif name == "packed_sequence_mask_function":
            found = found._replace(sequence_ids=variables["packed_sequence_mask"])
        elif name == "remap_positions_for_packed_sequence":
            found = found._replace(positions=variables["position_ids"])
        elif name == "chunked_overlay":
            if num_positions > variables["chunk_size"]:  # else everything is still in the first chunk
                found = found._replace(chunk_size=variables["chunk_size"], left_padding=variables["left_padding"])
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            has_window = True
        elif name != "bidirectional_mask_function":
            return None
    if found.chunk_size is not None and (has_window or not found.is_causal):
        return None
    return found


def _recognize_compiled(
    mask_function: Callable | None,
    has_padding: bool,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> _Pattern | None:
    """The pattern as far as it is known under torch.compile, which cannot look into closures.

    transformers gives the size of a window or of a chunk, and allows skips where nothing else has been composed.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return _Pattern(mask_function is causal_mask_function)
    chunk_size = getattr(config, "attention_chunk_size", None)
    if local_size is None or config is None:
        return None
    if allow_is_bidirectional_skip and chunk_size is None:
        return _Pattern(False)
    if allow_is_causal_skip and chunk_size is None:
        return _Pattern(True)
    is_chunked = allow_is_causal_skip and getattr(config, "sliding_window", None) is None and local_size == chunk_size
    return _Pattern(True, chunk_size=chunk_size) if is_chunked and not has_padding else None


def _conditions(mask_function: Callable | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conditions of a mask, each as the name of the function that made it and the variables that it holds."""
    code = getattr(mask_function, "__code__", None)
    if mask_function is None or code is None:
        yield str(mask_function), {}
        return
    cells = mask_function.__closure__ or ()
    variables = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    name = mask_function.__qualname__.split(".<locals>")[0]
    if mask_function.__module__ != "transformers.masking_utils":
        yield f"{mask_function.__module__}.{mask_function.__qualname__}", {}
    elif name == "and_masks":
        for condition in variables["mask_functions"]:
            yield from _conditions(condition)
    elif name == "remap_positions_for_packed_sequence":
        yield name, variables
        yield from _conditions(variables["mask_function"])
    else:
        yield name, variables
