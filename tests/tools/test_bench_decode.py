"""`onepass bench decode` and the decoding suites on a CPU: small caches, with a clock that stands in for a GPU's."""

import argparse
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import onepass
from benchmarks.harness import suite as harness
from benchmarks.suites import decode as suite_module
from benchmarks.suites import decode_e4m3, decode_packed
from onepass.api import decode_calls
from onepass.bench import decode as bench
from onepass.bench import plot
from onepass.bench.cases import decode_case, get_case_set
from onepass.bench.flops import bytes_moved, flops, kv_bytes
from onepass.cli.app import app
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import decode_sm90 as decode_launch_sm90


def test_the_grid_fits():
    cases = get_case_set("decode").cases
    assert len(cases) > 40
    assert max(map(kv_bytes, cases)) <= 40e9
    assert kv_bytes(decode_case(1, 8192, 32, 8, 128)) == 2**25
    assert bytes_moved(decode_case(2, 8192, 32, 8, 128)) == 2**26 + 2 * 2 * 2 * 32 * 128 + 2 * 32 * 4  # q, out, lse


@pytest.mark.parametrize(("seqlen_k", "expected"), [(512, "64, flushed"), (1024, "48"), (8192, "6"), (2**20, "1")])
def test_what_is_timed_is_not_in_the_l2_cache(seqlen_k, expected):
    case = decode_case(1, seqlen_k, 32, 8, 128)
    copies = bench.CacheCopies.of(kv_bytes(case), 50 * 10**6)
    assert str(copies) == expected
    assert copies.is_flushed or copies.number * kv_bytes(case) >= 4 * 50e6


def test_pages_are_those_of_the_same_memory():
    case = decode_case(2, 64, 4, 2, 16, dtype="float32")
    step = bench.make_step(case, "cpu")
    paged = step.in_pages(16)
    assert paged.k_cache.data_ptr() == step.k_cache.data_ptr()
    assert sorted(paged.page_table.flatten().tolist()) == list(range(8))
    rows = bench.Sequences(paged, paged.v_cache)[1, :, 0]
    assert torch.equal(rows[16:32], step.v_cache.view(-1, 16, 2, 16)[paged.page_table[1, 1], :, 0])


@pytest.mark.slow
def test_bench_decode(tmp_path):
    path, plot = tmp_path / "decode.json", tmp_path / "decode.png"
    arguments = [
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--only",
        "seqlen_k=1024",
        "--json",
        str(path),
        "--plot",
        str(plot),
    ]
    result = CliRunner().invoke(app, ["bench", "decode", *arguments])
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["batch"] for row in rows] == [1, 8]
    for row in rows:
        assert (row["backend"], row["failed"]) == ("cpu", {})
        assert set(row["contenders"]) == {"onepass", "onepass page 16", "onepass page 64", "onepass page 256", "sdpa"}
        for entry in row["contenders"].values():
            assert entry["of_copy"] == pytest.approx(row["bytes"] / entry["median_ms"] / 1e9 / row["copy_tb_per_s"])
    assert plot.exists()


def test_cases_of_one_batch_and_cache_differ_in_a_picture_by_their_queries():
    ticks = [
        plot._short_tick({"measure": "decode", "case": case.to_dict()}) for case in get_case_set("decode-rows").cases
    ]
    assert ticks[2:6] == ["64 x 8k\n16 queries", *(f"1 x 64k\n{n} queries" for n in (16, 128, 1024))]
    assert len(set(ticks[:6])) == 6
    assert plot._short_tick({"measure": "decode", "case": get_case_set("decode").cases[0].to_dict()}) == "1 x 1k"


@pytest.fixture
def suite(monkeypatch):
    """The suite on the CPU, by the tiled backend."""
    suite = suite_module
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=2**20)
    decoders = bench.onepass_decoders

    def backend_of(problem, requested):
        is_wgmma = decode_launch_sm90.unsupported(problem) is None and decode_launch_sm90.slower(problem) is None
        return "sm90" if is_wgmma else "sm80"

    for module, name, value in (
        (suite, "DEVICE", "cpu"),
        (suite, "arch_of", lambda device: "sm_90a"),
        (suite, "backend_of", backend_of),
        (suite.bench, "onepass_decoders", lambda backend: decoders("tiled")),
        (decode_launch, "arch_of", lambda device: "sm_90a"),
        (suite, "variant_run", lambda *chosen: bench.onepass_run("tiled")(chosen[-1])),
        (bench, "MOST_COPIES", 2),
        (bench, "copy_bandwidth", lambda device: 0.01),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.cuda, "Stream", lambda: None),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "empty_cache", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)
    ticks = iter(range(1, 10**6))
    monkeypatch.setattr(bench, "sampler_of", lambda calls, copies: _Sampler(calls, ticks))
    jobs = []
    monkeypatch.setattr(harness, "compile_ahead", jobs.extend)
    monkeypatch.setattr(suite, "jobs", jobs, raising=False)
    suite.variant.cache_clear()
    for module in (decode_launch, decode_launch_sm90):
        module.prepare.cache_clear()
    yield suite
    for module in (decode_launch, decode_launch_sm90):
        module.prepare.cache_clear()


