"""The layout for the Hugging Face Hub: two copies of the package side by side, and the library `kernels`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    script = ROOT / "packaging" / "make_hub.py"
    subprocess.run([sys.executable, str(script), str(folder)], check=True, capture_output=True)
    return folder


def run(code, **environment):
    """Run code in a process of its own. Returns: what it printed."""
    found = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))), "HF_HUB_OFFLINE": "1"}
        | environment,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_layout(hub):
    assert sorted(p.name for p in hub.iterdir()) == ["LICENSE", "README.md", "build", "build.toml"]
    ids = set()
    for backend in ("cpu", "cuda"):
        variant = hub / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend}
        ids.add(metadata["id"])
        assert (variant / "kernels" / "launch" / "forward_sm90.py").exists()
        assert not {"cli", "bench", "testing"} & {p.name for p in variant.iterdir()}
    assert len(ids) == 2


def test_imports_are_relative(hub):
    for path in (hub / "build" / "torch-cuda").rglob("*.py"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        assert not re.search(r"^\s*(from|import) onepass\b", code, re.MULTILINE), path


LOAD = """
    import importlib.util, json, sys
    from pathlib import Path

    def load(variant):  # as kernels 0.17 does
        name = json.loads((variant / "metadata.json").read_text())["id"]
        spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
"""


def test_two_copies(hub):
    """A copy beside an installed onepass has operators, gradients and compiled graphs of its own."""
    code = f"""
    {LOAD}
    import onepass, torch
    other = load(Path({str(hub / "build" / "torch-cpu")!r}))
    assert other is not onepass
    assert other.attention is not onepass.attention
    q, k, v = (torch.randn(2, 40, 4, 16, requires_grad=True) for _ in range(3))
    results = []
    for package in (onepass, other):
        out = package.attention(q, k, v, causal=True, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]))
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        compiled = torch.compile(lambda *t: package.attention(*t, causal=True), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(q, k, v), package.attention(q, k, v, causal=True))
        lengths = torch.tensor([30, 40], dtype=torch.int32)
        results[-1] += (package.attention_decode(q[:, :1].detach(), k.detach(), v.detach(), cache_seqlens=lengths),)
    for a, b in zip(*results):
        assert torch.equal(a, b)
    name = other.__name__
    assert getattr(torch.ops, name).attention_forward is not torch.ops.onepass.attention_forward
    from importlib import import_module
    import_module(f"{{name}}.integrations.transformers")
    assert callable(other.flash_attn_func)
    print(name)
    """
    assert run(code).startswith("_onepass_cpu_")


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed")
def test_a_copy_compiles_kernels(hub, tmp_path):
    code = f"""
    {LOAD}
    import torch
    other = load(Path({str(hub / "build" / "torch-cuda")!r}))
    shapes = dict(q=(1, 256, 2, 64), k=(1, 256, 2, 64), v=(1, 256, 2, 64), dtype=torch.bfloat16)
    made = other.warmup([shapes, shapes | dict(causal=True)], backend="sm90", workers=2)
    print(*(kernel.name for kernel in made))
    """
    assert run(code, ONEPASS_CACHE_DIR=str(tmp_path)).split() == ["forward", "forward"]


@pytest.mark.package("kernels")
def test_get_kernel(hub):
    code = """
    import torch
    from kernels import get_kernel

    kernel = get_kernel("someone/onepass", version=1)
    import onepass

    q = torch.randn(1, 20, 2, 8)
    assert torch.equal(kernel.attention(q, q, q), onepass.attention(q, q, q))
    print(kernel.__name__)
    """
    assert run(code, LOCAL_KERNELS=f"someone/onepass={hub}").startswith("_onepass_cpu_")
