"""The case sets of the benchmarks, their formulas for work, and the sampled check."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch

from onepass import reference
from onepass.bench.cases import CASE_SETS, Case, get_case_set, make_inputs, select
from onepass.bench.check import Oracle, Sample, choose_samples, expected_rows
from onepass.bench.flops import bytes_moved, flops, output_bytes, score_matrix_bytes, visible_pairs
from onepass.problem import Mask
from onepass.testing import machine

SHAPES = [
    Case.square(5, 2, 4, dtype="float32"),
    Case.square(6, 2, 4, dtype="float32", causal=True, batch=3),
    Case(2, 3, 7, 4, 2, 8, 5, "bfloat16", causal=True),
    Case(1, 9, 4, 2, 1, 8, 8, "float64", causal=True),
    Case(2, 6, 9, 2, 2, 4, 6, "float32", window=(2, 1)),
    Case(1, 8, 8, 1, 1, 4, 4, "float16", causal=True, window=(3, None)),
    Case(2, 6, 9, 2, 2, 4, 6, "float32", window=(5, -2)),
    Case(2, 6, 9, 2, 2, 4, 6, "float32", window=(-1, None)),
    Case(2, 6, 9, 0, 2, 4, 6, "float32"),
]


def visible(case: Case) -> torch.Tensor:
    """The visible pairs by the oracle's own definition, (batch, heads, seqlen_q, seqlen_k)."""
    mask = Mask.from_options(case.causal, case.window)
    one_head = reference.visible_pairs(case.batch, case.seqlen_q, case.seqlen_k, mask, None, torch.device("cpu"))
    return one_head[:, None].expand(-1, case.heads_q, -1, -1)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.label)
def test_flops_are_those_of_the_gemms_over_visible_pairs(case):
    pairs = int(visible(case).sum())
    assert visible_pairs(case) * case.batch * case.heads_q == pairs
    # a pair costs a dot product, or adds a multiple of a vector: two operations for each element
    s_and_pv = pairs * (2 * case.head_dim + 2 * case.head_dim_v)
    s_dq_dk_and_dp_dv = pairs * (3 * 2 * case.head_dim + 2 * 2 * case.head_dim_v)
    assert flops(case) == s_and_pv
    assert flops(replace(case, direction="bwd")) == s_dq_dk_and_dp_dv


def test_causal_flops_differ_from_half_by_one_over_seqlen():
    full = Case.square(512, 2, 64, dtype="float32")
    assert flops(replace(full, causal=True)) / (flops(full) / 2) == 1 + 1 / 512
    assert flops(replace(full, direction="bwd")) == 2.5 * flops(full)


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.label)
def test_bytes_are_those_of_real_tensors(case):
    inputs = make_inputs(case, "cpu")
    out = torch.empty(case.batch, case.seqlen_q, case.heads_q, case.head_dim_v, dtype=case.torch_dtype)
    lse_dtype = torch.float64 if case.dtype == "float64" else torch.float32
    lse = torch.empty(case.batch, case.heads_q, case.seqlen_q, dtype=lse_dtype)
    q_k_v, forward = inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes, out.nbytes + lse.nbytes
    assert bytes_moved(case) == q_k_v + forward
    assert output_bytes(case) == forward
    backward = replace(case, direction="bwd")
    assert bytes_moved(backward) == q_k_v + forward + inputs.dout.nbytes + q_k_v
    assert output_bytes(backward) == q_k_v
    assert score_matrix_bytes(case) == visible(case).numel() * case.torch_dtype.itemsize


def test_paper_grid():
    cases = get_case_set("paper").cases
    for direction in ("fwd", "bwd"):
        grid = [case for case in cases if case.direction == direction]
        assert len(grid) == len(set(grid)) == 36
        found = {(case.head_dim, case.causal, case.seqlen_q) for case in grid}
        lengths = (512, 1024, 2048, 4096, 8192, 16384)
        assert found == {(d, c, s) for d in (64, 128, 256) for c in (False, True) for s in lengths}
    for case in cases:
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q * case.head_dim == 2048
        assert case.seqlen_k == case.seqlen_q
        assert case.heads_kv == case.heads_q
        assert case.head_dim_v == case.head_dim


def test_cpu_grid_window_and_memory_sets():
    cpu = get_case_set("cpu").cases
    assert len(cpu) == len(set(cpu)) == 24
    assert all(case.batch * case.heads_q == 8 and case.dtype == "float32" for case in cpu)
    window = get_case_set("window").cases
    assert {case.direction for case in window} == {"fwd", "bwd"}
    for case in window:
        assert case.seqlen_q == 16384
        assert visible(replace(case, seqlen_q=2048, seqlen_k=2048))[0, 0, 1024].sum() == 512
    memory = get_case_set("memory")
    assert memory.measure == "memory"
    assert {(c.seqlen_q, c.heads_q, c.head_dim, c.direction) for c in memory.cases} == {
        (32768, 1, d, direction) for d in (64, 128) for direction in ("fwd", "bwd")
    }