class _Sampler:
    """Stands in for `CudaSampler`: it calls once, and then says times that hardly differ."""

    launch = "graph"

    def __init__(self, calls, ticks):
        self.ticks = ticks
        for call in calls:
            call()

    def __call__(self):
        return 1.0 + next(self.ticks) * 1e-6


def test_suite(suite, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--cases", "b1k1024h8/2d64,b2k512h4/4d32q3", "--seconds", "0.0", "--out", str(path)]
    variants = "num_splits=8; key_warps=2, num_stages=4; nonsense=1; num_stages=1"
    assert suite.SUITE.main([*arguments, "--variants", variants]) == 0
    output = capsys.readouterr().out
    assert "nonsense=1 not measured: variant 'nonsense=1': expected name=value with a name of num_splits, " in output
    assert "num_stages: expected 2 or more" in output
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"]["seqlen_q"] for row in rows] == [1, 3]
    for row in rows:
        assert row["failed"] == {}
        assert {"onepass", "onepass page 16", "num_splits=8", "key_warps=2,num_stages=4"} <= set(row["contenders"])
    assert {request[0] for request in suite.jobs} == {"decode_sm80", "merge_splits"}


def test_suite_of_many_rows(suite, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--cases", "b1k1024h8/1d64q20", "--seconds", "0.0", "--no-check", "--out", str(path)]
    assert suite.SUITE.main([*arguments, "--variants", "num_splits=3,tile_n=64; key_warps=2"]) == 0
    assert "key_warps=2 not measured: variant 'key_warps=2': expected name=value" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["backend"], row["config"]["num_warpgroups"]) == ("sm90", 3)
    assert "num_splits=3,tile_n=64" in row["contenders"]
    assert {request[0] for request in suite.jobs} == {"decode", "merge_splits"}


def test_suite_beside_flash_attention_3(suite, monkeypatch, tmp_path, capsys):
    """A module stands in for it: without pages, and with metadata that is made once for each cache."""
    made, given = [], []

    def attend(q, k, v, cache_seqlens, causal, num_splits, page_table=None, scheduler_metadata=None):
        if page_table is not None:
            raise RuntimeError("built without pages")
        given.append(scheduler_metadata)
        return onepass.attention_decode(q, k, v, cache_seqlens=cache_seqlens, causal=causal, backend="tiled")

    def prepare(*sizes, **options):
        made.append(sizes[:-1])
        return len(made)

    module = SimpleNamespace(flash_attn_with_kvcache=attend, get_scheduler_metadata=prepare)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    path = tmp_path / "out.json"
    arguments = ["--cases", "b1k1024h8/2d64,b1k512h8/2d64", "--no-check", "--seconds", "0", "--out", str(path)]
    assert suite.SUITE.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert list(rows[0]["failed"]) == ["fa3 page 64"]
    assert rows[1]["failed"] == {}
    assert made == [(1, 1, n, 8, 2, 64) for n in (1024, 1024, 512, 512)]
    assert set(given) == {None, 1, 2, 3, 4}
    for row in rows:
        assert {"fa3", "fa3 prepared"} < set(row["contenders"])
        assert row["contenders"]["onepass"]["speed_over_fa3"] == pytest.approx(1.0, abs=0.01)
    assert "built without pages" in capsys.readouterr().out


def test_prepared_metadata_belongs_to_its_lengths(monkeypatch):
    """Other lengths may come to lie where those of an earlier step were."""
    given = []
    module = SimpleNamespace(
        flash_attn_with_kvcache=lambda q, k, v, scheduler_metadata, **options: given.append(scheduler_metadata) or q,
        get_scheduler_metadata=lambda *arguments, **options: tuple(arguments[-1].tolist()),
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    run = bench.flash_attention_3_run(is_prepared=True)
    q, cache, lengths = torch.zeros(1, 1, 2, 8), torch.zeros(1, 64, 2, 8), torch.full((1,), 64)
    step = bench.Step(q, cache, cache, lengths)
    run(step)
    run(step)
    run(step._replace(cache_seqlens=lengths.detach().fill_(5)))
    assert given == [(64,), (64,), (5,)]


def test_suite_says_what_is_wrong(suite, monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "variant_run", lambda *chosen: 2 * bench.onepass_run("tiled")(chosen[-1]))
    arguments = ["--cases", "b1k1024h8/2d64", "--no-grid", "--out", str(tmp_path / "out.json")]
    assert suite.SUITE.main(arguments) == 0
    assert suite.SUITE.main([*arguments, "--variants", "num_splits=8"]) == 1
    with pytest.raises(argparse.ArgumentTypeError, match="expected cases such as"):
        suite.parse_cases("b1k1024h8d64")


@pytest.mark.slow
def test_suite_of_e4m3_caches(suite, monkeypatch, tmp_path, capsys):
    """Every call is right by tiles, and its kernels have been compiled ahead of time."""
    e4m3 = decode_e4m3
    monkeypatch.setattr(e4m3, "DEVICE", "cpu")
    ready, asked = set(), set()

    def problem_of(call):
        problem, _ = decode_calls.problem_of("test", call)
        return replace(problem, attention=replace(problem.attention, device_type="any"))

    def run(arguments):
        asked.add(problem_of(arguments))
        return onepass.attention_decode(**arguments, backend="tiled")

    def warmup(calls, backend):
        ready.update(map(problem_of, calls))
        return calls

    monkeypatch.setattr(e4m3, "run", run)
    monkeypatch.setattr(onepass, "warmup", warmup)
    path = tmp_path / "out.json"
    arguments = ["--cases", "b2k1024h8/2d64", "--seconds", "0.0", "--out", str(path)]
    assert e4m3.SUITE.main(arguments) == 0
    assert "check: 21 of 21 passed" in capsys.readouterr().out
    assert {problem.attention.seqlen_q for problem in asked} == {1, 3, 20}
    assert asked == ready
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["contenders"]) == set(e4m3.FORMS)
    assert row["contenders"]["e4m3, one descale"]["speed_over_16_bits"] == pytest.approx(1.0, abs=0.01)
    ready.clear()
    assert e4m3.SUITE.main([*arguments, "--no-check"]) == 0
    assert {problem.attention.seqlen_q for problem in ready} == {1}


def test_work_of_packed_queries():
    """It is that of the sequences, each with the queries at the end of its keys."""
    batch = decode_packed.Batch("two", (3, 1), (5, 8), (4, 2), 16)
    pairs = (3 + 4 + 5) + 8
    assert (
        batch.flops == 4 * pairs * 4 * 16 == flops(decode_case(1, 5, 4, 2, 16, 3)) + flops(decode_case(1, 8, 4, 2, 16))
    )
    assert batch.bytes == 2 * 16 * (2 * 13 * 2 + 2 * 4 * 4) + 4 * 4 * 4  # K and V, q and out, lse
    assert batch.bytes_of("onepass page 16") == batch.bytes
    assert batch.bytes_of("onepass e4m3 page 16") == batch.bytes - 16 * 2 * 13 * 2


def test_suite_of_packed_queries(monkeypatch, tmp_path, capsys):
    """By tiles, beside a module that stands in for FlashAttention-3 and gives wrong results over pages."""

    def attend(q, k, v, cu_seqlens_q, max_seqlen_q, cache_seqlens, causal, num_splits, page_table=None):
        lengths = {"cache_seqlens": cache_seqlens, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q}
        out = onepass.attention_decode(q, k, v, **lengths, page_table=page_table, causal=causal, backend="tiled")
        return out if page_table is None else 2 * out

    def run(step):
        read.append(step.k_cache.dtype)
        return onepass.attention_decode(**step._asdict(), backend="tiled")

    read = []
    batch = decode_packed.Batch("small", (3, 1, 2), (64, 128, 16), (4, 2), 64)
    ticks = iter(range(1, 10**6))
    for module, name, value in (
        (decode_packed, "DEVICE", "cpu"),
        (decode_packed, "PROMPTS", [batch]),
        (decode_packed, "CHECKED", ((1, 30, 2), (90, 31, 1))),
        (decode_packed, "onepass_run", run),
        (bench, "sampler_of", lambda calls, copies: _Sampler(calls, ticks)),
        (decode_launch_sm90, "arch_of", lambda device: "sm_90a"),
        (bench, "MOST_COPIES", 2),
        (bench, "copy_bandwidth", lambda device: 0.01),
        (bench, "_flash_attention_3", lambda: SimpleNamespace(flash_attn_with_kvcache=attend)),
        (
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=132, L2_cache_size=9),
        ),
        (torch.cuda, "Stream", lambda: None),
        (torch.cuda, "set_stream", lambda stream: None),
        (torch.cuda, "empty_cache", lambda: None),
    ):
        monkeypatch.setattr(module, name, value, raising=False)
    decode_launch_sm90.prepare.cache_clear()
    path = tmp_path / "r.json"
    assert decode_packed.SUITE.main(["--seconds", "0", "--prompts", "--e4m3", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    assert "check: 7 of 9 passed" in text
    assert read[:6] == 3 * [torch.bfloat16, torch.float8_e4m3fn]  # by the check, of a dense cache and of pages
    assert re.search(r"  fa3 page 16, check .* FAIL out: ", text)
    (row,) = json.loads(path.read_text())["rows"]
    assert row["failed"] == {}
    entry = row["contenders"]["onepass page 64"]
    assert entry["speed_over_fa3"] == pytest.approx(1.0, abs=0.01)
    assert entry["tflops"] == pytest.approx(batch.flops / entry["median_ms"] / 1e9)
    entry = row["contenders"]["onepass e4m3 page 64"]
    assert entry["tb_per_s"] == pytest.approx(batch.bytes_of("onepass e4m3") / entry["median_ms"] / 1e9)
    decode_launch_sm90.prepare.cache_clear()
