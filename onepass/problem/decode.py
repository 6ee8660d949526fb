"""`DecodeInputs` and `DecodeProblem`: the tensors of a call of `attention_decode`, and the call without its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import NO_MODIFIERS, AttentionProblem, Modifiers, modifier_flags

FEW_QUERIES = 32  # queries of a sequence; no kernel for few queries takes more
LENGTH_STEP = 64  # keys; see `rounded_length`


def rounded_length(seqlen: int) -> int:
    """A length rounded up to a multiple of LENGTH_STEP and of an eighth of the largest power of two in it.

    It is at most 64 keys or an eighth above: near enough to choose a number of splits by it. A cache that grows by a
    key with each token has a new rounded length only once in 64 tokens or more.
    """
    step = max(LENGTH_STEP, 2 ** max(0, seqlen.bit_length() - 4))
    return -(-seqlen // step) * step


class RotaryPositions(NamedTuple):
    """The rows of the rotary tables for queries (batch or 1, seqlen_q) and new keys (batch or 1, seqlen_new).

    None: the positions at which they stand.
    """

    q: Tensor | None = None
    k: Tensor | None = None


class DecodeInputs(NamedTuple):
    """The tensors of one call, see `onepass.attention_decode`. Few calls have the last two fields."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    page_table: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    sinks: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    k_new: Tensor | None = None
    v_new: Tensor | None = None
    modifiers: Modifiers | None = None
    rotary_positions: RotaryPositions | None = None

    @property
    def is_modified(self) -> bool:
        return self.modifiers is not None or self.rotary_positions is not None

    def with_modifiers(self, given: tuple) -> DecodeInputs:
        """The inputs with more tensors, those that `MODIFIERS` names. Rotary positions of q follow q_positions."""
        modifiers, (positions_q, positions_k) = Modifiers(*given[:-2]), given[-2:]
        if positions_q is None and self.rotary_cos is not None:
            positions_q = modifiers.q_positions
        return DecodeInputs(
            *self[:-2],
            None if all(t is None for t in modifiers) else modifiers,
            None if positions_q is positions_k is None else RotaryPositions(positions_q, positions_k),
        )

    def detached(self) -> DecodeInputs:
        """The inputs without their history in autograd."""
        tensors: tuple[Any, ...] = tuple(None if t is None else t.detach() for t in self.tensors)
        inputs = DecodeInputs(*tensors[: len(TENSORS)])
        return inputs.with_modifiers(tensors[len(TENSORS) :]) if self.is_modified else inputs

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that `TENSORS` names; of a call with modifiers also those that `MODIFIERS` names."""
        if not self.is_modified:
            return self[:-2]
        return (*self[:-2], *(self.modifiers or NO_MODIFIERS)[:-1], *(self.rotary_positions or RotaryPositions()))

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_new(self) -> int:
        return 0 if self.k_new is None else self.k_new.shape[1]

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """The dtype of the cache, if it differs from q's."""
        return None if self.k_cache.dtype == self.q.dtype else self.k_cache.dtype

    @property
    def capacity(self) -> int:
        """The number of keys that a batch entry has room for."""
        page_size = self.k_cache.shape[1]
        return page_size if self.page_table is None else self.page_table.shape[1] * page_size

    def attention(self, **options: Any) -> AttentionProblem:
        """The call as attention over all positions of the cache.

        seqlen_k is the capacity of one sequence, even if queries are packed.

        Args:
            options: the fields of `AttentionProblem` that do not follow from tensors.
        """
        return AttentionProblem(
            dtype=self.q.dtype,
            device_type=self.q.device.type,
            batch=self.batch,
            seqlen_q=self.q.shape[-3],
            seqlen_k=self.capacity,
            num_heads_q=self.q.shape[-2],
            num_heads_kv=self.k_cache.shape[2],
            head_dim=self.q.shape[-1],
            head_dim_v=self.v_cache.shape[3],
            has_sinks=self.sinks is not None,
            has_seqused_k=True,
            is_packed=self.cu_seqlens_q is not None,
            kv_dtype=self.kv_dtype,
            query_ranges_of_positions=self.modifiers is not None and self.modifiers.query_ranges is not None,
            **modifier_flags(self.modifiers),
            **options,
        )


