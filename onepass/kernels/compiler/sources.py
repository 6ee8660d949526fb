"""The sources that determine a kernel's code beyond its key: device code, the traces in launch/, and what both import.

A constant of any of them is part of the machine code, so the keys of the disk cache hold a digest of these files.
Heuristics are not among them: they choose a configuration, which the key says in full. Import contracts in
pyproject.toml keep device code from importing anything else.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]
FILES = ("errors.py", "namespace.py", "kernels/__init__.py", "kernels/arguments.py", "kernels/compiler/compile.py")
FOLDERS = ("geometry", "problem", "quantization", "kernels/config", "kernels/device", "kernels/launch")


def of_kernels(package: Path) -> list[Path]:
    """The files, sorted. Args: package: the directory of this package."""
    found = [package / name for name in FILES]
    return sorted(found + [path for name in FOLDERS for path in (package / name).rglob("*.py")])
