"""The features of a CPU that compiled host code may need."""

import platform
from pathlib import Path

import pytest

from onepass.kernels.compiler import cpu


@pytest.fixture
def cpuinfo(monkeypatch):
    """Sets what Linux says of the CPU; None where there is no such file."""

    def read(text):
        def read_text(path):
            if text is None:
                raise FileNotFoundError(path)
            return text

        cpu.features.cache_clear()
        monkeypatch.setattr(Path, "read_text", read_text)
        monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    yield read
    cpu.features.cache_clear()


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("processor : 0\nFeatures\t: fp sve asimd\nbugs : x\nprocessor : 1\nFeatures : mmx\n", "aarch64 asimd fp sve"),
        ("nothing known\n", "aarch64"),
        (None, "aarch64"),
    ],
)
def test_features(cpuinfo, text, features):
    cpuinfo(text)
    assert cpu.features() == features


def test_missing_features(cpuinfo):
    cpuinfo("Features : fp asimd\n")
    assert cpu.missing("fp aarch64") == cpu.missing("") == []
    assert cpu.missing("sve fp i8mm aarch64") == ["i8mm", "sve"]
    assert cpu.missing("x86_64") == ["x86_64"]


def test_x86_needs_no_features(cpuinfo, monkeypatch):
    cpuinfo("flags : avx avx2\n")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert cpu.features() == "x86_64"
