"""The layout for the Hugging Face Hub: two copies of the package side by side, and the library `kernels`."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import packages
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


@pytest.mark.slow
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


@pytest.mark.slow
@packages.needs_compiler
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


@pytest.mark.package("kernels")
def test_transformers_loads_it_by_its_name(hub):
    """Padded generation and, since the name has flash in it, continuous batching."""
    code = """
    from transformers.utils import import_utils

    # transformers 5.23 asks for kernels 0.18.2, and 0.17.2 has all that it uses here
    import_utils.is_kernels_available.__wrapped__.__defaults__ = "0.17", "0.19"
    import sys, torch, transformers

    def make(name):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        )
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()

    tokens = torch.randint(2, 97, (2, 11))
    mask = (torch.arange(11) >= torch.tensor([[0], [4]])).long()
    options = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)

    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)

    def generate(name):
        padded = make(name).generate(tokens, attention_mask=mask, generation_config=options)
        batched = make(name).generate_batch(
            inputs=[tokens[0].tolist(), tokens[1, :5].tolist()],
            generation_config=options,
            continuous_batching_config=batching,
            progress_bar=False,
        )
        return padded.tolist(), sorted(o.generated_tokens for o in batched.values())

    expected = generate("sdpa")
    assert not any(name.startswith("_onepass_cpu_") for name in sys.modules)
    assert generate("someone/onepass-flash") == expected
    print(*(name for name in sys.modules if name.startswith("_onepass_cpu_")))
    """
    assert run(code, LOCAL_KERNELS=f"someone/onepass-flash={hub}").startswith("_onepass_cpu_")
