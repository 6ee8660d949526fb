"""From tensors to the launches of a backward on Hopper."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...outputs import empty_gradients
from ...problem import AttentionInputs, AttentionProblem
from .. import compile, heuristics
from ..blocks import tile_scheduler
from ..blocks.integers import ceil_div
from ..config import BackwardConfig
from .launch import ARCH, LOG2_E, element_type, fake_tensor, tile_counter, tma_ready


def trace(problem: AttentionProblem, config: BackwardConfig) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from .backward import BackwardSm90

    dtype = element_type(problem.dtype)
    batch = () if problem.is_packed else (None,)

    def rows(columns: int):
        return fake_tensor(dtype, *batch, None, None, columns, align_bytes=16)

    def optional(value: object, is_given: bool):
        return value if is_given else None

    arguments = (
        rows(problem.head_dim),
        rows(problem.head_dim),
        rows(problem.head_dim_v),
        rows(problem.head_dim_v),
        rows(problem.head_dim),
        rows(problem.head_dim_v),
        fake_tensor(Float32, None, config.tile_m * config.head_dims(problem)[0], align_bytes=16),
        fake_tensor(Float32, None, 2 * config.tile_m, align_bytes=16),
        None,
        optional(fake_tensor(Int32, None, align_bytes=4), problem.is_packed),
        optional(fake_tensor(Int32, None, align_bytes=4), problem.is_packed),
        optional(fake_tensor(Int32, None, align_bytes=4), problem.has_seqused_k),
        Float32(1.0),
        Float32(1.0),
        optional(Float32(1.0), problem.softcap is not None),
        optional(Int32(0), problem.mask.window_left is not None),
        optional(Int32(0), problem.mask.window_right is not None),
        optional(fake_tensor(Int32, 1, align_bytes=4), config.dynamic_tiles),
        Int32(1),
        Int32(1),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return BackwardSm90(problem, config, dtype), arguments
