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
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    yield read
    cpu.features.cache_clear()


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("processor : 0\nflags\t\t: sse avx2 avx\nbugs : x\nprocessor : 1\nflags : mmx\n", "avx avx2 sse x86_64"),
        ("flags : avx hle rtm\n", "avx x86_64"),  # transactions, which compiled code does not use
        ("Features\t: fp asimd\n", "asimd fp x86_64"),  # as ARM CPUs have it
        ("nothing known\n", "x86_64"),
        (None, "x86_64"),
    ],
)
def test_features(cpuinfo, text, features):
    cpuinfo(text)
    assert cpu.features() == features


def test_missing_features(cpuinfo):
    cpuinfo("flags : avx avx2\n")
    assert cpu.missing("avx x86_64") == cpu.missing("") == []
    assert cpu.missing("sse4a avx amx x86_64") == ["amx", "sse4a"]
