"""One-line faults in Python source: every operator and constant that may be changed, found by the syntax tree.

A fault changes a comparison, a sum or product, `and` or `or`, a `not`, `min` or `max`, a number, True or False, or
drops a keyword argument, an operand of `and` or `or`, a call of a method such as `clamp`, or a refusal. Code without a
value that could be wrong is left alone: docstrings, the text of errors and `raise` statements as a whole, messages of
assertions, annotations, decorators, `__repr__` and `__str__`, blocks for type checkers, and hints to the compiler such
as `unroll`.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
OPERATORS: dict[type[ast.operator], tuple[str, tuple[str, ...]]] = {
    ast.Add: ("+", ("-",)),
    ast.Sub: ("-", ("+",)),
    ast.Mult: ("*", ("+",)),
    ast.Div: ("/", ("*",)),
    ast.FloorDiv: ("//", ("*",)),
    ast.Mod: ("%", ("//",)),
    ast.LShift: ("<<", (">>",)),
    ast.RShift: (">>", ("<<",)),
    ast.BitAnd: ("&", ("|",)),
    ast.BitOr: ("|", ("&",)),
}
SWAPPED_NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "fmin": "fmax",
    "fmax": "fmin",
    "any": "all",
    "all": "any",
    "amax": "amin",
    "floor": "ceil",
    "logical_and": "logical_or",
    "logical_or": "logical_and",
}
# Methods that give what they are called on, except in some cases.
GUARDS = {"clamp", "clamp_", "nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_", "contiguous"}
# Hints and texts, whose values do not affect results.
IDLE_KEYWORDS = {"unroll", "stacklevel", "loc", "ip", "strict"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        file: path in the repository.
        line: the number of the changed line, from 1.
        column: the first changed byte of the line.
        before, after: the changed bytes without and with the fault, as text.
        source: the line without the fault and without its indentation.
        scope: the function or class that contains the line.
    """

    file: str
    line: int
    column: int
    before: str
    after: str
    source: str
    scope: str

    @property
    def change(self) -> str:
        return f"{self.before} -> {self.after or 'nothing'}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.change}  in  {self.source}"

    def applied(self, source: bytes) -> bytes:
        """The whole file with the change. Raises: ValueError if the mutant was made from another source."""
        lines = source.splitlines(keepends=True)
        line, before = lines[self.line - 1], self.before.encode()
        end = self.column + len(before)
        if line[self.column : end] != before:
            raise ValueError(f"{self}: expected {self.before!r}, got {line[self.column : end].decode()!r}")
        lines[self.line - 1] = line[: self.column] + self.after.encode() + line[end:]
        return b"".join(lines)


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All mutants of one file, in the order of its lines. A few of them cannot be parsed."""
    lines = source.splitlines()
    unique = {(m.line, m.column, m.before, m.after): m for m in _Finder(file, source).found() if m.line <= len(lines)}
    return sorted(unique.values(), key=lambda m: (m.line, m.column, m.before, m.after))


def draw(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """Draw `count` mutants, at most one per line, in random order.

    The rank of a mutant depends on the seed, the text of its line and its position among equal lines. If a file changes
    in other lines, the same mutants are drawn again.
    """
    seen: Counter[tuple[str, ...]] = Counter()
    ranked = []
    for mutant in mutants:
        about = mutant.file, mutant.scope, mutant.source, mutant.change
        seen[about] += 1
        text = "\0".join((str(seed), *about, str(seen[about])))
        ranked.append((hashlib.sha256(text.encode()).digest(), mutant))
    drawn: dict[tuple[str, int], Mutant] = {}
    for _, mutant in sorted(ranked, key=lambda pair: pair[0]):
        if len(drawn) < count:
            drawn.setdefault((mutant.file, mutant.line), mutant)
    return list(drawn.values())


def can_be_parsed(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Finder:
    def __init__(self, file: str, source: bytes):
        self.file, self.source = file, source
        self.lines = source.splitlines()

    def found(self) -> Iterator[Mutant]:
        yield from self._of(ast.parse(self.source), "")

    def _of(self, node: ast.AST, scope: str) -> Iterator[Mutant]:
        if _is_idle(node):
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope = f"{scope}.{node.name}".strip(".")
        yield from self._changes(node, scope)
        for child in _children(node):
            yield from self._of(child, scope)

    def _changes(self, node: ast.AST, scope: str) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            left = node.left
            for op, right in zip(node.ops, node.comparators, strict=True):
                sign, others = COMPARISONS[type(op)]
                yield from self._between(left, right, sign, others, scope)
                left = right
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            sign, others = OPERATORS[type(node.op)]
            yield from self._between(node.left, node.right, sign, others, scope)
        elif isinstance(node, ast.BoolOp):
            sign, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, sign, (other,), scope)
                yield from self._span(left, left.end_col_offset, right, right.end_col_offset, scope)  # without right
            yield from self._span(node.values[0], node.col_offset, node.values[1], node.values[1].col_offset, scope)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and (text := self._text(node.test)):
            yield from self._at(node.test.lineno, node.test.col_offset, text, "False", scope)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            sign = "not " if isinstance(node.op, ast.Not) else "-"
            yield from self._at(node.lineno, node.col_offset, sign, "", scope)
        elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
            sign, others = OPERATORS[type(node.op)]
            yield from self._between(node.target, node.value, f"{sign}=", tuple(f"{o}=" for o in others), scope)
        elif isinstance(node, ast.Constant):
            yield from self._of_constant(node, scope)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node, scope)

    def _of_constant(self, node: ast.Constant, scope: str) -> Iterator[Mutant]:
        value, text = node.value, self._text(node)
        if text is None:
            return
        if isinstance(value, bool):
            yield from self._at(node.lineno, node.col_offset, text, str(not value), scope)
        elif isinstance(value, int):
            for other in (value + 1, value - 1):
                yield from self._at(node.lineno, node.col_offset, text, str(other), scope)
        elif isinstance(value, float):
            # far enough that no rounding hides the change, near enough that not everything breaks
            other_float = 1.0 if value == 0.0 else value * 1.25
            yield from self._at(node.lineno, node.col_offset, text, repr(other_float), scope)

    def _of_call(self, node: ast.Call, scope: str) -> Iterator[Mutant]:
        function = node.func
        name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
        if name in SWAPPED_NAMES:
            end = (function.end_col_offset or 0) - len(name)
            yield from self._at(function.end_lineno or 0, end, name, SWAPPED_NAMES[name], scope)
        if name in GUARDS and isinstance(function, ast.Attribute):
            yield from self._span(function.value, function.value.end_col_offset, node, node.end_col_offset, scope)
        for keyword in node.keywords:
            text = self._text(keyword)
            if keyword.arg is None or keyword.arg in IDLE_KEYWORDS or text is None:
                continue
            line = self.lines[keyword.lineno - 1]
            comma = re.match(rb"\s*,\s*", line[keyword.end_col_offset :])
            if comma:
                text += comma[0].decode()
            yield from self._at(keyword.lineno, keyword.col_offset, text, "", scope)

    def _between(
        self, left: ast.expr, right: ast.expr, sign: str, others: tuple[str, ...], scope: str
    ) -> Iterator[Mutant]:
        """The operator between two operands, if both are on its line."""
        if left.end_lineno != right.lineno:
            return
        start, end = left.end_col_offset or 0, right.col_offset
        space = self.lines[right.lineno - 1][start:end].decode()
        pattern = rf"\b{re.escape(sign)}\b" if sign[0].isalpha() else re.escape(sign)
        match = re.search(pattern, space)
        if match:
            for other in others:
                yield from self._at(right.lineno, start + len(space[: match.start()].encode()), sign, other, scope)

    def _span(
        self, first: ast.expr, start: int | None, last: ast.expr, end: int | None, scope: str
    ) -> Iterator[Mutant]:
        """Nothing from one column to another, if both are on the line where the first expression ends."""
        if first.lineno == first.end_lineno == last.lineno == last.end_lineno:
            yield from self._at(first.lineno, start or 0, self.lines[first.lineno - 1][start:end].decode(), "", scope)

    def _at(self, line: int, column: int, before: str, after: str, scope: str) -> Iterator[Mutant]:
        text = self.lines[line - 1]
        if text[column : column + len(before.encode())] == before.encode():
            yield Mutant(self.file, line, column, before, after, text.decode().strip(), scope)

    def _text(self, node: ast.expr | ast.keyword) -> str | None:
        """The source of a node, or None if it spans several lines."""
        if node.lineno != node.end_lineno:
            return None
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _is_idle(node: ast.AST) -> bool:
    """Whether nothing inside of the node is to be changed."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.FunctionDef):
        return node.name in ("__repr__", "__str__")
    if isinstance(node, ast.keyword):
        return node.arg in IDLE_KEYWORDS
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    # overloads only declare types
    return False


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node, except for annotations, decorators and messages of assertions."""
    if isinstance(node, ast.Assert):
        yield node.test
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
