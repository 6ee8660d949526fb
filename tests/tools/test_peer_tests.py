"""The plugin that runs peers' tests: its sample is a Latin hypercube, and its outcomes are counted."""

import json
from pathlib import Path

import fresh_process
import pytest

from onepass import compat

HERE = Path(__file__).resolve().parents[1] / "peers"

pytestmark = pytest.mark.skipif(not hasattr(compat, "install"), reason="the plugin puts modules in place by install()")

TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [8, 16, 32, 64])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(4, 8), (8, 4), (1, 5), (64, 64)])
def test_sampled(seqlen_q, seqlen_k, d, causal):
    q = torch.randn(1, seqlen_q, 2, d, device="cuda")
    assert flash_attn_func(q, q, q, causal=causal).is_cuda
    for i in range(50):
        pass
    assert i < 50


def test_refused():
    raise NotImplementedError("no")


def test_failed():
    raise AssertionError("wrong")


def test_skipped():
    pytest.skip("not here")
"""


def run(folder, *options):
    """Run `TESTS` with 4 cases of each function. Returns: the outcomes, from --peer-json."""
    (folder / "test_peer.py").write_text(TESTS)
    options = [
        "--peer-cases=4",
        "--peer-pairs=100",
        "--peer-device=cpu",
        *options,
        f"--peer-json={folder / 'out.json'}",
    ]
    command = ["-p", "peer_tests", "-p", "no:cacheprovider", "-q", *options, "test_peer.py"]
    status, output = fresh_process.run(f"""
        import os, sys
        os.chdir({str(folder)!r})
        os.environ |= {{"PATH": "", "ONEPASS_CACHE_DIR": {str(folder)!r}}}
        sys.path[:0] = [{str(HERE)!r}, {str(HERE.parents[1])!r}]
        import pytest
        sys.exit(pytest.main({command!r}))
    """)
    assert status in (0, 1), output
    return json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(tmp_path_factory.mktemp("peers"))


def test_outcomes(outcomes):
    kinds = {name: {case["outcome"] for case in cases.values()} for name, cases in outcomes.items()}
    assert kinds == {
        "test_sampled": {"passed"},
        "test_refused": {"refused"},
        "test_failed": {"failed"},
        "test_skipped": {"skipped"},
    }


def test_each_value_of_each_parameter_is_met_equally_often(outcomes):
    """4 cases: each of 4 head_dims once, causal twice, and each of the 3 pairs of lengths that are small enough."""
    names = [node.split("[")[1].rstrip("]").split("-") for node in outcomes["test_sampled"]]
    assert len(names) == 4
    assert sorted(int(name[2]) for name in names) == [8, 16, 32, 64]
    assert sorted(name[3] for name in names) == ["False", "False", "True", "True"]
    assert {tuple(name[:2]) for name in names} == {("4", "8"), ("8", "4"), ("1", "5")}
