"""The digest of the kernel cache covers every source that a kernel depends on."""

import ast
import importlib.util
import shutil
from pathlib import Path

import pytest

import onepass
from onepass.kernels.compiler import compile, sources

PACKAGE = Path(onepass.__file__).resolve().parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def file_of(name: str) -> Path | None:
    """The file in which Python itself finds a module; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent of the name is not a package
        return None
    return None if spec is None else Path(spec.origin).resolve()


def imports_of(path: Path) -> set[Path]:
    """The files of this package that a module imports, by its whole syntax tree and Python's own rules."""
    name = name_of(path)
    parent = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
            names = [f"{module}.{alias.name}" for alias in node.names]
            names = [full if full.startswith("onepass.") and file_of(full) else module for full in names]
        found |= {file_of(name) for name in names if name.split(".")[0] == "onepass"}
    return found


def test_what_a_kernel_imports_is_in_the_digest():
    """Imports are followed through all modules; text in a string that looks like an import may be covered as well."""
    covered = set(sources.of_kernels(PACKAGE))
    kernels = set((PACKAGE / "kernels").rglob("*.py"))
    assert kernels <= covered
    for path in covered:
        assert imports_of(path) <= covered, path
    assert {
        PACKAGE / "quantization/codec.py",
        PACKAGE / "problem/attention.py",
        PACKAGE / "geometry/splits.py",
    } <= covered
    reached, todo = set(), list(kernels)
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += imports_of(path)
    assert covered == reached, "files that no kernel imports"
    host = {"api/attention.py", "decode.py", "ops/attention.py", "tiled/forward.py", "cli/app.py", "bench/run.py"}
    assert not covered & {PACKAGE / name for name in host}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of this package's sources, from which the digest is computed."""
    package = tmp_path / "onepass"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compile, "__file__", str(package / "kernels" / "compiler" / "compile.py"))
    monkeypatch.setattr(sources, "PACKAGE", package)
    monkeypatch.setattr(compile.importlib.metadata, "version", lambda name: "1")
    return package


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("quantization/codec.py", True),
        ("problem/attention.py", True),
        ("geometry/integers.py", True),
        ("api/attention.py", False),
    ],
)
def test_a_constant_of_an_imported_module_makes_other_kernels(copied, name, counts):
    before = compile.environment.__wrapped__()
    assert compile.environment.__wrapped__() == before
    source = copied / name
    source.write_text(source.read_text() + "\nANOTHER = 1\n")
    assert (compile.environment.__wrapped__() != before) == counts


def test_every_form_of_an_import(tmp_path):
    package = tmp_path / "onepass"
    files = {
        "kernels/__init__.py": "",
        "kernels/one.py": '''
            """import statements are found in functions, too."""
            import os, onepass.plain
            from ..several import (
                A,  # a comment
                B,
            )
            def f():
                from .. import module, NAME
                if f:
                    from ... import elsewhere
                from ..folder import submodule
                from onepass.absolute import C; f()
        ''',
        "kernels/deeper/two.py": "from ...far import X\nfrom ..one import A\nfrom . import nothing_here",
        "several.py": "from .third import E",
        "folder/__init__.py": "",
        **dict.fromkeys(("plain.py", "module.py", "__init__.py", "absolute.py", "third.py", "far.py"), ""),
        "folder/submodule.py": "from . import NAME",
        "unused.py": "import onepass.several",
    }
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[12:] if line.startswith(" " * 12) else line for line in text.splitlines()))
    found = {path.relative_to(package).as_posix() for path in sources.of_kernels(package)}
    assert found == set(files) - {"unused.py"}
    (package / "kernels" / "one.py").write_text('"""\nimport that is none at all\n"""\nfrom .. import module\n')
    found = {path.relative_to(package).as_posix() for path in sources.of_kernels(package)}
    assert found == {"kernels/__init__.py", "kernels/one.py", "kernels/deeper/two.py", "module.py", "far.py"}
