"""Write onepass as a kernel for the Hugging Face Hub: a folder that `kernels.get_kernel` loads.

    python packaging/make_hub.py dist/hub

Layout, as the library `kernels` 0.17 reads it:

    build/torch-cpu/, build/torch-cuda/    the package, pure Python, with a metadata.json; its module gets the name of
                                           the metadata's id, and torch operators of its own (onepass/namespace.py)
    build.toml, README.md, LICENSE

The package's `__init__` also has flash-attn's functions, by which transformers recognizes a kernel for
`attn_implementation="org/onepass"`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = 1  # of the kernel: it changes with the API
# what serves this repository, and imports onepass by its name
LEFT_OUT = {"cli", "bench", "testing", "__pycache__", "py.typed"}
BACKENDS = {"cpu": [], "cuda": ["nvidia-cutlass-dsl", "tvm-ffi"]}
MORE_FUNCTIONS = """
from .compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ += ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
"""
BUILD_TOML = f"""[general]
name = "onepass"
license = "Apache-2.0"
version = {VERSION}
edition = 5
backends = ["cpu", "cuda"]

[torch]
"""


def write_hub(folder: Path) -> list[Path]:
    """Write the layout into a folder, replacing what an earlier run has written there.

    Returns: the folders of the variants.
    """
    shutil.rmtree(folder / "build", ignore_errors=True)
    variants = []
    for backend, depends in BACKENDS.items():
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(ROOT / "onepass", variant, ignore=lambda _, names: LEFT_OUT & set(names))
        init = variant / "__init__.py"
        init.write_text(init.read_text() + MORE_FUNCTIONS)
        metadata = {
            "name": "onepass",
            "id": f"_onepass_{backend}_{digest(variant)[:8]}",
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": depends,
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=1) + "\n")
        variants.append(variant)
    (folder / "build.toml").write_text(BUILD_TOML)
    (folder / "README.md").write_text(card())
    shutil.copy(ROOT / "LICENSE", folder)
    return variants


def digest(folder: Path) -> str:
    """The SHA-256 of all files of a folder and their names."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()


def card() -> str:
    """The page of the kernel on the Hub: the head of this repository's README, with how to load it."""
    head = (ROOT / "README.md").read_text().split("\n## ")[0]
    head = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", head)  # pictures
    head = re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", head)  # links into the repository
    return f"""---
license: apache-2.0
tags:
- kernels
---
{head.strip()}

```python
from kernels import get_kernel

onepass = get_kernel("ORGANIZATION/onepass", version={VERSION})
out = onepass.attention(q, k, v, causal=True)
```
"""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER")
    for path in write_hub(Path(sys.argv[1])):
        print(path)
