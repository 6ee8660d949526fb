"""What a CPU must be able to do to run the host code of a compiled kernel.

The compiler makes host code for the CPU that it runs on. Code of one CPU runs on every other CPU with the same features
or more of them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

# Transactional memory. No compiler uses it unasked, and Linux switches it off on many CPUs that have it.
_UNUSED = {"hle", "rtm"}


@functools.lru_cache(maxsize=1)
def features() -> str:
    """The features of this machine's CPU, sorted, as Linux names them, and its architecture: "avx avx2 ... x86_64"."""
    found = {platform.machine()}
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        found.update(line.partition(":")[2].split())
    return " ".join(sorted(found - _UNUSED))


def missing(needed: str) -> list[str]:
    """The features that this machine's CPU lacks. Args: needed: what `features` said where the code was compiled."""
    return sorted(set(needed.split()) - set(features().split()))