# names of the arguments of `onepass.attention_decode` that are tensors: those of all calls, and those of few
TENSORS = DecodeInputs._fields[:-2]
MODIFIERS = (*Modifiers._fields[:-1], "rotary_positions_q", "rotary_positions_k")


@dataclass(frozen=True)
class DecodeProblem:
    """One call of attention over a cache, without its data.

    Attributes:
        attention: the call as attention over all positions of the cache; `seqused_k` of them are filled.
        page_size: keys of a page, if rows of the cache are found through a page table; None: there is no page table.
        num_splits: number of splits of each sequence's keys; None: the backend chooses.
        split_size: keys of a split, counted from the first key on; None: the splits of a sequence have equal lengths.
        rotary_interleaved: rotated pairs are neighbors (0, 1), (2, 3), ..; else (0, d / 2), (1, d / 2 + 1), ..
        check_values: read lengths and page numbers on the host, and refuse invalid ones.
        has_descales: an e4m3 cache has descales: real value = stored value * descale.
        kv_block: keys of a block (with a page table, of a page) that has its own descale; None: the keys of a sequence
            share one.
        has_aligned_rows: rows of both caches begin at multiples of 16 bytes.
        max_seqlen_q: upper bound on the queries of a packed sequence, if it is at most FEW_QUERIES: a hint for the
            choice of a kernel.
        has_rotary_positions: the call has `RotaryPositions`.
    """

    attention: AttentionProblem
    page_size: int | None = None
    num_splits: int | None = None
    split_size: int | None = None
    rotary_interleaved: bool = False
    check_values: bool = False
    has_descales: bool = False
    kv_block: int | None = None
    has_aligned_rows: bool = True
    max_seqlen_q: int | None = None
    has_rotary_positions: bool = False

    @classmethod
    def of(cls, attention: AttentionProblem, inputs: DecodeInputs, **options: Any) -> DecodeProblem:
        """The problem that these tensors and options pose; they have been checked before."""
        return cls(
            attention,
            page_size=None if inputs.page_table is None else inputs.k_cache.shape[1],
            has_descales=inputs.k_descale is not None,
            has_aligned_rows=_has_aligned_rows(inputs.k_cache) and _has_aligned_rows(inputs.v_cache),
            has_rotary_positions=inputs.rotary_positions is not None,
            **options,
        )

    @property
    def sizing_problem(self) -> AttentionProblem:
        """The problem that a configuration is sized for: with max_seqlen_q, a batch with that many queries each."""
        if self.max_seqlen_q is None:
            return self.attention
        return replace(self.attention, is_packed=False, seqlen_q=self.max_seqlen_q)

    @property
    def of_rounded_length(self) -> DecodeProblem:
        """The problem that launches are prepared for, so that one serves all caches of nearly this length.

        Where a tensor or the size of a split goes with the length of the cache, it is the problem itself.
        """
        if self.is_paged or self.attention.is_packed or self.attention.has_bias or self.attention.has_query_ranges:
            return self
        if self.kv_block is not None or self.split_size is not None:
            return self
        return replace(self, attention=replace(self.attention, seqlen_k=rounded_length(self.attention.seqlen_k)))

    @property
    def is_paged(self) -> bool:
        return self.page_size is not None


def _has_aligned_rows(cache: Tensor) -> bool:
    """Whether the rows of a cache begin at multiples of 16 bytes, if its memory does, as torch's allocations do.

    Under torch.compile only strides count. A backend that needs aligned rows refuses the call if they are not aligned.
    """
    steps = [stride for size, stride in zip(cache.shape[:-1], cache.stride()[:-1], strict=True) if size != 1]
    offset = 0 if torch.compiler.is_compiling() else cache.storage_offset()
    return all(n * cache.element_size() % 16 == 0 for n in (offset, *steps))


def refuse_lengths(first: int, last: int, capacity: int, seqlen_new: int) -> None:
    """Raises: ValueError if filled lengths from `first` to `last` are not lengths or leave no room for new keys."""
    if first < 0 or last + seqlen_new > capacity:
        given = first if first < 0 else last
        less = f" less {seqlen_new} new keys" if seqlen_new else ""
        raise ValueError(
            f"cache_seqlens: expected 0 to {capacity - seqlen_new}, the {capacity} positions of the cache{less}, "
            f"got {given}"
        )
