"""The list of quick cases names tests and cases that there are."""

import quick_cases


def test_every_quick_case_exists(collected):
    found = {name.split("[")[0].removeprefix("tests/") for name in collected}
    cases = {name.removeprefix("tests/") for name in collected}
    named = {test: names for test, names in quick_cases.QUICK_CASES.items() if test in found}
    quick = {f"{test}[{name}]" for test, names in named.items() for name in names}
    assert sorted(quick - cases) == []
    if len(found) > 1000:  # the whole suite
        assert sorted(quick_cases.QUICK_CASES.keys() - found) == []


def test_cases_that_are_not_named_are_slow(monkeypatch):
    monkeypatch.setattr(quick_cases, "QUICK_CASES", {"a/test_a.py::test_one": ["x-1"], "a/test_a.py::test_two": []})
    assert not quick_cases.is_slow("tests/a/test_a.py::test_one[x-1]")
    assert quick_cases.is_slow("tests/a/test_a.py::test_one[x-2]")
    assert quick_cases.is_slow("tests/a/test_a.py::test_two")
    assert not quick_cases.is_slow("tests/a/test_a.py::test_three[x]")
