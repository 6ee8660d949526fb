"""The mask function of the transformers integration: what a mask says, found once a forward and in short form.

transformers calls the function before the layers. It may wait for the device once, to learn whether padding is on one
side; the layers then need no mask and wait for nothing. Under torch.compile, and while a CUDA graph is captured, it
does not wait, and its result says whether each key is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedError

_RANGES = "_onepass_ranges"  # an attribute of masks


class Pattern(NamedTuple):
    """The keys that each query of a call sees: those that all fields leave."""

    is_causal: bool = False
    # keys before and after the query's own; the last query stands at the last key that exists
    window: tuple[int, int | None] | None = None
    first: Tensor | None = None  # int32 (batch,), the first real key of each row, where there is padding on the left
    end: Tensor | None = None  # int32 (batch,), the end of each row's real keys, where there is padding on the right
    used: int | Tensor | None = None  # the number of keys that exist, where a cache has room for more
    is_real: Tensor | None = None  # bool (batch, num_keys), where real keys need not be neighbors
    ranges: Tensor | None = None  # int32 (batch, 1, q_length, 2), the first key that a query sees, and the end
    whole: Tensor | None = None  # bool or floating point (batch, num_heads or 1, q_length, num_keys)
    offsets: Tensor | None = None  # int32 (num_sequences + 1,), packed sequences in the flattened batch
    chunk_size: int | None = None  # of chunks that `ranges` has taken into account, for a row that is one sequence
    has_padding: bool = False  # whether there is padding of which `first` and `end` say nothing
    may_be_packed: bool = False  # positions that the layers get may say that sequences are packed
    q_offset: int | Tensor = 0  # the place of the first query among the keys, where sequences may be packed


class ShortMask(torch.Tensor):
    """A mask that is a pattern to the attention function, and a tensor of values to every torch operation.

    Most layers pass their mask to the attention function as they get it, and no values are ever computed. A layer may
    also slice the mask, add to it, or join other keys to it. Any operation but questions for shape, type and device
    gets the floating point mask of eager attention: 0 where a query sees a key, and the lowest number elsewhere.
    """

    pattern: Pattern
    make_values: Callable[[], Tensor]
    kept: dict[Any, Any]  # what the layers of one forward have made of the pattern

    @staticmethod
    def make(
        pattern: Pattern,
        make_values: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """Args: make_values: makes the floating point mask of this shape, dtype and device.

        Returns: a ShortMask; the values where torch.export gives every tensor a class of its own.
        """
        # one NaN, in no memory but its own, so that an operation that does not ask for the values shows
        nan = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        if type(nan) is not torch.Tensor:
            return make_values()
        mask = nan.as_subclass(ShortMask)
        mask.pattern, mask.make_values, mask.kept = pattern, make_values, {}
        return mask

    def values(self) -> Tensor:
        """The floating point mask, (batch, 1, q_length, num_keys)."""
        if not may_wait(self):
            return self.make_values()
        if "values" not in self.kept:
            self.kept["values"] = self.make_values()
        return self.kept["values"]

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _QUESTIONS:
                return function(*args, **kwargs)
            if function in (torch.Tensor.detach, torch.Tensor.contiguous):
                return args[0]
            is_target = args and isinstance(args[0], ShortMask)
            is_write = is_target and (function in _WRITES or kwargs.get("inplace"))
            if is_write or isinstance(kwargs.get("out"), ShortMask):
                raise UnsupportedError(
                    f"attention_mask: expected a model that does not write to its mask, got {function.__name__}"
                )
            if function in _MOVES and is_target:
                return args[0]._moved(partial(function, **kwargs), args[1:])
            return function(*_with_values(args), **{name: _with_values(value) for name, value in kwargs.items()})

    def _moved(self, move: Callable[..., Tensor], args: tuple) -> Tensor:
        """This mask on another device or in another floating point type, as frameworks send it to each layer."""
        if any(isinstance(arg, Tensor) for arg in args):
            return move(self.values(), *args)
        example = move(torch.empty((), dtype=self.dtype, device=self.device), *args)
        if not example.is_floating_point():
            return move(self.values(), *args)
        if (example.dtype, example.device) == (self.dtype, self.device):
            return self
        fields: Any = (x.to(example.device) if isinstance(x, Tensor) else x for x in self.pattern)
        make_values = self.make_values
        return ShortMask.make(
            Pattern(*fields), lambda: move(make_values(), *args), tuple(self.shape), example.dtype, example.device
        )


def _with_values(argument: Any) -> Any:
    """An argument of a torch function. torch.compile does not come here for a tuple of masks, only for a list."""
    if isinstance(argument, ShortMask):
        return argument.values()
    if isinstance(argument, list):
        return [_with_values(part) for part in argument]
    if isinstance(argument, tuple):
        return tuple([_with_values(part) for part in argument])
    return argument


_QUESTIONS = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(torch.Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "requires_grad")),
        *(torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.storage_offset),
        *(torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.__len__),
    )
)


_MOVES = frozenset(getattr(torch.Tensor, name) for name in ("to", "cuda", "cpu", "float", "half", "bfloat16"))
# what changes its first argument
_WRITES = frozenset(
    (
        *(getattr(torch.Tensor, name) for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")),
        *(getattr(torch.Tensor, f"__i{name}__") for name in ("add", "sub", "mul", "and", "or", "xor")),
        torch.Tensor.__setitem__,
    )
)


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
) -> Tensor:
    """The mask of a forward: its pattern for `attention_forward`, its values for models that compute with their mask.

    Args:
        q_length, kv_length: lengths of the attention call; kv_length includes unused slots of a static cache.
        q_offset, kv_offset: positions of the first query and of the first key in the sequence.
        mask_function: the pattern, composed by transformers.
        attention_mask: (batch, tokens seen so far), True = real token, or None; one of four dimensions is returned.
        kwargs: further arguments of transformers' mask functions.

    Returns: a `ShortMask` of shape (batch_size, 1, q_length, kv_length), or its values in a non-strict torch.export.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise UnsupportedError(f"attention_mask: expected (batch, tokens), got shape {tuple(attention_mask.shape)}")
    attention_mask = None if attention_mask is None else attention_mask.bool()
    if isinstance(q_offset, Tensor):
        q_offset = q_offset.clone()  # the length that a static cache counts up in each layer
    call = _Call(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    found = _recognize(mask_function, kv_offset + kv_length, attention_mask, kwargs)
    if found is not None and found.window is not None and not found.is_causal and q_length != kv_length:
        found = None
    make = partial(_values, call, mask_function, kwargs)
    pattern = None
    if found is not None:
        pattern = _padding(call, found) if found.sequence_ids is None else _packed(call, found)
    if pattern is None:
        whole = make(torch.bool)
        pattern = _without_holes(whole) if may_wait(whole) else Pattern(whole=whole)
    is_empty = isinstance(q_offset, Tensor) or q_offset == 0
    if attention_mask is None and q_length > 1 and is_empty and (found is None or found.sequence_ids is None):
        # a causal cache may have room behind its keys
        is_self = kv_length == q_length or (found is not None and found.is_causal)
        pattern = pattern._replace(may_be_packed=is_self, q_offset=q_offset)
    dtype = kwargs.get("dtype", torch.float32)
    return ShortMask.make(pattern, partial(make, dtype), (batch_size, 1, q_length, kv_length), dtype, device)


class _Call(NamedTuple):
    """The sizes of a call of `padding_mask`, and its mask of real tokens."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    attention_mask: Tensor | None
    device: torch.device | str


def _values(call: _Call, mask_function: Callable | None, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """The values of a mask: bool as SDPA takes them, or floating point as eager attention does."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    options = options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "dtype": dtype}
    # in some versions of transformers q_offset is a tensor
    make: Callable = sdpa_mask if dtype == torch.bool else eager_mask
    return make(**call._asdict(), mask_function=mask_function, **options)


def _packed(call: _Call, found: _Found) -> Pattern:
    """The pattern of sequences that transformers has found in the positions."""
    assert found.sequence_ids is not None
    pattern = Pattern(found.is_causal, found.window, chunk_size=found.chunk_size)
    ids = found.sequence_ids.expand(call.batch_size, -1)
    is_start = torch.nn.functional.pad(ids.diff(dim=-1) != 0, (1, 0), value=True)
    if found.chunk_size is None and may_wait(ids):
        return pattern._replace(offsets=offsets_of(is_start))
    return with_ranges(pattern, is_start, positions=found.positions)


def _padding(call: _Call, found: _Found) -> Pattern | None:
    """The pattern of rows of one sequence, with padding or without; None if only values say it."""
    attention_mask, kv_offset, kv_length = call.attention_mask, call.kv_offset, call.kv_length
    pattern = Pattern(found.is_causal, found.window, chunk_size=found.chunk_size)
    # the last causal query stands at the last key, so the slots of a static cache beyond it hold no keys
    end = call.q_offset + call.q_length - kv_offset if found.is_causal else kv_length
    has_slots = isinstance(end, Tensor) or end < kv_length
    pattern = pattern._replace(used=end if has_slots else None)
    if found.blocks is not None:
        return _within_bounds(Pattern(), _blocks(found, call), call, end) if may_wait(found.blocks) else None
    if found.chunk_size is not None:
        return _within_bounds(Pattern(is_causal=True, chunk_size=found.chunk_size), _chunks(found, call), call, end)
    if attention_mask is None:
        return pattern
    if may_wait(attention_mask):
        simple = _simple_padding(call, pattern, end)
        if simple is not None:
            return simple
    return None if has_slots else pattern._replace(is_real=_real_keys(attention_mask, kv_offset, kv_length))


def _within_bounds(pattern: Pattern, bounds: _Bounds, call: _Call, end: int | Tensor) -> Pattern | None:
    """The pattern in which queries see the real keys within bounds; None where the bounds are not valid.

    Args: end: the end of the keys; a cache may have room behind it.
    """
    low, high, are_valid = bounds
    if call.attention_mask is None:
        return _with_bounds(pattern, low, high) if are_valid is None or are_valid else None
    is_real = _real_keys(call.attention_mask, call.kv_offset, call.kv_length)
    if not may_wait(is_real):
        return pattern._replace(ranges=_ranges(low, high), is_real=is_real)
    rows = RealKeys.of(is_real, end, 0)
    flags = rows.is_simple.all(), (rows.last - rows.first == end).all(), are_valid
    is_simple, is_full, *others = torch.stack([flag for flag in flags if flag is not None]).tolist()
    if not all(others):
        return None
    if not is_simple:
        return pattern._replace(ranges=_ranges(low, high), is_real=is_real)
    low, high = low.maximum(rows.first[:, None]), high.minimum(rows.last[:, None])
    return _with_bounds(pattern, low, high)._replace(has_padding=not is_full)


def _simple_padding(call: _Call, pattern: Pattern, end: int | Tensor) -> Pattern | None:
    """The pattern where the real keys of each row are neighbors; None if they are not."""
    assert call.attention_mask is not None
    attention_mask, kv_offset, kv_length = call.attention_mask, call.kv_offset, call.kv_length
    if pattern.is_causal:
        found = _left_padding(attention_mask, kv_offset, kv_length, end)
        if found is not None:
            return pattern._replace(first=found if found.numel() else None)
    rows = RealKeys.of(_real_keys(attention_mask, kv_offset, kv_length), end, call.q_length if pattern.is_causal else 0)
    is_simple, begins_at_0, is_full = torch.stack(
        (rows.is_simple.all(), (rows.first == 0).all(), (rows.last == end).all())
    ).tolist()
    if not is_simple:
        return None
    first = None if begins_at_0 else rows.first.to(torch.int32)
    end_of_rows = None if is_full or pattern.is_causal else rows.last.to(torch.int32)
    return pattern._replace(first=first, end=end_of_rows, has_padding=not is_full)


def with_ranges(
    pattern: Pattern, is_start: Tensor, q_offset: int | Tensor = 0, positions: Tensor | None = None
) -> Pattern:
    """The pattern of rows that are cut into sequences. Nothing is read.

    Args: is_start: (batch, q_length) bool, whether a sequence begins. q_offset: the place of the first query among the
        keys; where it is not 0, nothing begins. positions: (batch, q_length), those from which chunks are counted.
    """
    start, end = sequence_bounds(is_start)
    own = torch.arange(is_start.shape[1], device=is_start.device) + q_offset
    low, high = start, own + 1 if pattern.is_causal else end
    if pattern.chunk_size is not None:
        low = low.maximum(own - (own - start if positions is None else positions) % pattern.chunk_size)
    elif pattern.ranges is not None:
        low, high = low.maximum(pattern.ranges[:, 0, :, 0]), high.minimum(pattern.ranges[:, 0, :, 1])
    if pattern.window is not None:
        low = low.maximum(own - pattern.window[0])
        high = high if pattern.window[1] is None else high.minimum(own + pattern.window[1] + 1)
    low, high = torch.broadcast_tensors(low, high)
    return pattern._replace(
        is_causal=False, window=None, chunk_size=None, used=None, offsets=None, ranges=_ranges(low, high)
    )


def sequence_bounds(is_start: Tensor) -> tuple[Tensor, Tensor]:
    """The start and the end of the sequence of each token, in tokens of its row, (batch, tokens) each."""
    seqlen = is_start.shape[1]
    number = torch.arange(seqlen, device=is_start.device)
    start = torch.where(is_start, number, 0).cummax(-1).values
    following = torch.where(is_start, number, seqlen).roll(-1, -1)
    following = torch.where(number == seqlen - 1, seqlen, following)
    return start, following.flip(-1).cummin(-1).values.flip(-1)


def starts_by_positions(position_ids: Tensor, q_offset: int | Tensor) -> Tensor:
    """(batch or 1, q_length) bool: where positions return to the minimum of their row; nowhere behind cached keys.

    A model's mask function finds packed sequences by itself, at jumps of positions, if it gets the positions and there
    is no cache. For all other calls this is the rule: a jump may be what a user has cut out of one sequence.
    """
    is_start = position_ids == position_ids.amin(-1, keepdim=True)
    return is_start & (q_offset == 0) if isinstance(q_offset, Tensor) else is_start


def starts_by_offsets(offsets: Tensor, seqlen: int) -> Tensor:
    """(1, seqlen) bool: where the sequences of a row begin, from their offsets. Nothing is read."""
    starts = torch.zeros(seqlen + 1, dtype=torch.bool, device=offsets.device)
    return starts.index_fill(0, offsets.long().clamp(0, seqlen), True)[None, :seqlen]


def _real_keys(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Tensor:
    """(batch, kv_length) bool: the part of the mask of all tokens that belongs to the keys of this call."""
    is_real = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    missing = kv_length - is_real.shape[1]
    return torch.nn.functional.pad(is_real, (0, missing)) if missing else is_real


def _left_padding(attention_mask: Tensor, kv_offset: int, kv_length: int, end: int | Tensor) -> Tensor | None:
    """The first real key of each row of a causal mask, int32 (batch,), or (0,) where there is no padding.

    The result is None if a row has padding elsewhere than on the left.

    A model that generates asks for every token, mostly with such rows. This function takes two to seven small operators
    for them, where `RealKeys.of` and what follows it take thirty.

    Args: end: the end of the keys; a cache may have room behind it.
    """
    is_real = attention_mask.bool()[:, kv_offset:]
    seqlen = is_real.shape[1]
    if 0 in is_real.shape or seqlen > kv_length or not (isinstance(end, Tensor) or end == seqlen):
        return None
    count = is_real.sum(-1)
    if isinstance(end, Tensor):
        count = torch.where(end == seqlen, count, -1)  # -1 is no count
    counts = count.tolist()
    if all(number == seqlen for number in counts):
        return count.new_empty(0, dtype=torch.int32)
    first = is_real.view(torch.uint8).argmax(-1)
    if any(start + number != seqlen for start, number in zip(first.tolist(), counts, strict=True)):
        return None
    return first.to(torch.int32)


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


def _with_bounds(pattern: Pattern, low: Tensor, high: Tensor) -> Pattern:
    """The pattern in which queries see keys low to high, (batch, q_length) each, as a step of generation if it is one.

    A range that ends before its start is empty.
    """
    ranges = _ranges(low, high)
    if low.shape[1] > 1:
        return pattern._replace(ranges=ranges)
    return pattern._replace(is_causal=True, first=ranges[:, 0, 0, 0].contiguous(), end=ranges[:, 0, 0, 1].contiguous())


def _ranges(low: Tensor, high: Tensor) -> Tensor:
    return torch.stack((low.clamp(min=0).minimum(high), high), -1)[:, None].to(torch.int32)


class _Bounds(NamedTuple):
    """The keys that each query sees, start and end, (batch, q_length) each, and whether this is so; None: it is."""

    low: Tensor
    high: Tensor
    are_valid: Tensor | None = None


def _chunks(found: _Found, call: _Call) -> _Bounds:
    """The bounds of a mask of chunks: a query sees the keys of its chunk up to itself."""
    assert found.chunk_size is not None
    position = (torch.arange(call.q_length, device=call.device) + call.q_offset).expand(call.batch_size, -1)
    in_sequence = position if found.left_padding is None else position - found.left_padding[:, None]
    return _Bounds(position - in_sequence % found.chunk_size - call.kv_offset, position + 1 - call.kv_offset)


def _blocks(found: _Found, call: _Call) -> _Bounds:
    """The bounds of a mask with blocks: a query sees the keys up to itself, or those of its window, and its own block.

    That is valid where the real tokens of each block are neighbors. It is taken for so where the numbers of blocks grow
    along a row, as models number them.
    """
    assert found.blocks is not None
    number = found.blocks[:, call.kv_offset : call.kv_offset + call.kv_length]
    if call.attention_mask is not None:
        number = number.masked_fill(~_real_keys(call.attention_mask, call.kv_offset, call.kv_length), -1)
    is_start = torch.nn.functional.pad(number.diff(dim=-1) != 0, (1, 0), value=True)
    is_larger = number[:, 1:] > number.cummax(-1).values[:, :-1]
    own = torch.arange(call.q_length, device=number.device) + call.q_offset - call.kv_offset
    in_block, start, end = (t[:, own] for t in (number >= 0, *sequence_bounds(is_start)))
    low = torch.zeros_like(start) if found.window is None else (own - found.window[0]).expand_as(start)
    if not found.cuts_blocks:
        low = torch.where(in_block, start.minimum(low), low)
    return _Bounds(low, torch.where(in_block, end, own + 1), (is_larger | ~is_start[:, 1:] | (number[:, 1:] < 0)).all())


def _without_holes(whole: Tensor) -> Pattern:
    """A whole mask, (batch, 1, q_length, kv_length), as ranges of keys where these are neighbors. One flag is read."""
    bounds = _bounds_of(whole)
    return Pattern(whole=whole) if bounds is None else _with_bounds(Pattern(), *bounds)


def _bounds_of(whole: Tensor) -> tuple[Tensor, Tensor] | None:
    """The keys that each query sees, start and end, (batch, q_length) each; None where they are not neighbors."""
    if 0 in whole.shape or whole.shape[1] != 1:
        return None
    seen = whole[:, 0]
    low = seen.view(torch.uint8).argmax(-1)
    is_simple = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0] <= 1
    return (low, low + seen.sum(-1)) if is_simple.all() else None


def whole_mask(mask: Tensor, q: Tensor, k: Tensor) -> Pattern:
    """The pattern of a mask of four dimensions that a caller has made: ranges of keys if each query sees neighbors.

    The layers of a forward get the same tensor or equal slices of one, so the first layer, which reads one flag, leaves
    its result there. A mask of torch.inference_mode does not tell when its values change.
    """
    if mask.dtype != torch.bool or mask.shape[-1] < k.shape[1] or not may_wait(mask) or mask.is_inference():
        return Pattern(whole=mask)
    owner = mask if mask._base is None else mask._base
    key = mask._version, mask.shape, mask.stride(), mask.storage_offset()
    known, ranges = getattr(owner, _RANGES, (None, None))
    if known != key:
        bounds = _bounds_of(mask)
        ranges = None if bounds is None else _ranges(*bounds)
        setattr(owner, _RANGES, (key, ranges))
    if ranges is None:
        return Pattern(whole=mask)
    return Pattern(ranges=ranges.expand(-1, -1, q.shape[1], -1).contiguous())


def may_wait(t: Tensor) -> bool:
    """Whether the host may read a value of this tensor."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def offsets_of(is_start: Tensor) -> Tensor:
    """Offsets of sequences over the flattened batch, int32. The host reads their number.

    Args: is_start: (batch, tokens), where sequences begin, apart from the first one of a row.
    """
    starts = is_start.index_fill(1, torch.zeros(1, dtype=torch.int64, device=is_start.device), True).flatten().nonzero()
    return torch.nn.functional.pad(starts.flatten(), (0, 1), value=is_start.numel()).to(torch.int32)


# ---------------------------------------------------------------- patterns


class _Found(NamedTuple):
    """What the conditions of a mask function say."""

    is_causal: bool
    window: tuple[int, int | None] | None = None
    sequence_ids: Tensor | None = None  # (batch, seqlen) for packed sequences
    positions: Tensor | None = None  # (batch, seqlen), in packed sequences
    chunk_size: int | None = None  # a query sees keys of its own chunk only
    left_padding: Tensor | None = None  # (batch,): chunks begin behind it
    blocks: Tensor | None = None  # (batch, tokens): tokens of one number, from 0 on, also see each other
    cuts_blocks: bool = False  # whether the window hides keys of a query's own block


def _recognize(
    mask_function: Callable | None, num_positions: int, attention_mask: Tensor | None, options: dict[str, Any]
) -> _Found | None:
    """The pattern of transformers' composed mask function; None for a pattern that `attention_forward` cannot express.

    Args: attention_mask: as in `padding_mask`, bool. options: the further arguments of `padding_mask`.
    """
    if torch.compiler.is_compiling():
        return _recognize_compiled(mask_function, attention_mask, **options)
    found = _Found(False)
    for name, variables in _conditions(mask_function):
        if name == "causal_mask_function" and found.blocks is None:
            found = found._replace(is_causal=True)
        elif name == "packed_sequence_mask_function" and found.sequence_ids is None:
            found = found._replace(sequence_ids=variables["packed_sequence_mask"])
        elif name == "remap_positions_for_packed_sequence":
            found = found._replace(positions=variables["position_ids"])
        elif name == "chunked_overlay" and found.chunk_size is None:
            if num_positions > variables["chunk_size"]:  # else everything is still in the first chunk
                found = found._replace(chunk_size=variables["chunk_size"], left_padding=variables["left_padding"])
        elif name == "sliding_window_overlay" and found.window is None:
            found = found._replace(window=(variables["sliding_window"] - 1, None), cuts_blocks=found.blocks is not None)
        elif name == "or_masks" and found == _Found(False):
            first, *others = variables["mask_functions"]
            causal = _recognize(first, num_positions, attention_mask, options)
            added = [condition for other in others for condition in _conditions(other)]
            if causal is None or causal.blocks is not None or [kind for kind, _ in added] != ["blockwise_overlay"]:
                return None
            found = causal._replace(blocks=added[0][1]["block_sequence_ids"])
        elif name == "sliding_window_bidirectional_overlay" and found.window is None:
            found = found._replace(window=(variables["sliding_window"],) * 2)
        elif name != "bidirectional_mask_function":
            return None
    if found.blocks is not None:
        is_other = found.sequence_ids is not None or found.chunk_size is not None
        has_half_window = found.window is None or found.window[1] is None
        return found if found.is_causal and has_half_window and not is_other else None
    if found.chunk_size is not None:
        return found if found.is_causal and found.window is None else None
    is_half = found.window is not None and found.window[1] is None  # the other half is a causal mask's
    return found if found.is_causal or not is_half else None


def _recognize_compiled(
    mask_function: Callable | None,
    attention_mask: Tensor | None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> _Found | None:
    """The pattern as far as it is known under torch.compile, which cannot look into closures.

    transformers gives the size of a window or of a chunk, and allows skips where nothing else has been composed.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return _Found(mask_function is causal_mask_function)
    chunk_size = getattr(config, "attention_chunk_size", None)
    if local_size is None or config is None:
        return None
    if allow_is_bidirectional_skip and chunk_size is None:
        return _Found(False, window=(local_size, local_size))
    if allow_is_causal_skip and chunk_size is None:
        return _Found(True, window=(local_size - 1, None))
    is_chunked = allow_is_causal_skip and getattr(config, "sliding_window", None) is None and local_size == chunk_size
    if not is_chunked:
        return None
    left_padding = None if attention_mask is None else (attention_mask.cumsum(-1) == 0).sum(-1)
    return _Found(True, chunk_size=chunk_size, left_padding=left_padding)


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
