"""The faults of `make mutants`: what is changed, what is left alone, and which are drawn."""

import subprocess
import sys
import types
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"
sys.path.insert(0, str(MUTANTS))
from areas import AREAS, reason_out_of_reach  # noqa: E402
from mutate import can_be_parsed, draw, mutants_of  # noqa: E402
from run import CAUGHT, SURVIVED, Tree, drawn_jobs, most_survivors  # noqa: E402

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
            if not can_be_parsed(changed):
                continue
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


@pytest.mark.parametrize(("count", "most"), [(1, 1), (10, 8), (100, 54)])
def test_more_survivors_than_usual(count, most):
    assert most_survivors(count) == most


@pytest.mark.parametrize("status", [3, 4, -11])
def test_a_fault_after_which_no_test_can_run_is_caught(status, monkeypatch):
    tree = object.__new__(Tree)
    tree.root = ROOT / "of a copy"
    process = types.SimpleNamespace(returncode=status, communicate=lambda timeout: ("", None))
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **options: process)
    assert tree.run("tests/tools", "tests/api") == (CAUGHT, "")
    process.returncode = 5
    with pytest.raises(RuntimeError, match="tests/tools tests/api"):
        tree.run("tests/tools", "tests/api")


def test_faults_leave_the_kept_kernels_of_the_tree_alone(tmp_path, monkeypatch):
    environments = []
    tree = object.__new__(Tree)
    tree.root = tmp_path
    process = types.SimpleNamespace(returncode=0, communicate=lambda timeout: ("", None))
    monkeypatch.setattr(subprocess, "Popen", lambda *command, env, **options: environments.append(env) or process)
    assert tree.run("tests/device")[0] == SURVIVED
    (environment,) = environments
    assert Path(environment["ONEPASS_TEST_CACHE_DIR"]).parent == tmp_path
