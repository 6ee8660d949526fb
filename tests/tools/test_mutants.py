"""The faults of `make mutants`: what is changed, what is left alone, and which are drawn."""

import sys
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"
sys.path.insert(0, str(MUTANTS))
from areas import AREAS, reason_out_of_reach  # noqa: E402
from mutate import can_be_parsed, mutants_of  # noqa: E402
from run import drawn_jobs  # noqa: E402

sys.path.remove(str(MUTANTS))
ROOT = MUTANTS.parents[1]


def changes(source: str) -> set[str]:
    """The mutants of a source of one line, as lines."""
    source += "\n"
    changed = (m.applied(source.encode()) for m in mutants_of("x.py", source.encode()))
    return {text.decode().strip() for text in changed if can_be_parsed(text)}


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
        ("a and b or c", {"a or b or c", "a and b and c", "a or c", "b or c", "a and b", "c"}),
        ("f(a and b and c)", {"f(a or b and c)", "f(a and b or c)", "f(b and c)", "f(a and c)", "f(a and b)"}),
        ("a.clamp_(min=b).c", {"a.c", "a.clamp_().c"}),
        ("a.b().nan_to_num(c)", {"a.b()"}),
        ("if a < b: raise c", {"if a <= b: raise c", "if a > b: raise c", "if False: raise c"}),
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
        ('"""About 3 things and not 4."""', set()),
        ("raise ValueError(f'expected {a + 1}, got {b - 1}')", set()),
        ("def f(x: Array[3]) -> Array[4]: return x", set()),
        ("def __repr__(self): return 'a' + str(3)", set()),
        ("@cache(maxsize=3)\ndef f(): return a", set()),
        ("for i in cutlass.range(n, unroll=1): a", set()),
    ],
)
def test_what_is_changed(source, expected):
    assert changes(source) == expected


FILES = [path for path in sorted((ROOT / "onepass").rglob("*.py")) if path.name != "__init__.py"]


def test_every_module_is_in_an_area_or_left_out_with_a_reason():
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        assert reason_out_of_reach(file) or any(area.group_of(file) for area in AREAS), file


def test_every_listed_test_is_there():
    for area in AREAS:
        for group in area.groups:
            for test in group.tests:
                assert (ROOT / test.partition("::")[0]).exists(), test


def test_few_faults_come_from_different_areas_and_many_from_all():
    drawn = drawn_jobs(10, seed=3)
    assert drawn == drawn_jobs(10, seed=3)
    assert len(drawn) == len({job.area for job in drawn}) == 10
    assert {job.mutant for job in drawn}.isdisjoint(job.mutant for job in drawn_jobs(10, seed=4))
    many = drawn_jobs(40, seed=5)
    assert len({job.mutant for job in many}) == 40
    assert {job.area for job in many} == {area.name for area in AREAS}
