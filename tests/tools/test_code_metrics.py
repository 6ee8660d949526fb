"""benchmarks/code_metrics.py counts what it says, in a small checkout."""

from __future__ import annotations

import textwrap
from graphlib import TopologicalSorter

import grimp
import pytest

from benchmarks import code_metrics

DOCS = "docs"  # no pages of this repository


@pytest.fixture
def checkout(tmp_path):
    files = {
        "pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["one"]\n',
        "README.md": "one two\nthree\n",
        f"{DOCS}/guide.md": "four words are here\n",
        f"{DOCS}/lab/log.md": "not counted\n",
        "benchmarks/results/a.json": "{}",
        "benchmarks/run.py": "x = 1\n",
        "tests/test_one.py": "def test():\n    pass\n",
        "one/__init__.py": '"""A docstring\nof two lines."""\n\nfrom .high import work\n',
        "one/high.py": '''
            # a comment
            def work(a, b, c, d, e, f, g, *, h, i, j, k, l):
                """Documented."""
                from .low import rest
                text = """a string

                of three lines"""
                return rest(a, text)  # at the end

            def _private():
                pass
            ''',
        "one/low.py": """
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                from . import high
            class Thing:
                def rest(self, *more, **options):
                    return 1
            """,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


def test_table(checkout, capsys):
    code_metrics.main([str(checkout), "--circles"])
    lines = capsys.readouterr().out.splitlines()
    rows = (line.strip("|").split("|") for line in lines[2:] if line.startswith("|"))
    table = {name.strip(): value.strip() for name, value in rows}
    assert table == {
        "lines of code in the wheel": "15",  # 1, 8 and 6
        "with benchmarks/ and packaging/": "16",
        "lines of code in tests/": "2",
        # documented: the package and work; not: the modules high and low, Thing and its method
        "public functions, classes and modules with a docstring": "2 of 6 (33.3 %)",
        "functions with 12 or more arguments": "1",
        "import circles by file": "1",
        "words of docs/ without lab/": "4",
        "words of README.md": "3",
        "files in benchmarks/results/": "1, 0.00 MB",
    }
    assert lines[-1].endswith(": one.high, one.low")


def test_imports_make_no_circle():
    """Imports inside functions and for types alone count, too. The error names the files of a circle."""
    graph = grimp.build_graph("onepass", "benchmarks", cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
