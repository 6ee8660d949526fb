"""How one launch is computed: `base.py` what all configurations share, `sm90.py` Hopper's, `sm80.py` Ampere's."""

from .base import (
    HEAD_DIM_TILES,
    MAX_RESCALE_THRESHOLD,
    MAX_RESCALE_THRESHOLD_FP8,
    STAT_ROWS,
    Config,
    LaunchConfig,
    column_block,
    head_dim_tile,
    p_exponent,
)
from .sm80 import (
    MAX_REGISTERS,
    ROWS_PER_MMA,
    SCALAR_ADDS,
    SMEM_BYTES_BY_ARCH,
    VECTOR_BYTES,
    BackwardConfigSm80,
    ForwardConfigSm80,
    threads_per_row,
)
from .sm90 import (
    DS_BUFFERS,
    HOPPER,
    KEY_VECTORS,
    PROGRESS_HEADER,
    REGISTERS,
    REGISTERS_OF_PAGES,
    REGISTERS_OF_SEVERAL,
    REGISTERS_TO_CONVERT,
    ROWS_PER_WARPGROUP,
    SMEM_BYTES,
    BackwardConfigSm90,
    ForwardConfigSm90,
    value_blocks,
    value_columns,
)

# names that these classes had before the Ampere ones existed
BackwardConfig = BackwardConfigSm90
ForwardConfig = ForwardConfigSm90

__all__ = [
    "DS_BUFFERS",
    "HEAD_DIM_TILES",
    "HOPPER",
    "KEY_VECTORS",
    "MAX_REGISTERS",
    "MAX_RESCALE_THRESHOLD",
    "MAX_RESCALE_THRESHOLD_FP8",
    "PROGRESS_HEADER",
    "REGISTERS",
    "REGISTERS_OF_PAGES",
    "REGISTERS_OF_SEVERAL",
    "REGISTERS_TO_CONVERT",
    "ROWS_PER_MMA",
    "ROWS_PER_WARPGROUP",
    "SCALAR_ADDS",
    "SMEM_BYTES",
    "SMEM_BYTES_BY_ARCH",
    "STAT_ROWS",
    "VECTOR_BYTES",
    "BackwardConfig",
    "BackwardConfigSm80",
    "BackwardConfigSm90",
    "Config",
    "ForwardConfig",
    "ForwardConfigSm80",
    "ForwardConfigSm90",
    "LaunchConfig",
    "column_block",
    "head_dim_tile",
    "p_exponent",
    "threads_per_row",
    "value_blocks",
    "value_columns",
]
