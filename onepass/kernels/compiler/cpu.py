"""What a CPU must be able to do to run the host code of a compiled kernel.

The compiler makes host code for the CPU that it runs on. On x86-64, `for_every_cpu` asks it for code that all such CPUs
run, so that kernels compiled on one machine can be carried to any other. Elsewhere, code of one CPU runs on every other
CPU with the same features or more of them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path
from typing import Any

X86 = "x86_64"


def for_every_cpu(module: Any) -> None:
    """On x86-64, let the functions of an MLIR module become code without optional features of the CPU.

    Host code only checks arguments and launches: AVX saves it nothing that can be measured.

    Args: module: the `ir_module` of a compiled kernel, before it is exported.
    """
    if platform.machine() != X86:
        return
    from cutlass._mlir import ir

    with module.context:
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                attributes = operation.operation.attributes
                attributes["target_cpu"] = ir.StringAttr.get("x86-64")
                attributes["target_features"] = ir.Attribute.parse('#llvm.target_features<["+sse2"]>')


@functools.lru_cache(maxsize=1)
def features() -> str:
    """What host code that is compiled here needs: the architecture, and except on x86-64 the features of this CPU.

    They are sorted, as Linux names them: "aarch64 asimd fp ...".
    """
    found = {platform.machine()}
    if X86 not in found:
        with contextlib.suppress(OSError):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            line = next((line for line in lines if line.startswith("Features")), "")
            found.update(line.partition(":")[2].split())
    return " ".join(sorted(found))


def missing(needed: str) -> list[str]:
    """The features that this machine's CPU lacks. Args: needed: what `features` said where the code was compiled."""
    return sorted(set(needed.split()) - set(features().split()))
