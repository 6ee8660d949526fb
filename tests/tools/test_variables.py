"""The environment variables: one meaning of true and false, and one error for what is not understood."""

import importlib
import re
from pathlib import Path

import pytest

import onepass
from onepass import log, variables
from onepass.kernels.compiler import compile, disk_cache

SWITCHES = [variables.LOG, variables.TUNED, variables.VLLM]


@pytest.mark.parametrize("variable", SWITCHES, ids=lambda variable: variable.name)
def test_switches(variable, monkeypatch):
    for text in ("1", "true", "True", "YES", " on "):
        monkeypatch.setenv(variable.name, text)
        assert variable.read() is True
    for text in ("0", "false", "FALSE", "No", "off"):
        monkeypatch.setenv(variable.name, text)
        assert variable.read() is False
    for text in ("", " ", None):
        monkeypatch.delenv(variable.name, raising=False)
        if text is not None:
            monkeypatch.setenv(variable.name, text)
        assert variable.read() is variable.default
    for text in ("2", "nope", "truee", "None"):
        monkeypatch.setenv(variable.name, text)
        with pytest.raises(ValueError, match=f"^{variable.name}: expected 1, true, yes or on, .*, got '{text}'$"):
            variable.read()


@pytest.mark.parametrize(
    ("text", "limit"), [("", None), ("1000", 1000), ("3k", 3072), ("2G", 2**31), (" 5M ", 5 * 2**20)]
)
def test_size_limit(text, limit, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_LIMIT", text)
    assert variables.CACHE_LIMIT.read() == limit


@pytest.mark.parametrize("text", ["G", "-1", "1.5G", "much", "\u0665"])
def test_size_limits_that_are_none(text, monkeypatch):
    monkeypatch.setenv("ONEPASS_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match="ONEPASS_CACHE_LIMIT: expected a number of bytes"):
        variables.CACHE_LIMIT.read()


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ONEPASS_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert disk_cache.cache_directory() == tmp_path / ".cache" / "onepass"
    for relative in ("relative", "~nobody-of-this-name/caches"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert disk_cache.cache_directory() == tmp_path / ".cache" / "onepass"
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert disk_cache.cache_directory() == tmp_path / "caches" / "onepass"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "~/kernels")
    assert disk_cache.cache_directory() == tmp_path / "kernels"
    monkeypatch.setenv("ONEPASS_CACHE_DIR", "~nobody-of-this-name/kernels")
    with pytest.raises(ValueError, match=r"ONEPASS_CACHE_DIR: expected a directory .*, got '~nobody"):
        disk_cache.cache_directory()


@pytest.fixture
def homeless(monkeypatch):
    """A user without HOME and without an entry in the system's list, as in many containers."""

    def unknown(path):
        raise RuntimeError("Could not determine home directory.")

    for name in ("ONEPASS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", unknown)


def test_without_a_home_directory_kernels_last_for_the_process(homeless, monkeypatch):
    words = "for this process only: this user has no home directory; ONEPASS_CACHE_DIR can name another one"

    class Compiled:
        def __tvm_ffi_object__(self):
            return "the kernel"

    monkeypatch.setattr(compile, "compile_now", lambda arch, trace: Compiled())
    monkeypatch.setattr(compile, "environment", lambda: "these versions")
    monkeypatch.setattr(compile, "_kernels", {})
    assert not compile.is_cached("forward", ("homeless",), "sm_90a")
    with pytest.warns(RuntimeWarning, match=words):
        assert not compile.has_disk_cache()
    with pytest.warns(RuntimeWarning, match=words):
        assert compile.get("forward", ("homeless",), "sm_90a", lambda: None) == "the kernel"


def test_only_this_module_reads_them():
    """Others may hand the whole environment on, and read variables of other programs."""
    package = Path(onepass.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "variables.py":
            source = path.read_text(encoding="utf-8")
            assert not re.search(r"""(environ(\.get\(|\[)|getenv\()["'](ONEPASS|XDG|HOME)""", source), path
            assert "environ.get(" not in source or path.name == "grid.py", path


def test_a_mistake_is_said_when_onepass_is_imported(monkeypatch):
    monkeypatch.setenv("ONEPASS_LOG", "maybe")
    with pytest.raises(ValueError, match=r"^ONEPASS_LOG: expected 1"):
        importlib.reload(log)
