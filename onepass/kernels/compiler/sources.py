"""The sources that the code of a kernel may depend on: all modules of kernels, and what they import of this package.

A constant that a kernel takes from another module is part of its machine code, so the keys of the disk cache hold a
digest of these files. They are found without importing them, by their import statements, wherever in a file these are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]

# Parsing whole files would take every process that runs a kernel half a second, these statements take a tenth.
_STATEMENT = re.compile(r"^[ \t]*((?:from[ \t]+[.\w]+[ \t]+)?import\b[ \t]*(?:\([^)]*\)|[^\n#;]*))", re.MULTILINE)


def of_kernels(package: Path) -> list[Path]:
    """The files, sorted. Args: package: the directory of this package."""
    found: set[Path] = set()
    todo = list((package / "kernels").rglob("*.py"))
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            todo += imported_by(path, package)
    return sorted(found)


def imported_by(path: Path, package: Path) -> Iterator[Path]:
    """The files of the package that a file imports itself."""
    for node in _imports(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.ImportFrom):
            yield from _named(_module_of(node, path, package), [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _named(_absolute(alias.name, package), [])


def _imports(source: str) -> list[ast.stmt]:
    """The import statements of a module (and what looks like one in its strings)."""
    try:
        return [ast.parse(statement).body[0] for statement in _STATEMENT.findall(source)]
    except SyntaxError:  # a sentence in a docstring that begins like one
        return [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def _module_of(node: ast.ImportFrom, path: Path, package: Path) -> Path | None:
    """The module that names are imported from, as a path without a suffix; None if it is another package's."""
    if node.level == 0:
        return _absolute(node.module or "", package)
    return path.parents[node.level - 1].joinpath(*(node.module or "").split("."))


def _absolute(name: str, package: Path) -> Path | None:
    first, *others = name.split(".")
    return package.joinpath(*others) if first == package.name else None


def _named(module: Path | None, names: list[str]) -> Iterator[Path]:
    """The files of a module's submodules of these names, and its own where one of them is none or there are none."""
    if module is None:
        return
    submodules = [_file_of(module / name) for name in names]
    own = _file_of(module)
    yield from (file for file in submodules if file is not None)
    if own is not None and (None in submodules or not names):
        yield own


def _file_of(module: Path) -> Path | None:
    return next((file for file in (module.with_suffix(".py"), module / "__init__.py") if file.is_file()), None)
