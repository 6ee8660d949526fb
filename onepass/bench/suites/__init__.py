"""The old names of the programs of benchmarks/suites: `python -m onepass.bench.suites.NAME`, for one release."""

from __future__ import annotations

import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import Any


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds a module of this package for each name; to run it runs the program of this name."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin=fullname) if fullname.rpartition(".")[0] == __name__ else None

    def get_source(self, fullname: str) -> str:
        program = fullname.rpartition(".")[2]
        call = f"run_by_old_name({fullname!r}, 'benchmarks', {program!r})"
        return f"from onepass.bench.clone import run_by_old_name\n{call}\n"


sys.meta_path.append(_OldNames())
