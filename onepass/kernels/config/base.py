"""The base of all configurations, and constants that they share."""

from __future__ import annotations

import functools
import math
import warnings
from ast import literal_eval
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch

from ...problem import AttentionProblem

HEAD_DIM_TILES = (64, 96, 128, 192, 256)
MAX_RESCALE_THRESHOLD = 15.0
MAX_RESCALE_THRESHOLD_FP8 = 3.8  # P is 32 at its largest reference then: a probability of 3e-5 of it is rounded to 0
STAT_ROWS = 2  # lse and delta of a query


def head_dim_tile(head_dim: int) -> int:
    """The head dim that kernels are compiled for: TMA fills the columns in between with zeros."""
    return next(tile for tile in HEAD_DIM_TILES if tile >= head_dim)


def column_block(head_dim: int, element_bytes: int = 2) -> int:
    """Columns of a tile in shared memory that lie next to each other: the widest swizzled row that divides it."""
    widths = (width // element_bytes for width in (128, 64, 32))
    return next(columns for columns in widths if head_dim % columns == 0)


def p_exponent(rescale_threshold: float, dtype: torch.dtype = torch.float8_e4m3fn) -> int:
    """The power of two that a P of this dtype is stored as where its row's reference lies.

    P may outgrow it by rescale_threshold powers of two and stays below what the dtype holds: of e4m3 8 up to 0.8, 6
    with 2.8; of float16 7 with 8.
    """
    return math.floor(math.log2(torch.finfo(dtype).max) - rescale_threshold)


Config = TypeVar("Config", bound="LaunchConfig")


class _TakesRemovedFields(type):
    """The type of configuration classes: their constructors take removed fields, with a warning, for one release."""

    # Fields that an earlier version had, with the value that all kernels have now.
    removed: dict[str, object]

    def __call__(cls, *values: Any, **named: Any) -> Any:
        if given := sorted(cls.removed.keys() & named.keys()):
            warnings.warn(f"{cls.__name__} no longer has {', '.join(given)}", FutureWarning, stacklevel=2)
            named = cls.without_removed(named)
        return super().__call__(*values, **named)

    def without_removed(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of fields without those of removed ones.

        Raises: ValueError for a field that was removed, with another value than kernels have now.
        """
        for name, value in cls.removed.items():
            if (given := values.get(name, value)) != value:
                raise ValueError(f"{name}: expected {value!r}, the one value that kernels have now, got {given!r}")
        return {name: value for name, value in values.items() if name not in cls.removed}


@functools.cache
def _types_of_fields(kind: type) -> tuple:
    """The name, the type and the names of the possible types of each field."""
    return tuple((f.name, f.type, str(f.type).replace("None", "NoneType").split(" | ")) for f in fields(kind))


@dataclass(frozen=True)
class LaunchConfig(metaclass=_TakesRemovedFields):
    """The base of all configurations: fields of built-in types, and a text that holds them.

    Raises: TypeError for a value of another type than its field's.
    """

    # All fields as "name=value ...", which is how a torch operator takes a configuration. Not a field, and made at
    # once: torch.compile can read it from a configuration that exists already, but not put it together.
    text: ClassVar[str]
    removed: ClassVar[dict[str, object]] = {}

    def __post_init__(self) -> None:
        words = []
        for name, expected, names_of_types in _types_of_fields(type(self)):
            value = getattr(self, name)
            if expected == "float" and type(value) is int:
                value = float(value)
                object.__setattr__(self, name, value)
            if type(value).__name__ not in names_of_types:
                raise TypeError(f"{name}: expected {expected}, got {value!r}")
            words.append(f"{name}={value!r}")
        object.__setattr__(self, "text", " ".join(words))

    @classmethod
    def from_text(cls: type[Config], text: str) -> Config:
        """The configuration whose `text` this is. Raises: ValueError as in `without_removed`."""
        values = {name: literal_eval(value) for name, value in (pair.split("=") for pair in text.split())}
        return cls(**cls.without_removed(values))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickle, also of an earlier version: without removed fields, and with the defaults of newer ones."""
        values = {name: value for name, value in state.items() if name != "text"}
        self.__dict__.update(vars(type(self)(**type(self).without_removed(values))))

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Whether a launch of this problem can have this configuration on a GPU of this architecture.

        Raises: UnsupportedError, naming the bound, what is needed and what there is.
        """
        raise NotImplementedError
