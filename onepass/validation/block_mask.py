"""`BlockMask`: which tiles of a mask are empty, full or partial, as an argument of `attention`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UnsupportedError
from ..problem import AttentionInputs, Blocks, Modifiers
from ..problem.attention import FULL, WORD
from .scalars import check_int
from .tensors import check_tensor, shape_of, short_name

UNIT = 64  # blocks have multiples of it
BlockSize = tuple[int, int]


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """Blocks of queries and keys, each of which is empty, partial or full.

        mask = onepass.BlockMask.from_blocks(is_kept, (64, 64))  # is_kept: (batch, num_heads_q, 128, 128) bool
        out = onepass.attention(q, k, v, block_mask=mask)

    Queries see no key of an empty block, all keys of a full one, and of a partial one those that bits, key_ranges and
    query_ranges all leave; ranges must hide nothing in a full block. The other arguments of a call still count: with
    causal=True, blocks above the diagonal are not visited, whatever they are. No tensor may change while a call's
    backward is to come.

    Attributes:
        kinds: (batch or 1, num_heads_q, num_heads_kv or 1, blocks of queries, blocks of keys) int8 on q's device: 0 for
            empty blocks, 1 for partial, 2 for full ones. Packed sequences count their blocks from their first query and
            key, batch is the number of sequences, and there are blocks enough for the longest one.
        block_size: queries and keys of a block, multiples of 64. The last blocks may be cut off by the end.
        key_ranges, query_ranges: as those of `attention`; None: they hide nothing.
        bits: (batch or 1, num_heads_q, num_heads_kv or 1, seqlen_q, ceil(seqlen_k / 32)) int32, of which only partial
            blocks are read: bit j % 32 of word j // 32 says whether a query sees key j. Packed sequences count queries
            and keys as for kinds. None: they hide nothing.
        most: of a mask that `compact` has made, the blocks that are not empty in the fullest row, and column.
        is_of_ranges: whether `from_ranges` has made kinds, which then say nothing that the ranges do not say.

    Raises: TypeError or ValueError with what was expected and given.
    """

    kinds: Tensor
    block_size: BlockSize = (128, 128)
    key_ranges: Tensor | None = None
    query_ranges: Tensor | None = None
    bits: Tensor | None = None
    most: tuple[int, int] | None = field(default=None, init=False)
    is_of_ranges: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        _check("kinds", self.kinds, torch.int8, "q_blocks, kv_blocks")
        if self.bits is not None:
            _check("bits", self.bits, torch.int32, "queries, words")
        object.__setattr__(self, "block_size", _checked_size(self.block_size))

    @classmethod
    def from_blocks(cls, blocks: Tensor, block_size: BlockSize = (128, 128)) -> BlockMask:
        """The mask of the blocks that are seen.

        Args: blocks: bool, in the shape of `kinds`.
        """
        _check("blocks", blocks, torch.bool, "q_blocks, kv_blocks")
        return cls(blocks.to(torch.int8) * FULL, block_size)

    @classmethod
    def from_indices(
        cls, counts: Tensor, indices: Tensor, kv_blocks: int, block_size: BlockSize = (128, 128)
    ) -> BlockMask:
        """The mask of the blocks that each block of queries sees.

        Args:
            counts: (batch or 1, heads, q_blocks) integers: how many blocks of keys each block of queries sees.
            indices: (batch or 1, heads, q_blocks, most blocks) integers: their numbers, before anything else.
            kv_blocks: the number of blocks of keys.
        """
        for name, t, dims in (("counts", counts, 3), ("indices", indices, 4)):
            check_tensor(name, t)
            if t.dtype not in (torch.int32, torch.int64) or t.dim() != dims or t.shape[:3] != counts.shape:
                expected = "int32 or int64, (batch, heads, q_blocks" + (", most blocks)" if dims == 4 else ")")
                raise ValueError(f"{name}: expected {expected}, got {short_name(t.dtype)}, shape {shape_of(t)}")
        if counts.device.type == indices.device.type == "cpu":  # for a GPU the host would wait
            counted = indices[torch.arange(indices.shape[-1]) < counts[..., None]]
            for name, t, end in (("counts", counts, indices.shape[-1] + 1), ("indices", counted, kv_blocks)):
                if ((t < 0) | (t >= end)).any():
                    least, most = (int(n) for n in t.aminmax())
                    raise ValueError(f"{name}: expected numbers from 0 to {end - 1}, got {least} to {most}")
        return cls(_listed(counts, indices, kv_blocks).to(torch.int8) * FULL, block_size)

    @classmethod
    def from_ranges(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        *,
        key_ranges: Tensor | None = None,
        query_ranges: Tensor | None = None,
        block_size: BlockSize = (128, 128),
    ) -> BlockMask:
        """The mask of ranges, as of `onepass.masks`. The host does not wait for a device.

        Args:
            key_ranges: (batch or 1, num_heads_q or 1, seqlen_q, 2) int32.
            query_ranges: (batch or 1, num_heads_q or 1, seqlen_k, 2) int32.
        """
        q_block, kv_block = _checked_size(block_size)
        found = []
        for name, t, rows in (("key_ranges", key_ranges, seqlen_q), ("query_ranges", query_ranges, seqlen_k)):
            if t is not None:
                _check(name, t, torch.int32, f"{rows}, 2")
                if t.shape[2:] != (rows, 2):
                    raise ValueError(f"{name}: expected (batch, heads, {rows}, 2), got shape {shape_of(t)}")
        if key_ranges is not None:
            found.append(_coverage(key_ranges, q_block, kv_block, seqlen_k))
        if query_ranges is not None:
            some, every = _coverage(query_ranges, kv_block, q_block, seqlen_q)
            found.append((some.mT, every.mT))
        if not found:
            raise TypeError("key_ranges: expected an int32 torch.Tensor where query_ranges is None, got None")
        some, every = (torch.stack(torch.broadcast_tensors(*each)).all(0) for each in zip(*found, strict=True))
        mask = cls(some.to(torch.int8) + every.to(torch.int8), block_size, key_ranges, query_ranges)
        object.__setattr__(mask, "is_of_ranges", True)
        return mask

    @classmethod
    def from_dense(cls, mask: Tensor, block_size: BlockSize = (128, 128)) -> BlockMask:
        """A mask of any pairs, in one bit for each. The host does not wait for a device.

        Args:
            mask: (batch or 1, num_heads_q, num_heads_kv or 1, seqlen_q, seqlen_k) bool, True where a query sees a key.
                Packed sequences count both from their first ones, and there are enough for the longest one.
        """
        _check("mask", mask, torch.bool, "seqlen_q, seqlen_k")
        block_size = _checked_size(block_size)
        return cls(kinds_of(mask, block_size), block_size, bits=_packed(mask))

    @classmethod
    def from_torch(cls, mask: Any) -> BlockMask:
        """The lists of a `torch.nn.attention.flex_attention.BlockMask` of lengths that its blocks divide.

        Raises: UnsupportedError for a mask_mod: FlexAttention applies it in the blocks of kv_indices.
        """
        from torch.nn.attention.flex_attention import BlockMask as TorchMask
        from torch.nn.attention.flex_attention import noop_mask

        if not isinstance(mask, TorchMask):
            raise TypeError(f"mask: expected torch's BlockMask, got {type(mask).__name__}")
        if mask.mask_mod is not noop_mask:
            raise UnsupportedError(
                f"mask_mod: expected none, got {mask.mask_mod!r}; from_ranges says many masks, from_dense any"
            )
        kv_blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
        seen = _listed(mask.kv_num_blocks, mask.kv_indices, kv_blocks)
        if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
            seen = seen | _listed(mask.full_kv_num_blocks, mask.full_kv_indices, kv_blocks)
        return cls.from_blocks(seen, (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1]))

    def __repr__(self) -> str:
        """Shapes and no values, for which the host would wait."""
        named = zip(("kinds", "key_ranges", "query_ranges", "bits"), self.tensors, strict=True)
        shapes = [f"{name}: {shape_of(t)}" for name, t in named if t is not None]
        return f"BlockMask({', '.join(shapes)}, blocks of {self.block_size})"

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """kinds, key_ranges, query_ranges and bits; None for one that the mask does not have."""
        return self.kinds, self.key_ranges, self.query_ranges, self.bits

    def to(self, device: torch.device | str) -> BlockMask:
        """The mask with its tensors on a device."""
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        moved: dict[str, Any] = {name: t.to(device) for name, t in given.items() if isinstance(t, Tensor)}
        return self._like(replace(self, **moved), self.most)

    def compact(self) -> BlockMask:
        """The mask, with which calls on a GPU take memory for the lists of its fullest row and column alone.

        The host waits for the device. A call makes lists of blocks of 4 bytes for each pair of a tile of queries and
        one of keys, as if no block were empty; with a tenth of the blocks in each row and column, these take about a
        tenth. Those of deterministic backwards take what they took. Afterwards kinds must not change.
        """
        most = 0, 0
        if self.kinds.numel():
            rows, columns = torch.stack([(self.kinds != 0).sum(dim).amax() for dim in (-1, -2)]).tolist()
            most = rows, columns
        return self._like(replace(self), most)

    def _like(self, mask: BlockMask, most: tuple[int, int] | None) -> BlockMask:
        """A new mask with what no argument of a mask says."""
        object.__setattr__(mask, "is_of_ranges", self.is_of_ranges)
        object.__setattr__(mask, "most", most)
        return mask


def kinds_of(visible: Tensor, size: BlockSize) -> Tensor:
    """(.., rows, columns) bool -> (.., blocks, blocks) int8: whether no pair of a block is seen, some are, or all."""
    (m, n), (rows, columns) = size, visible.shape[-2:]
    padding = 0, -columns % n, 0, -rows % m
    some, every = (
        pad(visible, padding, value=value).unflatten(-1, (-1, n)).unflatten(-3, (-1, m)) for value in (False, True)
    )
    return some.any(-1).any(-2).to(torch.int8) + every.all(-1).all(-2).to(torch.int8)


def _packed(pairs: Tensor) -> Tensor:
    """(.., columns) bool -> (.., words) int32. The bytes of a word go from its lowest bits to its highest ones."""
    by_byte = pad(pairs, (0, -pairs.shape[-1] % WORD)).unflatten(-1, (-1, WORD // 8, 8))
    values = 1 << torch.arange(8, dtype=torch.uint8, device=pairs.device)
    return (by_byte * values).sum(-1, dtype=torch.uint8).view(torch.int32)[..., 0]


def _check(name: str, t: Any, dtype: torch.dtype, rows_and_columns: str) -> None:
    check_tensor(name, t)
    if t.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {short_name(dtype)}, got {short_name(t.dtype)}")
    if t.dim() != 4:
        raise ValueError(f"{name}: expected (batch, heads, {rows_and_columns}), got shape {shape_of(t)}")


def _checked_size(block_size: Any) -> BlockSize:
    if not isinstance(block_size, (tuple, list)) or len(block_size) != 2:
        raise TypeError(f"block_size: expected a pair (queries, keys), got {block_size!r}")
    found = tuple(check_int("block_size", size, least=1) for size in block_size)
    if any(size % UNIT for size in found):
        raise ValueError(f"block_size: expected multiples of {UNIT}, got {tuple(block_size)}")
    return found[0], found[1]


def _listed(counts: Tensor, indices: Tensor, num_blocks: int) -> Tensor:
    """(.., num_blocks) bool: the blocks whose numbers are among the first ones of each list."""
    is_counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    numbers = torch.where(is_counted, indices, num_blocks).long()  # the others go to a column that is cut off
    found = torch.zeros(*counts.shape, num_blocks + 1, dtype=torch.bool, device=indices.device)
    return found.scatter_(-1, numbers, True)[..., :-1]


def _coverage(ranges: Tensor, rows_of_block: int, columns_of_block: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Which blocks the intervals of their rows reach, and which they cover: (.., blocks, blocks of columns) bool each.

    Memory is that of the ranges and of the blocks: each interval adds 1 at its first block and takes it away behind its
    last one, and a sum along the columns counts the rows of each block.
    """
    low, high = (t.clamp(0, num_columns).long() for t in ranges.unbind(-1))
    num_rows, blocks = low.shape[-1], -(-num_columns // columns_of_block)
    up_low, up_high = ((t + columns_of_block - 1) // columns_of_block for t in (low, high))
    is_empty = low >= high
    whole_end = torch.where(high == num_columns, blocks, high // columns_of_block)  # the last block may be cut off
    row_block = torch.arange(num_rows, device=ranges.device) // rows_of_block
    shape = *low.shape[:-1], -(-num_rows // rows_of_block), blocks + 1
    found = []
    for first, end in ((low // columns_of_block, up_high), (up_low, torch.maximum(whole_end, up_low))):
        first, end = first.masked_fill(is_empty, 0), end.masked_fill(is_empty, 0)
        changes = torch.zeros(shape, dtype=torch.int32, device=ranges.device).flatten(-2)
        for places, change in ((first, 1), (end, -1)):
            one = torch.full_like(places, change, dtype=torch.int32)
            changes.scatter_add_(-1, row_block * (blocks + 1) + places, one)
        found.append(changes.unflatten(-1, shape[-2:]).cumsum(-1)[..., :-1])
    starts = torch.arange(shape[-2], device=ranges.device) * rows_of_block
    rows = (num_rows - starts).clamp(max=rows_of_block)
    return found[0] > 0, found[1] == rows[:, None]


def blocks_of_call(
    mask: Any, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, given: dict[str, Any]
) -> tuple[Blocks | None, dict[str, Any]]:
    """The blocks of a call whose other tensors are checked, for the heads of q, and its modifiers with their ranges.

    On a GPU a mask that was made of ranges has no blocks: kernels make their own lists of ranges, and would look at
    kinds for nothing.

    Args: given: the modifiers of the call, those with the mask's ranges not yet checked.
    """
    if not isinstance(mask, BlockMask):
        maker = "from_dense" if isinstance(mask, Tensor) else "from_torch" if type(mask).__name__ == "BlockMask" else ""
        hint = f" (onepass.BlockMask.{maker} makes one of it)" if maker else ""
        raise TypeError(f"block_mask: expected a onepass.BlockMask or None, got {type(mask).__name__}{hint}")
    kinds = _of_query_heads("kinds", mask.kinds, mask.block_size, f"blocks of {mask.block_size}", q, k, cu_seqlens_q)
    bits = mask.bits
    if bits is not None:
        bits = _of_query_heads("bits", bits, (1, WORD), f"words of {WORD} keys", q, k, cu_seqlens_q)
    given = dict(given)
    for name in ("key_ranges", "query_ranges"):
        own, other = getattr(mask, name), given.get(name)
        if own is not None:
            given[name] = own if other is None else _intersected(name, own, other)
    blocks = None if mask.is_of_ranges and q.is_cuda else Blocks(kinds, mask.block_size, bits, mask.most)
    return blocks, given


def with_blocks(inputs: AttentionInputs, mask: BlockMask) -> AttentionInputs:
    """The checked tensors of a call with those of a mask that `blocks_of_call` takes."""
    given = {} if inputs.modifiers is None else inputs.modifiers._asdict()
    given = {name: t for name, t in given.items() if t is not None}
    blocks, given = blocks_of_call(mask, inputs.q, inputs.k, inputs.cu_seqlens_q, given)
    return inputs._replace(modifiers=Modifiers(**given), blocks=blocks)


def _of_query_heads(
    name: str, t: Tensor, unit: BlockSize, content: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None
) -> Tensor:
    """A tensor of a mask, checked, with one head or those of q. Args: unit: the rows and columns of an element."""
    if t.device != q.device:
        raise ValueError(f"block_mask: expected device {q.device} like q, got {t.device}")
    is_packed, heads_q, heads_kv = cu_seqlens_q is not None, q.shape[-2], k.shape[-2]
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    needed = [-(-length // size) for length, size in zip((q.shape[-3], k.shape[-3]), unit, strict=True)]
    agrees = t.shape[0] in (1, batch) and t.shape[1] in (1, heads_kv, heads_q)
    # of packed sequences only the device knows how many are needed
    agrees = agrees and (all(t.shape[2:]) or not all(needed))
    if not agrees or (not is_packed and list(t.shape[2:]) != needed):
        sizes = "rows, columns" if is_packed else ", ".join(map(str, needed))
        heads = " or ".join(map(str, dict.fromkeys((1, heads_kv, heads_q))))
        raise ValueError(
            f"block_mask: expected {name} of shape (1 or {batch}, {heads}, {sizes}) with {content}, got {shape_of(t)}"
        )
    return t if t.shape[1] in (1, heads_q) else t.repeat_interleave(heads_q // heads_kv, 1)


def _intersected(name: str, a: Tensor, b: Any) -> Tensor:
    check_tensor(name, b)
    low, high = torch.maximum(a[..., 0], b[..., 0]), torch.minimum(a[..., 1], b[..., 1])
    return torch.stack((low, high), -1)
