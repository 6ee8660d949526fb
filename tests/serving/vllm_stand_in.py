"""The names that the backend takes from vLLM, for tests where vLLM is not installed."""

from __future__ import annotations

import enum
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"


class AttentionBackendEnum(enum.Enum):
    CUSTOM = enum.auto()
    CPU_ATTN = enum.auto()


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = enum.auto()
    UNIFORM_SINGLE_TOKEN_DECODE = enum.auto()


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    pass


class AttentionImpl(Generic[T]):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        pass


CONTENTS = {
    "vllm": {},
    "vllm.config": {"VllmConfig": SimpleNamespace, "set_current_vllm_config": nullcontext},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    "vllm.v1": {},
    "vllm.v1.attention": {},
    "vllm.v1.attention.backend": {
        found.__name__: found
        for found in (
            AttentionBackend,
            AttentionCGSupport,
            AttentionImpl,
            AttentionMetadataBuilder,
            AttentionType,
            MultipleOf,
        )
    },
    "vllm.v1.attention.backends": {},
    "vllm.v1.attention.backends.registry": {
        "AttentionBackendEnum": AttentionBackendEnum,
        "register_backend": lambda backend, path: None,
    },
}


def modules() -> dict[str, ModuleType]:
    """Modules to put into sys.modules, by name."""
    found = {}
    for name, content in CONTENTS.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(content)
        package, _, own_name = name.rpartition(".")
        if package:
            setattr(found[package], own_name, found[name])
    return found
