"""Tests of packages that run on onepass: `@pytest.mark.package("diffusers")` says which one a test needs.

tests/packages.txt has the packages, and `make test-packages` runs these tests where they are installed. There
ONEPASS_TEST_PACKAGES=required is set, and a package that is missing makes its tests fail. Elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import os

import machine_code
import pytest


def skip_or_fail(package: str) -> None:
    """End a test whose package is not installed."""
    if importlib.util.find_spec(package) is None:
        is_required = os.environ.get("ONEPASS_TEST_PACKAGES") == "required"
        end = pytest.fail if is_required else pytest.skip
        end(f"needs {package}: make test-packages")


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)
needs_disassembler = pytest.mark.skipif(
    machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"
)
needs_machine_code = [needs_compiler, needs_disassembler]
