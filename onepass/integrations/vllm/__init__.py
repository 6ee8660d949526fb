"""onepass as an attention backend of vLLM.

vLLM calls `register` by itself where onepass is installed (the entry point group `vllm.general_plugins`). On a GPU this
changes nothing until `--attention-backend CUSTOM` chooses it. vLLM's CPU platform has one backend, CPU_ATTN, and
ignores a choice; with ONEPASS_VLLM=1 in the environment onepass takes its place.

cache.py    vLLM's caches as onepass has them, and writing to them
backend.py  the classes that vLLM asks for
"""

from __future__ import annotations

from ... import variables

BACKEND = f"{__name__}.backend.OnepassBackend"


def register() -> None:
    """Register the backend with vLLM as CUSTOM and, on a CPU with ONEPASS_VLLM=1, also under the name CPU_ATTN.

    Raises: ValueError if ONEPASS_VLLM is not understood.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    replaces = variables.VLLM.read()
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    if current_platform.is_cpu() and replaces:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
