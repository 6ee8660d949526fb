"""The pages of the repository: their links resolve, and the files and functions that they name exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import onepass
from benchmarks import suites

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")],
    key=lambda path: path.relative_to(ROOT).as_posix(),
)
WIDEST_LINE, LONGEST_README = 230, 150  # a row of a table cannot be wrapped

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
IN_CODE = re.compile(r"`([^`\n]+)`")
# `onepass/api/attention.py`, `tests/gpu/`, or with a name of the module `onepass/api/attention.py::attention`
NAMED_PATH = re.compile(r"((?:onepass|tests|docs|examples|benchmarks)/[\w./-]*)(?:::([\w.]+))?")
PAGE_IN_CODE = re.compile(r"(?:docs|tests)/[\w/-]+\.md|docs/[\w/-]+\.(?:png|svg|py)")
NAMED_MODULE = re.compile(r"python\s+-m\s+((?:onepass|benchmarks)[\w.]*)")
NAMED_PROGRAM = re.compile(r"\s-m\s+benchmarks(?: |\n *)([a-z]\w*)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """A page without its blocks of code and formulas."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names_of(module: Path) -> set[str]:
    """What a module defines at its top, and the methods of its classes as Class.method."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_nothing_says_to_install_a_package_that_is_not_published():
    """A stranger could take the name. Dated logs, and extras of this project in its own metadata, may have it."""
    folders = "onepass", "docs", "examples", "tests", "packaging"
    files = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    read = [
        path for path in files if path.suffix in (".py", ".md", ".ipynb", ".txt", ".yml") or path.name == "Makefile"
    ]
    wanted = re.compile(r"install\s+(--?\S+\s+)*\\?['\"]?onepass\b")
    found = [path.name for path in read if "lab" not in path.parts and wanted.search(path.read_text(encoding="utf-8"))]
    assert len(read) > 500
    assert not found


def test_versions_agree():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == onepass.__version__


@pages
def test_links_resolve(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        exists = linked.is_relative_to(ROOT) and linked.exists()
        if not exists or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            broken.append(target)
    assert not broken


@pages
def test_files_and_functions_that_are_named_exist(page):
    missing = []
    for code in IN_CODE.findall(prose(page)):
        match = NAMED_PATH.fullmatch(code)
        if match is None:
            continue
        path, name = ROOT / match[1], match[2]
        if not path.exists() or (name is not None and name not in names_of(path)):
            missing.append(code)
    assert not missing


@pages
def test_modules_that_are_run_exist(page):
    modules = set(NAMED_MODULE.findall(page.read_text(encoding="utf-8")))
    files = {name: ROOT.joinpath(*name.split(".")) for name in modules}
    missing = [name for name, path in files.items() if not (path.with_suffix(".py").exists() or path.is_dir())]
    assert not missing


def test_programs_that_are_run_exist():
    """Commands in pages and in docstrings name programs that exist."""
    files = [*PAGES, *(path for folder in ("benchmarks", "onepass") for path in (ROOT / folder).rglob("*.py"))]
    named = {name for file in files for name in NAMED_PROGRAM.findall(file.read_text(encoding="utf-8"))}
    assert "chart" in named
    assert named <= {*suites.NAMES, "chart"}


@pages
def test_no_line_is_too_wide_to_read(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [number for number, line in enumerate(lines, 1) if len(line) > WIDEST_LINE] == []


def test_pages_that_the_code_names_exist():
    files = [*(ROOT / "onepass").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"]
    named = {(file, name) for file in files for name in PAGE_IN_CODE.findall(file.read_text(encoding="utf-8"))}
    assert [(str(file.relative_to(ROOT)), name) for file, name in named if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index():
    indexes = [ROOT / "docs" / folder / "README.md" for folder in (".", "reference", "lab")]
    linked = {indexes[0]}
    for index in indexes:
        linked |= {(index.parent / target.partition("#")[0]).resolve() for target in LINK.findall(prose(index))}
    assert [page for page in PAGES if ROOT / "docs" in page.parents and page not in linked] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README


def test_the_map_shows_every_folder():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "onepass").rglob("__init__.py")}
    assert [name for name in sorted(folders) if f"{name}/" not in text] == []
