"""Whole runs: peers, the JSON file, wrong results, interruption, memory, pictures."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import onepass
from onepass.bench import memory, peers, rows, run
from onepass.bench import plot as bench_plot
from onepass.bench.cases import Case, CaseSet, get_case_set, make_inputs
from onepass.bench.peers import PEERS, find_peers, prepare
from onepass.bench.plot import plot
from onepass.testing import results


@pytest.fixture(scope="module", autouse=True)
def _single_threaded():
    """Threads that wait for one another on a busy machine make small problems slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


QUICK = rows.Options(rounds=3, gemm_size=64)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The report of a smoke run, and its JSON file."""
    path = tmp_path_factory.mktemp("bench") / "sub" / "smoke.json"
    return run.run([get_case_set("smoke")], QUICK, path), path


def test_absent_peers_are_named_with_a_reason(monkeypatch):
    found = find_peers("cpu")
    assert set(found.present) == {"sdpa"}
    assert set(found.present) | set(found.absent) == set(PEERS)
    assert all(found.absent.values())
    # on a GPU without the packages: the message of the import
    for name in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)
    found = find_peers("cuda", ["fa3", "fa4", "sdpa-cudnn"])
    assert set(found.present) == {"sdpa-cudnn"}
    assert "fa3_fwd_interface" in found.absent["fa3"]
    assert "flash_attn" in found.absent["fa4"]
    with pytest.raises(ValueError, match="fa5"):
        find_peers("cpu", ["sdpa", "fa5"])


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_contenders_give_the_same_tensors_in_one_layout(direction):
    case = Case(2, 33, 33, 4, 2, 16, 16, "float32", causal=True, direction=direction)
    inputs = make_inputs(case, "cpu")
    mine = prepare(peers.onepass_contender("cpu"), case, inputs).results()
    theirs = prepare(find_peers("cpu").present["sdpa"], case, inputs).results()
    assert list(mine) == (["out"] if direction == "fwd" else ["dq", "dk", "dv"])
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    assert not any(t.requires_grad for t in inputs)


def test_a_timed_backward_runs_no_forward():
    calls = []
    case = Case.square(16, 1, 8, dtype="float32", direction="bwd")
    original = peers.onepass_contender("cpu")

    def attend(*args):
        calls.append(1)
        return original.attend(*args)

    prepared = prepare(replace(original, attend=attend), case, make_inputs(case, "cpu"))
    prepared.run()
    prepared.run()
    assert len(calls) == 1


def test_sdpa_refuses_what_it_would_compute_differently():
    sdpa = find_peers("cpu").present["sdpa"]
    square = Case.square(8, 1, 8, dtype="float32", causal=True)
    assert sdpa.refusal(square) is None
    assert "window" in sdpa.refusal(replace(square, window=(3, 0)))
    assert "top left" in sdpa.refusal(replace(square, seqlen_k=16))


def test_json_of_a_smoke_run(smoke):
    report, path = smoke
    data = json.loads(path.read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == results.SCHEMA_VERSION
    assert data["status"] == "complete"
    header = data["header"]
    assert {"date_utc", "device", "device_name", "cpu", "gpu", "versions", "commit", "peers"} <= set(header)
    assert header["versions"]["torch"] == torch.__version__
    assert header["versions"]["onepass"] == onepass.__version__
    assert set(header["peers"]["absent"]) == set(PEERS) - {"sdpa"}

    cases = get_case_set("smoke").cases
    assert [Case.from_dict(row["case"]) for row in data["rows"]] == list(cases)
    for row in data["rows"]:
        assert row["rounds"] == 3
        assert row["backend"] in ("cpu", "tiled")
        assert not row["failed"]
        assert row["gemm"]["tflops"] > 0
        for entry in row["contenders"].values():
            assert 0 < entry["p20_ms"] <= entry["median_ms"] <= entry["p80_ms"]
            assert entry["max_error"] <= entry["error_budget"]
            assert entry["gemm_share"] > 0
        mine = row["contenders"]["onepass"]
        assert mine["tflops"] == pytest.approx(row["flops"] / mine["median_ms"] / 1e9)
    by_name = [set(row["contenders"]) for row in data["rows"]]
    assert by_name == [{"onepass", "sdpa"}, {"onepass", "sdpa"}, {"onepass", "onepass-no-window"}, {"onepass"}]
    # a contender that did not run says why
    assert "window" in data["rows"][2]["skipped"]["sdpa"]
    assert "top left" in data["rows"][3]["skipped"]["sdpa"]
    assert data["rows"][0]["best_peer"] == "sdpa"
    assert data["rows"][0]["speed_ratio_best_peer"] == data["rows"][0]["speed_ratio"]["sdpa"]["median"]
    assert not list(path.parent.glob(".*")), "temporary files are left"


def test_summary_has_geometric_mean_and_minimum():
    def row(label, ratio):
        return {
            "set": "s",
            "measure": "time",
            "label": label,
            "case": {"direction": "fwd"},
            "failed": {},
            "skipped": {},
            "speed_ratio": {"sdpa": {"median": ratio, "p20": ratio, "p80": ratio}},
            "best_peer": "sdpa",
            "speed_ratio_best_peer": ratio,
        }

    summary = run.summarize([row("a", 0.5), row("b", 2.0), row("c", 4.0)])["s fwd"]
    assert summary["cases"] == 3
    for name in ("sdpa", "best peer"):
        ratio = summary["speed_ratio"][name]
        assert ratio["geomean"] == pytest.approx(math.cbrt(4.0) if hasattr(math, "cbrt") else 4.0 ** (1 / 3))
        assert (ratio["min"], ratio["min_case"], ratio["cases"]) == (0.5, "a", 3)


def test_a_wrong_result_is_reported_and_not_timed(monkeypatch):
    right = peers._onepass_attend

    def off_by_one(q, k, v, case):
        return onepass.attention(q, k, v, window=(None, 1)) if case.causal else right(q, k, v, case)

    monkeypatch.setattr(peers, "_onepass_attend", off_by_one)
    case = Case.square(32, 1, 16, dtype="float32", causal=True)
    report = run.run([CaseSet("one", "", (case, replace(case, causal=False)))], QUICK)
    wrong, fine = report.rows
    assert "max error" in wrong["failed"]["onepass"]
    assert "onepass" not in wrong["contenders"]
    assert "sdpa" in wrong["contenders"]
    assert "onepass" in fine["contenders"]
    assert report.wrong == [wrong]
    assert report.to_dict()["summary"]["one fwd"]["failed"] == 1


def test_ctrl_c_keeps_the_rows_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "interrupted.json"
    original, calls = run._time_row, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 3:
            # the file must hold the measurements so far, whatever happens next
            on_disk = json.loads(path.read_text())
            assert (len(on_disk["rows"]), on_disk["status"]) == (2, "running")
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(run, "_time_row", interrupted)
    report = run.run([get_case_set("smoke")], QUICK, path)
    data = json.loads(path.read_text())
    assert report.status == data["status"] == "interrupted"
    assert len(data["rows"]) == 2
    assert data["summary"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    results.write_json(path, {"rows": 1})
    with pytest.raises(ValueError, match="JSON"):
        results.write_json(path, {"rows": float("nan")})
    assert json.loads(path.read_text()) == {"rows": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_peak_memory_sees_a_known_allocation(monkeypatch):
    samples, memory_info = [], psutil.Process.memory_info
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: samples.append(1) or memory_info(self))

    def freed_at_once():
        torch.ones(64 * 2**20, dtype=torch.uint8)

    def freed_after_some_samples():
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        enough, deadline = len(samples) + 2, time.monotonic() + 30
        while len(samples) < enough and time.monotonic() < deadline:  # a busy machine may not run the thread for long
            time.sleep(1e-3)
        del block

    def no_mark(*args):
        raise OSError("no high-water mark that can be reset")

    for method, work in (("VmHWM", freed_at_once), ("sampled", freed_after_some_samples)):
        if method == "sampled":
            monkeypatch.setattr(memory.Path, "write_text", no_mark)
        # other threads add memory to that of the process, and a system that is short of memory takes some away
        found = [memory._peak_of_process(lambda work=work: [work() for _ in range(3)]) for _ in range(5)]
        assert all(method in peak.method for peak in found)
        assert any(56 <= peak.extra_bytes / 2**20 <= 72 for peak in found), found


@pytest.mark.slow
def test_memory_rows_come_from_a_fresh_process():
    case = Case.square(2048, 1, 32, dtype="float32")
    report = run.run([CaseSet("small", "", (case,), measure="memory")], replace(QUICK, peers=["sdpa"]))
    (row,) = report.rows
    assert not row["failed"]
    assert set(row["contenders"]) == {"onepass", "sdpa"}
    for entry in row["contenders"].values():
        # far below the score matrix, 16 MiB, and a whole process, some hundred MiB
        assert entry["extra_bytes"] < row["score_matrix_bytes"] / 2
        assert entry["baseline_bytes"] > 2**26
    assert report.to_dict()["summary"]["small fwd"]["max_extra_bytes"].keys() == {"onepass", "sdpa"}


def test_plot_draws_one_picture_for_each_set(smoke, tmp_path):
    pytest.importorskip("matplotlib")
    report, _ = smoke
    content = report.to_dict()
    assert plot(content, tmp_path / "one.png") == [tmp_path / "one.png"]
    other = [{**row, "set": "other"} for row in content["rows"][2:3]]
    both = plot({**content, "rows": content["rows"] + other}, tmp_path / "two.png")
    assert both == [tmp_path / "two-smoke.png", tmp_path / "two-other.png"]
    for path in both:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert plot({**content, "rows": []}, tmp_path / "none.png") == []


def test_bars_stand_over_their_labels_which_name_the_window(smoke):
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = smoke[0].to_dict()["rows"]
    names = ["onepass", "onepass-no-window", "sdpa"]
    figure, ax = plt.subplots()
    bench_plot._bars(ax, [rows[0], rows[2]], names, "tflops", 1.0, is_grid=True)
    middles = [bar.get_x() + bar.get_width() / 2 for bar in ax.patches]
    assert sum(middles[:2]) / 2 == pytest.approx(0)
    assert sum(middles[2:]) / 2 == pytest.approx(1)
    assert [text.get_text() for text in ax.get_xticklabels()] == ["64", "64\nwindow (7, 0)"]
    plt.close(figure)


def test_only_failures_of_onepass_count():
    def row(failed=(), skipped=()):
        of = {"failed": dict.fromkeys(failed, "why"), "skipped": dict.fromkeys(skipped, "why"), "contenders": {}}
        return of | {"set": "s", "measure": "time", "label": "a", "case": {"direction": "fwd"}}

    report = run.Report({}, rows=[row(["sdpa"]), row(["onepass"]), row([], ["onepass", "sdpa"]), row([], ["sdpa"])])
    assert report.wrong == report.rows[1:2]
    summary = report.to_dict()["summary"]["s fwd"]
    assert (summary["failed"], summary["skipped"]) == (1, 1)


@pytest.mark.parametrize(
    ("status", "ok", "code"), [("complete", True, 0), ("complete", False, 1), ("interrupted", True, 130)]
)
def test_exit_status_of_a_report(status, ok, code):
    assert results.Report({}, status=status).exit_status(ok) == code


def test_output_paths(tmp_path):
    path = tmp_path / "new" / "folder" / "a.json"
    assert results.check_output(path) == path
    results.write_json(path, {})
    assert path.stat().st_mode & 0o777 == 0o644
    for bad, what in ((tmp_path, "a directory"), (tmp_path / "..", "a directory"), (Path("/dev/null"), "a device")):
        with pytest.raises(OSError, match=f"expected a file to write, got .*, which is {what}"):
            results.check_output(bad)
    with pytest.raises(OSError, match=r"expected a file that can be written, got .*b.json: "):
        results.check_output(path / "b.json")
    with pytest.MonkeyPatch.context() as patch:  # as for a user who may not write the file
        patch.setattr(results.os, "access", lambda *arguments: False)
        with pytest.raises(OSError, match=r"expected a file that can be written, got .*: permission denied"):
            results.check_output(path)


@pytest.mark.parametrize("name", ["onepass", "sdpa"])
def test_extra_memory_is_what_the_outputs_do_not_take(monkeypatch, name):
    case, compared = Case.square(32, 2, 16, dtype="float32"), []
    peak = memory.Peak(1000, 1000 + memory.output_bytes(case) + 7, "a method")
    monkeypatch.setattr(memory, "peak_of", lambda work, device: (work(), peak))
    compare = memory.Oracle.compare
    monkeypatch.setattr(
        memory.Oracle, "compare", lambda self, found, is_peer: compared.append(is_peer) or compare(self, found, is_peer)
    )
    found = memory._measure(memory.contender_named(name, "cpu"), case, "cpu")
    assert (found["extra_bytes"], found["baseline_bytes"], found["method"]) == (7, 1000, "a method")
    assert (found["wrong"], compared) == ("", [name != "onepass"])
