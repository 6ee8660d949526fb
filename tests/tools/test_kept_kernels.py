"""What tests read from compiled kernels is kept for later runs, and only what belongs to the same kernel is found."""

import dataclasses
import functools

import kept_kernels
import pytest


def trace(width, tile=64):
    return width, tile


@dataclasses.dataclass
class Tile:
    width: int

    def trace(self, is_split=False):
        return self.width, is_split


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


def test_some_are_compiled_again_and_compared(compiled, monkeypatch):
    compiled(64)
    monkeypatch.setattr(kept_kernels, "COMPILED_AGAIN", 1.0)
    assert compiled(64) == ["code", None]
    assert len(compiled.done) == 2
    with pytest.raises(AssertionError, match=r"test_kept_kernels'.* compiles to now is not the kept one"):
        compiled(64, result="other code")


def test_a_method_is_that_of_its_object():
    traces = [tile.trace for tile in (Tile(64), Tile(128))]
    traces += [functools.partial(trace, is_split=True) for trace in traces]
    assert len({kept_kernels.key("sm_90a", trace) for trace in traces}) == 4


def test_all_sources_of_kernels_count(tmp_path):
    names = {str(path.relative_to(kept_kernels.ROOT)) for path in kept_kernels.sources()}
    expected = "machine_code", "divergence", "ptx_interpreter", "fp8_softmax", "e4m3_kernel"
    assert names >= {f"tests/support/{name}.py" for name in expected}
    assert "benchmarks/timeline/stamps.py" in names
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "one.py").write_text("def trace():\n    import cutlass.cute as cute\n")
    (tmp_path / "tests" / "other.py").write_text("cutlass = None\n")
    assert [path.name for path in kept_kernels.sources(tmp_path)] == ["one.py"]


@pytest.mark.parametrize(
    "unknown", [lambda: None, functools.partial(trace, object()), functools.partial(lambda: None), Plain().trace]
)
def test_a_function_that_does_not_say_what_it_traces_is_refused(unknown):
    with pytest.raises(ValueError, match="trace: expected a function of a module"):
        kept_kernels.description(unknown)
