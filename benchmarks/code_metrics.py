"""How large the repository is, and how entangled: lines of code, docstrings, long signatures, import circles, words.

    python benchmarks/code_metrics.py                   # this checkout, as a table in Markdown
    python benchmarks/code_metrics.py BEFORE AFTER      # the folders of two checkouts, a column each

A line of code holds something other than blanks, a comment or a docstring. The wheel has the packages that
pyproject.toml lists. Public functions, classes and methods are those at the top of a module or a class whose names, and
that of the module, begin with no underscore. An import circle is a set of files each of which imports, in one step or
several, each of the others, in the wheel and in benchmarks/. Imports inside functions and for types alone count, too,
but the import of a module does not count as an import of the packages that contain it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

MANY_ARGUMENTS = 12
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Source(NamedTuple):
    """A file of Python.

    Attributes:
        module: its dotted name, seen from the checkout.
    """

    module: str
    is_package: bool
    text: str
    tree: ast.Module


def sources(root: Path, *folders: str) -> list[Source]:
    """The Python files in some folders of a checkout."""
    found = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        names = list(path.relative_to(root).with_suffix("").parts)
        if is_package := names[-1] == "__init__":
            names.pop()
        text = path.read_text()
        found.append(Source(".".join(names), is_package, text, ast.parse(text)))
    return found


def wheel_packages(root: Path) -> list[str]:
    """The folders that pyproject.toml puts into the wheel."""
    section = (root / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel]")[2]
    match = re.search(r"packages = \[(.*?)\]", section)
    if match is None:
        raise ValueError("pyproject.toml: expected a list of packages under [tool.hatch.build.targets.wheel]")
    return re.findall(r'"(.+?)"', match[1])


def code_lines(source: Source) -> int:
    """The number of lines without blank ones, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(source.tree):
        if isinstance(node, _Definition | ast.Module) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def total_lines(root: Path, *folders: str) -> int:
    return sum(map(code_lines, sources(root, *folders)))


def public_names(source: Source) -> Iterator[ast.Module | _Definition]:
    """The module, and its public functions, classes and methods."""
    if any(name.startswith("_") and not name.startswith("__") for name in source.module.split(".")):
        return
    yield source.tree
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, _Definition) and not node.name.startswith("_"):
                yield node
                if isinstance(node, ast.ClassDef):
                    waiting.append(node)


def number_of_arguments(function: _Function) -> int:
    """The number of named arguments, without * and **."""
    return len(function.args.posonlyargs) + len(function.args.args) + len(function.args.kwonlyargs)


def imported(source: Source, modules: set[str]) -> set[str]:
    """The modules, of those given, that a file imports anywhere."""
    found: set[str] = set()
    package = source.module.split(".")
    package = package if source.is_package else package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                found.add(name if name in modules else origin)
    return (found & modules) - {source.module}


def circles(files: Sequence[Source]) -> list[list[str]]:
    """The import circles: the strongly connected sets of at least two files."""
    names = {source.module for source in files}
    follows = {source.module: imported(source, names) for source in files}

    def reached(start: str, edges: dict[str, set[str]]) -> set[str]:
        seen, waiting = {start}, [start]
        while waiting:
            new = edges[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    backwards: dict[str, set[str]] = {name: set() for name in names}
    for name, targets in follows.items():
        for target in targets:
            backwards[target].add(name)
    found, left = [], set(names)
    while left:
        start = min(left)
        members = reached(start, follows) & reached(start, backwards)
        left -= members
        if len(members) > 1:
            found.append(sorted(members))
    return found


def words(*paths: Path) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def measure(root: Path) -> dict[str, str]:
    """The rows of the table for one checkout."""
    packages = wheel_packages(root)
    wheel = sources(root, *packages)
    public = [node for source in wheel for node in public_names(source)]
    documented = sum(ast.get_docstring(node) is not None for node in public)
    functions = [node for source in wheel for node in ast.walk(source.tree) if isinstance(node, _Function)]
    pages = [page for page in sorted((root / "docs").rglob("*.md")) if "lab" not in page.relative_to(root).parts]
    results = [path for path in (root / "benchmarks" / "results").iterdir() if path.is_file()]
    return {
        "lines of code in the wheel": f"{sum(map(code_lines, wheel)):,}",
        "with benchmarks/ and packaging/": f"{total_lines(root, *packages, 'benchmarks', 'packaging'):,}",
        "lines of code in tests/": f"{total_lines(root, 'tests'):,}",
        "public functions, classes and modules with a docstring": (
            f"{documented:,} of {len(public):,} ({100 * documented / len(public):.1f} %)"
        ),
        f"functions with {MANY_ARGUMENTS} or more arguments": str(
            sum(number_of_arguments(function) >= MANY_ARGUMENTS for function in functions)
        ),
        "import circles by file": str(len(circles(sources(root, *packages, "benchmarks")))),
        "words of docs/ without lab/": f"{words(*pages):,}",
        "words of README.md": f"{words(root / 'README.md'):,}",
        "files in benchmarks/results/": f"{len(results)}, {sum(f.stat().st_size for f in results) / 1e6:.2f} MB",
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkouts", type=Path, nargs="*", default=[here], help="folders; default: this checkout")
    parser.add_argument("--circles", action="store_true", help="also print the files of each import circle")
    args = parser.parse_args(argv)
    columns = [measure(root) for root in args.checkouts]
    heads = [""] if len(columns) == 1 else [str(root) for root in args.checkouts]
    print(f"| | {' | '.join(heads)} |\n|---|{'---:|' * len(columns)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")
    for root in args.checkouts if args.circles else ():
        for members in circles(sources(root, *wheel_packages(root), "benchmarks")):
            print(f"\n{root}: {', '.join(members)}")


if __name__ == "__main__":
    main()
