"""The digest of the kernel cache covers every source that determines a kernel's code, and no other."""

import ast
import shutil
import sys
from pathlib import Path

import fresh_process
import packages
import pytest

import onepass
from onepass.kernels.compiler import compile, sources

PACKAGE = Path(onepass.__file__).resolve().parent

# The package itself, which imports everything, is left out: a module that takes something from it fails.
IMPORT_ALL = """
import importlib, sys, types
from pathlib import Path
package = Path(sys.argv[1])
sys.modules["onepass"] = types.ModuleType("onepass")
sys.modules["onepass"].__path__ = [str(package)]
for folder in sys.argv[2:]:
    for path in sorted((package / folder).rglob("*.py")):
        importlib.import_module(".".join(path.relative_to(package.parent).with_suffix("").parts))
print(*(module.__file__ for name, module in sys.modules.items() if name.startswith("onepass.")), sep="\\n")
"""


@packages.needs_compiler
def test_what_device_code_imports_is_in_the_digest():
    folders = [name for name in sources.FOLDERS if name != "kernels/launch"]
    status, output = fresh_process.run(IMPORT_ALL, arguments=(str(PACKAGE), *folders))
    imported = output.split()
    assert (status, len(imported) > 100) == (0, True), output
    assert not set(map(Path, imported)) - set(sources.of_kernels(PACKAGE))


def from_elsewhere(launch: Path) -> set[str]:
    """The names that a module of launches imports from files that are not in the digest."""
    covered, found = sources.of_kernels(PACKAGE), set()
    for node in ast.walk(ast.parse(launch.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            module = launch.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for name in node.names:
                files = (module / f"{name.name}.py", module.with_suffix(".py"), module / "__init__.py")
                if next(file for file in files if file.is_file()) not in covered:
                    found.add(name.asname or name.name)
    return found


@packages.needs_compiler
def test_traces_use_nothing_that_is_not_in_the_digest():
    """The functions that run in a trace lie in these files, and name nothing that launches import from others."""
    import code_digests
    from shipped import problem

    from onepass.kernels.launch import backward_sm90

    traces = [trace for _, (_, trace) in code_digests.requests()]
    traces += [request.trace for request in backward_sm90.compile_requests(problem(64, 64, has_key_ranges=True))]
    codes = set()
    sys.setprofile(lambda frame, event, _: codes.add(frame.f_code) if event == "call" else None)
    try:
        for trace in traces:
            trace()
    finally:
        sys.setprofile(None)
    ours = {code: path for code in codes if (path := Path(code.co_filename)).is_relative_to(PACKAGE)}
    assert not set(ours.values()) - set(sources.of_kernels(PACKAGE))
    launches = {path: from_elsewhere(path) for path in set(ours.values()) if path.parent.name == "launch"}
    assert len(launches) > 10
    assert {"heuristics", "tuned"} <= launches[PACKAGE / "kernels/launch/forward_sm90.py"]
    for code, path in ours.items():
        assert not launches.get(path, set()) & set(code.co_names), (path, code.co_name)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("quantization/codec.py", True),
        ("problem/attention.py", True),
        ("geometry/integers.py", True),
        ("kernels/config/sm90.py", True),
        ("kernels/device/sm90/forward/kernel.py", True),
        ("kernels/launch/arguments.py", True),
        ("kernels/compiler/compile.py", True),
        ("kernels/compiler/pool.py", False),
        ("kernels/heuristics/sm90.py", False),
        ("api/attention.py", False),
    ],
)
def test_an_edit_makes_other_kernels_where_it_may_change_them(tmp_path, monkeypatch, name, counts):
    package = tmp_path / "onepass"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "PACKAGE", package)
    monkeypatch.setattr(compile.importlib.metadata, "version", lambda name: "1")
    before = compile.environment.__wrapped__()
    assert compile.environment.__wrapped__() == before
    source = package / name
    source.write_text(source.read_text() + "\nANOTHER = 1\n")
    assert (compile.environment.__wrapped__() != before) == counts


@packages.needs_compiler
def test_the_main_kernel_of_each_backward_has_a_digest():
    """A backward of one kernel has no preprocess and no postprocess, but a digest like the others."""
    import code_digests

    names = {name for name, _ in code_digests.requests()}
    variants = "full", "causal", "causal deterministic"
    assert {f"sm90 backward {d} {variant}" for d in (64, 128, 256) for variant in variants} <= names