@pytest.mark.parametrize("name", CASE_SETS)
def test_cases_survive_json_and_have_their_own_labels(name):
    cases = get_case_set(name).cases
    assert [Case.from_dict(json.loads(json.dumps(case.to_dict()))) for case in cases] == list(cases)
    assert len({case.label for case in cases}) == len(cases)


def test_select():
    paper = get_case_set("paper")
    some = select(paper, "direction=fwd, head_dim=64/128, causal=true, seqlen=512", "float16").cases
    assert [(c.head_dim, c.causal, c.seqlen_q, c.dtype) for c in some] == [
        (64, True, 512, "float16"),
        (128, True, 512, "float16"),
    ]
    with pytest.raises(ValueError, match="nothing"):
        select(paper, "nothing=1")
    with pytest.raises(ValueError, match="no case"):
        select(paper, "head_dim=65")
    with pytest.raises(ValueError, match="expected one of paper, cpu"):
        get_case_set("papers")


def test_bad_cases_are_refused():
    with pytest.raises(ValueError, match="int8"):
        Case.square(8, 1, 8, dtype="int8")
    with pytest.raises(ValueError, match="forward"):
        Case.square(8, 1, 8, dtype="float32", direction="forward")  # type: ignore[arg-type]


CHECKED = [
    Case(2, 70, 70, 4, 2, 16, 24, "float64", causal=True),
    Case(1, 40, 90, 2, 2, 16, 16, "float64", causal=True, window=(20, 0)),
    Case(1, 64, 64, 2, 1, 8, 8, "float64"),
]


@pytest.mark.parametrize("case", CHECKED, ids=lambda case: case.label)
def test_sampled_rows_equal_the_dense_oracle(case, monkeypatch):
    monkeypatch.setattr("onepass.bench.check._CHUNK_PAIRS", {"cpu": 1})  # several chunks of the fewest rows
    inputs = make_inputs(case, "cpu")
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    out = reference.attention(*leaves, causal=case.causal, window=case.window).out
    dq, dk, dv = torch.autograd.grad(out, leaves, inputs.dout)
    group = case.heads_q // case.heads_kv
    for b, h, queries, keys in choose_samples(case, rows=9):
        heads = slice(h * group, (h + 1) * group)
        sample = Sample(b, h, queries, keys)
        fwd = expected_rows(case, inputs, sample, torch.float64)
        bwd = expected_rows(replace(case, direction="bwd"), inputs, sample, torch.float64)
        torch.testing.assert_close(fwd["out"], out[b, queries][:, heads].transpose(0, 1))
        torch.testing.assert_close(bwd["dq"], dq[b, queries][:, heads].transpose(0, 1))
        torch.testing.assert_close(bwd["dk"], dk[b, keys, h])
        torch.testing.assert_close(bwd["dv"], dv[b, keys, h])


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_oracle_finds_a_wrong_result(direction):
    case = Case.square(48, 2, 16, dtype="float32", causal=True, direction=direction)
    inputs = make_inputs(case, "cpu")
    leaves = [t.clone().requires_grad_() for t in inputs[:3]]

    def results(**options):
        out = reference.attention(*leaves, compute_dtype=torch.float32, **options).out
        if direction == "fwd":
            return {"out": out.detach()}
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout), strict=True))

    oracle = Oracle(case, inputs)
    assert all(row.ok for row in oracle.compare(results(causal=True), is_peer=False))
    # off by one key: the smallest mistake that a mask can make
    wrong = results(window=(None, 1))
    for is_peer in (False, True):
        assert not any(row.ok for row in oracle.compare(wrong, is_peer))


def test_local_changes_of_the_package_are_seen(monkeypatch, tmp_path):
    """A result names its code as changed if the package was, and not if other files of the checkout were."""
    package = tmp_path / "onepass"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(machine.onepass, "__file__", str(package / "__init__.py"))
    (tmp_path / "notes").write_text("")
    assert machine._git()["has_local_changes"] is False
    (package / "__init__.py").write_text("changed = True")
    assert machine._git()["has_local_changes"] is True
    assert len(machine._git()["commit"]) == 40
    monkeypatch.setattr(machine, "_run", lambda *command: str(tmp_path) if "rev-parse" in command else None)
    assert machine._git()["has_local_changes"] is None  # git does not say
    monkeypatch.setattr(machine.onepass, "__file__", str(package / "vendored" / "onepass" / "__init__.py"))
    assert machine._git() == {"commit": None, "has_local_changes": None}  # a package in somebody else's checkout
