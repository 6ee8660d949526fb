"""The faults of `make mutants`: what is changed, what is left alone, and that the record says why a fault survives."""

import ast
import json
import sys
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"
sys.path.insert(0, str(MUTANTS))
from areas import AREAS, reason_out_of_reach  # noqa: E402
from mutate import draw, mutants_of  # noqa: E402

sys.path.remove(str(MUTANTS))
ROOT = MUTANTS.parents[1]


def changes(source: str) -> set[str]:
    """The mutants of a source of one line, as lines."""
    source += "\n"
    return {m.applied(source.encode()).decode().strip() for m in mutants_of("x.py", source.encode())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", {"a <= b", "a > b"}),
        ("a == b", {"a != b"}),
        ("a is not None", {"a is None"}),
        ("a not in b", {"a in b"}),
        ("a < b <= c", {"a <= b <= c", "a > b <= c", "a < b < c", "a < b >= c"}),
        ("a + b", {"a - b"}),
        ("(a) - (b)", {"(a) + (b)"}),
        ("a // b", {"a * b"}),
        ("a += b", {"a -= b"}),
        ("a and b or c", {"a or b or c", "a and b and c"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("min(a, b)", {"max(a, b)"}),
        ("cute.arch.fmax(a, b)", {"cute.arch.fmin(a, b)"}),
        ("x[7]", {"x[8]", "x[6]"}),
        ("f(0.5)", {"f(0.625)"}),
        ("a = True", {"a = False"}),
        ("f(a, b=c, d=e)", {"f(a, d=e)", "f(a, b=c, )"}),
        ("é + a", {"é - a"}),
        ("assert a < b, 'a' + 'b'", {"assert a <= b, 'a' + 'b'", "assert a > b, 'a' + 'b'"}),
    ],
)
def test_what_is_changed(source, expected):
    assert changes(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""About 3 things and not 4."""',
        "raise ValueError(f'expected {a + 1}, got {b - 1}')",
        "f'{a + 1}'",
        "x: Array[3]",
        "def f(x: Array[3]) -> Array[4]: return x",
        "def __repr__(self): return 'a' + str(3)",
        "if TYPE_CHECKING: a = 3",
        "@cache(maxsize=3)\ndef f(): return a",
        "for i in cutlass.range(n, unroll=1): a",
        "from .. import a",
    ],
)
def test_what_is_left_alone(source):
    assert changes(source) == set()


FILES = [path for path in sorted((ROOT / "onepass").rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.slow
def test_every_change_is_one_line_that_can_be_parsed():
    for path in FILES[::7]:
        source = path.read_bytes()
        for mutant in mutants_of(path.name, source)[::23]:
            changed = mutant.applied(source)
            ast.parse(changed)
            lines = [x.splitlines() for x in (source, changed)]
            assert [a != b for a, b in zip(*lines, strict=True)].count(True) == 1


def test_the_draw_is_that_of_the_seed_and_not_of_the_place():
    source = (ROOT / "onepass/tiled/merge.py").read_bytes()
    all_of = mutants_of("merge.py", source)
    drawn = draw(all_of, 5, seed=0)
    assert drawn == draw(all_of, 5, seed=0) != draw(all_of, 5, seed=1)
    assert len({m.line for m in drawn}) == 5
    moved = draw(mutants_of("merge.py", b"A = None\n\n" + source), 5, seed=0)
    assert [(m.source, m.change, m.line - 2) for m in moved] == [(m.source, m.change, m.line) for m in drawn]


def test_every_module_is_in_an_area_or_left_out_with_a_reason():
    """Every module that computes has an area; the command line, the bench, tuning and interfaces have none."""
    others = "onepass/cli/", "onepass/bench/", "onepass/testing/", "onepass/tuning/", "onepass/compat/"
    others += ("onepass/integrations/",)
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        if file.startswith(others) or file.count("/") == 1 or reason_out_of_reach(file):
            continue
        assert any(area.group_of(file) for area in AREAS), file


def test_every_listed_test_is_there():
    for area in AREAS:
        for group in area.groups:
            for test in group.tests:
                assert (ROOT / test.partition("::")[0]).exists(), test


def test_the_record_has_sixty_faults_and_a_reason_for_each_survivor():
    record = json.loads((MUTANTS / "record.json").read_text())
    assert len(record["mutants"]) == sum(area.count for area in AREAS) >= 60
    for entry in record["mutants"]:
        assert entry["verdict"] in ("caught", "hangs") or entry["harmless"], entry
        assert entry["verdict"] != "caught" or entry["by"]
