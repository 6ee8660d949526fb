"""Padded batches to packed sequences and back, with the names and results of `flash_attn.bert_padding`.

All functions have gradients. The functions that return `max_seqlen` as an int read it on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...validation.tensors import check_tensor, shape_of

__all__ = [
    "IndexFirstAxis",
    "IndexPutFirstAxis",
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of a tensor.

    Args:
        input: (rows, ...) with at least 2 dimensions.
        indices: (count,) int64 or int32, numbers of rows.

    Returns: (count, ...), a new tensor.
    """
    _check_indexed("input", input, indices)
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """The inverse of `index_first_axis`: (first_axis_dim, ...) with values at the indices and 0 elsewhere.

    Args:
        values: (count, ...) with at least 2 dimensions.
        indices: (count,) int64 or int32, different numbers below first_axis_dim.
    """
    _check_indexed("values", values, indices)
    if values.shape[0] != indices.shape[0]:
        raise ValueError(f"values: expected {indices.shape[0]} rows, one per index, got {values.shape[0]}")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


class IndexFirstAxis:
    """`index_first_axis` by the name of flash-attn's autograd function, as `apply`."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """`index_put_first_axis` by the name of flash-attn's autograd function, as `apply`."""

    apply = staticmethod(index_put_first_axis)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and input itself for a residual connection."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen) bool or int, nonzero = a token.
        unused_mask: (batch, seqlen), nonzero = a row that is packed but holds no token.

    Returns: the packed rows (total, ...); their indices in the flattened batch, (total,) int64; cu_seqlens
    (batch + 1,) int32; the longest sequence, an int; the numbers of tokens of attention_mask, (batch,) int32.
    """
    _check_batch(hidden_states, "attention_mask", attention_mask)
    rows = attention_mask != 0
    used = rows.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        _check_batch(hidden_states, "unused_mask", unused_mask)
        rows = rows | (unused_mask != 0)
    indices = rows.flatten().nonzero().flatten()
    lengths = rows.sum(-1, dtype=torch.int32)
    return *_packed(hidden_states, indices, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a padded batch whose entries hold several sequences each, one after the other.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen) int: the numbers of row b that are not 0 are the lengths of the
            sequences of entry b.

    Returns: the first four results of `unpad_input`, with a sequence for each length.
    """
    _check_batch(hidden_states, "attention_mask_in_length", attention_mask_in_length)
    tokens, seqlen = attention_mask_in_length.sum(-1, keepdim=True), attention_mask_in_length.shape[1]
    longest = int(tokens.max()) if tokens.numel() else 0
    if longest > seqlen:
        expected = f"lengths that sum to at most {seqlen} in each row"
        raise ValueError(f"attention_mask_in_length: expected {expected}, got a sum of {longest}")
    is_token = torch.arange(seqlen, device=tokens.device) < tokens
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    return _packed(hidden_states, is_token.flatten().nonzero().flatten(), lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...), 0 in rows that hold no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packed(hidden_states: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    rows = hidden_states.flatten(0, 1)
    return rows.index_select(0, indices), indices, cu_seqlens, longest


def _check_indexed(name: str, rows: Any, indices: Any) -> None:
    check_tensor(name, rows)
    check_tensor("indices", indices)
    if rows.dim() < 2:
        raise ValueError(f"{name}: expected at least 2 dimensions, got {shape_of(rows)}")
    if indices.dim() != 1:
        raise ValueError(f"indices: expected 1 dimension, got {shape_of(indices)}")


def _check_batch(hidden_states: Any, name: str, mask: Any) -> None:
    check_tensor("hidden_states", hidden_states)
    check_tensor(name, mask)
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        expected = f"(batch, seqlen) of hidden_states {shape_of(hidden_states)}"
        raise ValueError(f"{name}: expected shape {expected}, got {shape_of(mask)}")
