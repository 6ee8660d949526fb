"""What tests read from compiled kernels is kept for later runs, and only what belongs to the same kernel is found."""

import functools

import kept_kernels
import pytest


def trace(width, tile=64):
    return width, tile


class Plain:
    def trace(self):
        return ()


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A function that reads a kernel, and what it has compiled."""
    pytest.importorskip("cutlass")
    monkeypatch.setenv("ONEPASS_TEST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept_kernels, "COMPILED_AGAIN", 0.0)
    kept_kernels.directory.cache_clear()
    done = []

    def read(*arguments, arch="sm_90a", result="code"):
        return kept_kernels.get(
            arch, functools.partial(trace, *arguments), lambda: done.append(arguments) or [result, None]
        )

    read.done = done
    yield read
    kept_kernels.directory.cache_clear()


def test_a_kernel_is_compiled_once(compiled):
    assert compiled(64) == compiled(64) == ["code", None]
    assert compiled.done == [(64,)]
    compiled(128)
    compiled(64, arch="sm_80")
    assert len(compiled.done) == 3


def test_a_damaged_entry_is_compiled_again(compiled):
    compiled(64)
    (entry,) = kept_kernels.directory().iterdir()
    entry.write_bytes(entry.read_bytes()[:-9])
    assert compiled(64) == ["code", None]
    assert len(compiled.done) == 2


def test_some_are_compiled_again_and_compared(compiled, monkeypatch):
    compiled(64)
    monkeypatch.setattr(kept_kernels, "COMPILED_AGAIN", 1.0)
    assert compiled(64) == ["code", None]
    assert len(compiled.done) == 2
    with pytest.raises(AssertionError, match=r"test_kept_kernels'.* compiles to now is not the kept one"):
        compiled(64, result="other code")


def test_other_sources_have_their_own_entries_and_old_ones_go(compiled, monkeypatch):
    from onepass.kernels.compiler import compile

    for number in range(kept_kernels.GENERATIONS + 2):
        monkeypatch.setattr(compile, "environment", lambda number=number: f"sources {number}")
        kept_kernels.directory.cache_clear()
        compiled(64)
    assert len(compiled.done) == kept_kernels.GENERATIONS + 2
    assert len(list(kept_kernels.directory().parent.iterdir())) == kept_kernels.GENERATIONS


@pytest.mark.parametrize(
    "unknown", [lambda: None, functools.partial(trace, object()), functools.partial(lambda: None), Plain().trace]
)
def test_a_function_that_does_not_say_what_it_traces_is_refused(unknown):
    with pytest.raises(ValueError, match="trace: expected a function of a module"):
        kept_kernels.description(unknown)
