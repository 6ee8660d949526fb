"""The Python blocks of the pages run, on a CPU, or name what they need.

A block that imports torch first stands alone. All others go on in the namespace of the block before. What they need
is in the blocks, since readers copy them. A comment before a block, which readers of the page do not see, may say how
it is tested:

    <!-- code: run with "cuda" as "cpu", 4096 as 64 -->     what to replace, so that it takes no GPU and little time
    <!-- code: not run, because it needs xformers -->       its names and keywords are looked up, it does not run
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import onepass
import onepass.compat
from onepass.integrations import torch_sdpa

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^<!-- code: (?P<words>.*?) -->\n)?^```python\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
NOT_RUN, RUN_WITH = "not run, because ", "run with "
FENCE = re.compile(r"^ *```python", re.MULTILINE)


class Block(NamedTuple):
    line: int
    words: str
    code: str

    @property
    def runs(self) -> bool:
        return not self.words.startswith(NOT_RUN)

    def source(self) -> str:
        """What runs, with the lines where the page has them."""
        code = self.code
        if self.words.startswith(RUN_WITH):
            for pair in self.words.removeprefix(RUN_WITH).split(", "):
                old, new = pair.split(" as ")
                assert old in code, f"{old} is not in the block"
                code = code.replace(old, new)
        return "\n" * self.line + code


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n")
        found.append(Block(line, match["words"] or "", match["code"]))
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES_WITH_CODE = [page for page in PAGES if FENCE.search(page.read_text(encoding="utf-8"))]
pages = pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=name_of)


@pages
def test_every_block_is_found_and_every_comment_understood(page):
    text, blocks = page.read_text(encoding="utf-8"), blocks_of(page)
    assert len(blocks) == len(FENCE.findall(text))
    assert text.count("<!-- code:") == sum(bool(block.words) for block in blocks)
    assert [b.words for b in blocks if b.words and not b.words.startswith((NOT_RUN, RUN_WITH))] == []


@pages
def test_blocks_run(page, monkeypatch):
    """The blocks of a page as they stand, in a process in which torch and onepass are left as they were."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    module = types.ModuleType("page_of_onepass")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # torch.compile looks a function's module up
    namespace, at_first = vars(module), dict(vars(module))
    try:
        for block in blocks_of(page):
            if block.runs:
                if block.code.startswith("import torch"):
                    namespace.clear()
                    namespace.update(at_first)
                exec(compile(block.source(), str(page), "exec"), namespace)
    finally:
        onepass.use_backend(None)
        torch_sdpa.deactivate()
        onepass.compat.uninstall()
        torch.use_deterministic_algorithms(is_deterministic)


@pages
def test_names_in_blocks_that_do_not_run_exist(page):
    missing = []
    for block in blocks_of(page):
        if not block.runs:
            missing += unknown_names(ast.parse(block.code))
    assert missing == []


def unknown_names(tree: ast.AST) -> list[str]:
    """What code takes from onepass that is not there: imported names, attributes, keywords of functions."""
    modules, missing = {"onepass": onepass}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "onepass":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    missing.append(f"{node.module}.{alias.name}")
        if isinstance(node, ast.Import):
            modules |= {
                a.asname: importlib.import_module(a.name) for a in node.names if a.asname and "onepass" in a.name
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            if not hasattr(modules[node.value.id], node.attr):
                missing.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func
            if isinstance(target.value, ast.Name) and hasattr(modules.get(target.value.id), target.attr):
                parameters = inspect.signature(getattr(modules[target.value.id], target.attr)).parameters
                if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                    missing += [f"{target.attr}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in parameters]
    return missing


def test_unknown_names_are_seen():
    code = (
        "import onepass.distributed as d\nfrom onepass import nothing\nonepass.gone(1)\nonepass.attention(q, scale=1)"
    )
    assert sorted(unknown_names(ast.parse(code))) == ["attention(scale=)", "onepass.gone", "onepass.nothing"]
