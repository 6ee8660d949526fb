"""The programs of benchmarks/, which a clone of the repository has and the installed package does not."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]  # of the clone, if this package lies in one


def load(module: str) -> ModuleType:
    """A module of benchmarks/. Raises: ImportError if this package does not lie in a clone."""
    if not (ROOT / "benchmarks" / "suites").is_dir():
        raise ImportError(f"{module}: expected onepass in a clone of its repository, which has benchmarks/, got {ROOT}")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(module)


def run_by_old_name(old: str, package: str, *arguments: str) -> NoReturn:
    """Run `python -m package arguments` for a command that gave its old name, with a warning."""
    new = " ".join((package, *arguments))
    warnings.warn(f"python -m {old} is now python -m {new}, in {ROOT}", FutureWarning, stacklevel=2)
    try:
        program = load(f"{package}.__main__")
    except ImportError as error:
        sys.exit(str(error))
    sys.exit(program.main([*arguments, *sys.argv[1:]]))
