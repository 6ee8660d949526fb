"""The mask function of the transformers integration: what a mask says beside causal and window, found once a forward.

transformers calls it before the layers. It may wait for the device once, to learn whether padding is on one side; the
layers then need no mask and wait for nothing. Under torch.compile, and while a CUDA graph is captured, it does not
wait, and returns a whole mask where there may be padding.
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

    Returns: one of these, which have four dimensions because transformers passes such a mask on as it is

    - None: every key that causal and window leave is real;
    - int64 (batch_size, 1, 1, 0): every such key is real, and no sequences are packed, so that the layers need not
      read the positions. An attention mask says so or, where no gradient is recorded, transformers, which looks for
      packed sequences only without a cache;
    - int64 (batch_size, 1, 1, 1): causal, the first real key of each row; else the end of its real keys, which begin
      at 0;
    - int64 (batch_size, 1, 1, 2): the first real key of each row, and the end of its keys;
    - int32 (1, 1, 1, num_sequences + 1): offsets of packed sequences in the flattened batch;
    - bool (batch_size, 1, q_length, kv_length): a whole mask, for any other pattern.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(f"attention_mask: expected (batch, tokens), got shape {tuple(attention_mask.shape)}")
    pattern = _recognize(mask_function, kv_offset + kv_length)
    if pattern is not None and pattern.sequence_ids is not None:
        return cu_seqlens_of(pattern.sequence_ids.expand(batch_size, -1))[None, None, None]
    if pattern is not None:
        # the last causal query stands at the last key, so slots of a static cache beyond it hold none
        end = q_offset + q_length - kv_offset if pattern.is_causal else kv_length
        has_slots = isinstance(end, Tensor) or end < kv_length
        if attention_mask is None:
            first = torch.zeros(batch_size, dtype=torch.int64, device=device)
            if has_slots:
                return _ends(first, end)
            # transformers looks for packed sequences where there is no cache; in training there may be both
            return None if torch.is_grad_enabled() else first[:, None, None, None][..., :0]
        if not _may_wait(attention_mask):
            pattern = None
    if pattern is not None and attention_mask is not None:
        is_real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        is_real = torch.nn.functional.pad(is_real, (0, kv_length - is_real.shape[1]))
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
    from transformers.masking_utils import sdpa_mask

    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
    attention_mask = None if attention_mask is None else attention_mask.bool()
    kwargs |= {"mask_function": mask_function, "attention_mask": attention_mask}
    # transformers gives, and takes, a tensor here in some versions
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, **kwargs)  # type: ignore[arg-type]


class RealKeys(NamedTuple):
    """The first real key of each row, the end of its real keys, (batch,) int64, and whether all between are real.

    A row without real keys has both at its end.
    """

    first: Tensor
    last: Tensor
    is_simple: Tensor

    @classmethod
    def of(cls, is_real: Tensor, end: int | Tensor, num_own: int) -> RealKeys:
        """Args: end: of the keys. num_own: padding among the last keys, those of the queries, is behind all of them."""
        numbers = torch.arange(is_real.shape[1], device=is_real.device)
        is_real = is_real & (numbers < end)
        count = is_real.sum(-1)
        first = torch.where(is_real, numbers, end).amin(-1)
        last = torch.where(count > 0, torch.where(is_real, numbers + 1, 0).amax(-1), end)
        is_simple = count == last - first
        if num_own:  # keys before the queries that are behind the last real one are seen, and are not real
            is_simple &= last > end - num_own
        return cls(first, last, is_simple)


def _ends(first: Tensor, end: int | Tensor) -> Tensor:
    """(batch, 1, 1, 2): first, and one end for all rows."""
    end = end.to(first) if isinstance(end, Tensor) else torch.full_like(first[:1], end)
    return torch.stack((first, end.reshape(-1)[:1].expand_as(first)), -1)[:, None, None]


def _may_wait(t: Tensor) -> bool:
    """Whether the host may read a value of this tensor."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def cu_seqlens_of(sequence_ids: Tensor) -> Tensor:
    """Offsets of the runs of equal ids in each row, counted over the flattened batch. Reads their number."""
    batch, seqlen = sequence_ids.shape
    is_start = torch.ones(batch, seqlen + 1, dtype=torch.bool, device=sequence_ids.device)[:, :seqlen]
    is_start[:, 1:] = sequence_ids.diff(dim=-1) != 0
    starts = is_start.flatten().nonzero().flatten()
    return torch.nn.functional.pad(starts, (0, 1), value=batch * seqlen).to(torch.int32)


# ---------------------------------------------------------------- patterns


class _Pattern(NamedTuple):
    is_causal: bool
    sequence_ids: Tensor | None  # (batch, seqlen) for packed sequences


def _recognize(mask_function: Callable | None, num_positions: int) -> _Pattern | None:
    """The pattern of transformers' composed mask function; None for one that `attention_forward` would lose."""
    if torch.compiler.is_compiling():  # which cannot look into closures
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
            return _Pattern(mask_function is causal_mask_function, None)
        return None
    is_causal, sequence_ids = False, None
    for name, variables in _conditions(mask_function):
        if name == "causal_mask_function":
            is_causal = True
        elif name == "packed_sequence_mask_function":
            sequence_ids = variables["packed_sequence_mask"]
        elif name == "chunked_overlay" and num_positions <= variables["chunk_size"]:
            pass  # everything is still in the first chunk
        elif name not in (
            "bidirectional_mask_function",
            "sliding_window_overlay",
            "sliding_window_bidirectional_overlay",
        ):
            return None
    return _Pattern(is_causal, sequence_ids)


def _conditions(mask_function: Callable | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The conditions of a mask: for each the name of the function that made it, and the variables that it holds."""
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
        yield from _conditions(variables["mask_function"])
    else:
        yield name, variables
