"""The tensor arguments of the public functions besides q, k and v: their dtypes, shapes and gradients, in one table."""

from __future__ import annotations

from typing import NamedTuple

import torch

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INT32, FLOAT32 = (torch.int32,), (torch.float32,)

Shape = tuple[tuple[str, ...], ...]


class TensorRule(NamedTuple):
    """What a tensor argument may be.

    Attributes:
        dtypes: of the tensor. If there is one, a shape that `warmup` is given stands for a tensor of this dtype.
        shapes: the words for the sizes that each dimension may have, for each number of dimensions: "batch" entries or
            sequences, "heads" of q, "rows" of q, "positions" (rows; any number if queries have q_positions), "keys" of
            a sequence, "rows_k" of k or of a cache. Packed sequences have no leading dimension "1|batch", but the keys
            of a cache have one. (): other checks look at the shape.
        has_gradient: whether it may require one.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...] = ()
    has_gradient: bool = False


def _shapes(*texts: str) -> tuple[Shape, ...]:
    return tuple(tuple(tuple(word.split("|")) for word in text.split()) for text in texts)


TENSORS = {
    "sinks": TensorRule(SUPPORTED_DTYPES, has_gradient=True),
    "cu_seqlens_q": TensorRule(INT32),
    "cu_seqlens_k": TensorRule(INT32),
    "seqused_k": TensorRule(INT32),
    # the fields of `Modifiers`
    "seqstart_k": TensorRule(INT32, _shapes("batch")),
    "key_ranges": TensorRule(INT32, _shapes("1|batch 1|heads rows 2")),
    "q_positions": TensorRule(INT32, _shapes("1|batch rows")),
    "alibi_slopes": TensorRule(FLOAT32, _shapes("heads", "batch heads"), has_gradient=True),
    "bias": TensorRule(SUPPORTED_DTYPES, _shapes("1|batch 1|heads 1|positions 1|keys"), has_gradient=True),
    "query_ranges": TensorRule(INT32, _shapes("1|batch 1|heads rows_k 2")),
    # of `attention_decode`
    "cache_seqlens": TensorRule(INT32),
    "page_table": TensorRule(INT32),
    "rotary_cos": TensorRule(FLOAT32),
    "rotary_sin": TensorRule(FLOAT32),
    "k_descale": TensorRule(FLOAT32),
    "v_descale": TensorRule(FLOAT32),
    "rotary_positions_q": TensorRule(INT32),
    "rotary_positions_k": TensorRule(INT32),
}


def dtype_of_shape(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a tensor that is given as its shape. Args: dtype: of the tensors that may have several."""
    dtypes = TENSORS[name].dtypes if name in TENSORS else ()
    return dtypes[0] if len(dtypes) == 1 else dtype
