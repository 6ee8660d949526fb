"""A test whose package is missing is skipped, and fails where all packages are to be there."""

import packages
import pytest


def test_a_missing_package(monkeypatch):
    packages.skip_or_fail("torch")
    monkeypatch.delenv("ONEPASS_TEST_PACKAGES", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs no_such_package: make test-packages"):
        packages.skip_or_fail("no_such_package")
    monkeypatch.setenv("ONEPASS_TEST_PACKAGES", "required")
    with pytest.raises(pytest.fail.Exception, match="needs no_such_package"):
        packages.skip_or_fail("no_such_package")


@pytest.mark.package("no_such_package")
def test_a_mark_is_asked_for():
    """This test is always skipped: without the hook in tests/conftest.py it fails."""
    raise AssertionError("ran without its package")
