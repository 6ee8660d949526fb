"""What commands print of given measurements, word by word: each figure is in its column, with its unit."""

from __future__ import annotations

import importlib
import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")

import tuning_fakes
from typer.testing import CliRunner

from onepass.bench.ablation import FULL
from onepass.bench.cases import Case, CaseSet
from onepass.cli import ablate, bench, demo, info, trace, verify
from onepass.cli.app import app
from onepass.cli.console import make_console
from onepass.cli.demo_layer import LayerReport, Row
from onepass.cli.demo_search import Query, SearchReport
from onepass.kernels.config import HOPPER
from onepass.kernels.heuristics import tuned
from onepass.testing import table3
from onepass.testing.budget import Comparison, Scale
from onepass.tuning.result import Candidate, TuningResult, changes, summary
from onepass.tuning.space import candidates

tune = importlib.import_module("onepass.cli.tune")  # `onepass.cli.tune` may be the function
pytestmark = pytest.mark.usefixtures("wide_and_single_threaded")
MIB = 2**20


def words(text):
    return [word for word in text.replace("\u2500", " ").split() if word]


@pytest.fixture
def printed(monkeypatch):
    """The words that a function prints to the console that it is given."""

    def run(show):
        out = io.StringIO()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            show(make_console())
        return words(out.getvalue())

    return run


def timed(ms, tflops, **more):
    return {"median_ms": ms, "p20_ms": ms * 0.5, "p80_ms": ms * 2, "tflops": tflops, "gemm_share": 0.25} | more


def bench_report():
    case = Case.square(64, 2, 32, dtype="float32").to_dict()

    def row(set_name, measure, label, contenders, **more):
        about = {"set": set_name, "measure": measure, "label": f"{label} float32", "case": case}
        return about | {"contenders": contenders, "failed": {}, "skipped": {}} | more

    ratio = {"speed_ratio": {"sdpa": {"median": 2.0}}}
    step = {"onepass": {"median_ms": 0.02, "tb_per_s": 0.25, "of_copy": 0.5}}
    step |= {"sdpa": {"median_ms": 0.04, "tb_per_s": 1.5, "of_copy": 0.75}}
    rows = [
        row("a", "time", "d32", {"onepass": timed(0.5, 0.25), "sdpa": timed(1.0, 0.125)}, rounds=7, **ratio),
        row("a", "time", "d64", {"sdpa": timed(1.5, 0.5)}, failed={"onepass": "max error 1"}),
        row("b", "memory", "d32", {"onepass": {"extra_bytes": 5 * 2**19}}, score_matrix_bytes=3 * MIB),
        row("c", "decode", "d32", step, copies="2 of 3", **ratio),
        row("c", "decode", "d64", {"sdpa": {"median_ms": 0.04, "tb_per_s": 2.0, "of_copy": 0.75}}),
    ]
    geomean = {"geomean": 1.5, "min": 1.25, "min_case": "d64", "cases": 2}
    summary = {
        "a fwd": {"speed_ratio": {"sdpa": geomean}, "failed": 1, "skipped": 0, "cases": 2},
        "b fwd": {"max_extra_bytes": {"onepass": 3 * MIB}, "failed": 0, "skipped": 2, "cases": 3},
        "ab fwd": {"speed_ratio": {}, "failed": 4, "skipped": 0, "cases": 4},
    }
    absent = {"fa4": "not installed", "fa3": "not installed", "cudnn": "no GPU"}
    header = {"gpu": None, "cpu": {"torch_threads": 3}, "device_name": "A CPU", "versions": {"torch": "2.0"}}
    header["peers"] = {"absent": absent}
    return SimpleNamespace(header=header, rows=rows, to_dict=lambda: {"summary": summary})


def test_bench(printed):
    measures = {"a": "time", "b": "memory", "c": "decode", "without rows": "time"}
    sets = [CaseSet(name, f"set {name}", (), measure=measure) for name, measure in measures.items()]
    report = bench_report()
    expected = """
        A CPU, 3 threads, torch 2.0
        absent: fa4, fa3 (not installed)
        absent: cudnn (no GPU)
        a: set a; float32
        case  onepass ms      20-80 %  GFLOP/s  of GEMM  sdpa ms, ratio  rounds
        d32        0.500  0.250-1.000    250.0     25 %    1.000  2.00x       7
        d64            -            -        -        -    1.500      -       -
        a ratio above 1x: onepass is faster
        a fwd, speed of onepass over sdpa: geometric mean 1.50, least 1.25 (d64), 2 cases
        a fwd: onepass failed in 1 of 2 cases
        b: set b; float32
        case  onepass MiB  score matrix MiB
        d32           2.5                 3
        b fwd, most extra memory of onepass: 3.0 MiB
        b fwd: onepass skipped in 2 of 3 cases
        c: set c; float32
        case                  onepass                            sdpa  copies
        d32   20.0 us, 250 GB/s, 50 %  40.0 us, 1.50 TB/s, 75 % 2.00x  2 of 3
        d64                         -        40.0 us, 2.00 TB/s, 75 %       -
        TB/s of K, V, q, out and lse, and the share of a copy's; speed of onepass over the other
        FAILED onepass, d64 float32: max error 1
    """
    assert printed(lambda console: bench._print_report(console, report, sets)) == words(expected)
    report.header["gpu"] = {"name": "A GPU"}
    assert printed(lambda console: bench._print_report(console, report, []))[:4] == ["A", "CPU,", "torch", "2.0"]


def ablation_report(**changes):
    def entry(label, paper_tflops=None, paper=None, **changes):
        config = {"tile_m": 128, "stages": 2}
        return {"label": label, "changes": changes, "paper": paper, "paper_tflops": paper_tflops, "config": config}

    def relative(speed):
        return {"relative_speed": {"median": speed}}

    row = {"backend": "sm90", "label": "d128 causal", "rounds": 9, "peers": ["fa3", "cudnn", "absent"]}
    row["configurations"] = [
        entry(FULL, 600.0, "Table 2"),
        entry("no overlap", 500.0, overlap=False, stages=1),
        *(entry(label, tile_m=m) for m, label in enumerate(("wrong", "too large", "late"))),
    ]
    row["contenders"] = {FULL: timed(1.0, 640.0), "no overlap": timed(1.25, 512.0, **relative(0.8))}
    row["contenders"] |= {"fa3": timed(1.5, 800.0, **relative(1.25)), "cudnn": timed(2.0, 320.0)}
    row |= {"failed": {"wrong": "max error 1"}, "skipped": {"too large": "too many registers"}}
    row |= {"absent": {"x": "no switch", "y": "no switch", "z": "FP8"}}
    header = {"device_name": "A GPU", "versions": {"torch": "2.0"}}
    return SimpleNamespace(header=header, row=row | changes)


def test_ablate(printed):
    expected = f"""
        A GPU, torch 2.0
        sm90 d128 causal
        configuration     ms      20-80 %  TFLOP/s  change  ratio  of best peer  paper, H100  ratio
        {FULL}         1.000  0.500-2.000    640.0                         0.80          600  1.000
          paper: Table 2
        no overlap     1.250  0.625-2.500    512.0  -128.0  0.800          0.64          500  0.833
          also stages=1
        wrong         FAILED
        too large    refused
          refused: too many registers
        late       not timed
        fa3            1.500  0.750-3.000    800.0  +160.0  1.250          1.00
        cudnn          2.000  1.000-4.000    320.0  -320.0                 0.40
        9 rounds; ratio: speed over the full configuration's, median of the rounds
        {FULL}: tile_m=128, stages=2
        no row, no switch: x; y
        no row, FP8: z
        FAILED wrong: max error 1
    """
    assert printed(lambda console: ablate._print_report(console, ablation_report())) == words(expected)
    contenders = {FULL: timed(1.0, 0.5), "wrong": timed(2.0, 0.25)}
    slow = ablation_report(contenders=contenders, peers=[], failed={}, skipped={}, absent={})
    expected = f"""
        A GPU, torch 2.0
        sm90 d128 causal
        configuration     ms      20-80 %  GFLOP/s  change  ratio  paper, H100  ratio
        {FULL}         1.000  0.500-2.000    500.0                         600  1.000
          paper: Table 2
        no overlap not timed                                               500  0.833
          also stages=1
        wrong          2.000  1.000-4.000    250.0  -250.0
        too large  not timed
        late       not timed
        9 rounds; ratio: speed over the full configuration's, median of the rounds
        {FULL}: tile_m=128, stages=2
    """
    assert printed(lambda console: ablate._print_report(console, slow)) == words(expected)


def test_info(printed):
    def answers(ok, backend, reason):
        there = {"ok": not ok, "backend": "sm90", "reason": "Hopper"}
        return {"cpu": {"ok": ok, "backend": backend, "reason": reason}, "cuda:0": there}

    found = {
        "versions": {"onepass": "1.0", "torch": "2.0"},
        "devices": {
            "cpu": {"name": "A CPU", "threads": 2},
            "cuda:0": {"name": "A GPU", "capability": "sm_90", "memory_bytes": 80 * 2**30},
        },
        "unproven": {"cuda:0": "never tried"},
        "chosen_backend": "tiled",
        "backends": {"sm90": answers(False, "sm90", "no GPU"), "tiled": answers(True, "tiled", "anything")},
        "features": {"causal": answers(True, "cpu", "PyTorch"), "bias": answers(False, "cpu", "too large")},
        "peers": {"fa3": {"what": "flash-attn 3", "here": "yes"}, "sdpa": {"what": "torch", "here": "no: needs cuda"}},
        "variables": {
            "ONEPASS_LOG": {"text": "1", "what": "log", "problem": None},
            "ONEPASS_TUNED": {"text": None, "what": "tuned", "problem": None},
            "ONEPASS_X": {"text": "q", "what": "x", "problem": "ONEPASS_X: expected y"},
        },
    }
    expected = """
        Versions
                 version
        onepass      1.0
        torch        2.0
        Devices
        device  name              memory
        cpu     A CPU, 2 threads
        cuda:0  A GPU, sm_90      80 GiB
        cuda:0: never tried.
        backend of calls that name none: tiled, as ONEPASS_BACKEND says
        Backends, asked for bfloat16 attention without options
        backend  cpu            cuda:0
        sm90     no: no GPU     yes: Hopper
        tiled    yes: anything  no: Hopper
        Which backend computes what
                cpu             cuda:0
        causal  cpu             no: Hopper
        bias    no: too large   sm90
        Peers for the bench
        peer  what          here
        fa3   flash-attn 3  yes
        sdpa  torch         no: needs cuda
        Environment variables
        variable       here                   what it is for
        ONEPASS_LOG    1                      log
        ONEPASS_TUNED  not set                tuned
        ONEPASS_X      ONEPASS_X: expected y  x
    """
    assert printed(lambda console: info.show(found)) == words(expected)


def layer_report(load_average):
    layer = LayerReport("CPU X, 2 threads", "float32", 512, (0, 3), 7 * MIB, load_average, repeats=2)
    errors = dict(zip(("out", "dq", "dk", "dv"), (1e-7, 2e-7, 3e-7, 4e-7), strict=True))
    layer.rows += [
        Row("onepass", 12.0, 9.5, 9 * MIB, errors, True),
        Row("torch SDPA", 24.0, 19.0, 3 * 2**29, {"out": 2e-7}, True),
        Row("naive", note="would need 9 GiB"),
    ]
    layer.budget |= {name: 10 * error for name, error in errors.items()}
    layer.window_rows += [
        Row("onepass", 6.0, 4.0, 8 * MIB, {"out": 5e-7}, True),
        Row("torch SDPA", 18.0, 12.0, None, {}, True),
    ]
    layer.window_budget["out"] = 5e-6
    return layer


def test_demo(printed):
    queries = [Query("one", [(0.75, "a"), (0.5, "b")]), Query("two", [(0.25, "c")])]
    search = SearchReport(6, 2, 12, 0, 3e-7, 0.25, queries)

    def show(console, layer, search):
        console.print(demo.layer_table(layer))
        demo.show_search(console, search)
        console.print(demo.summary(layer, search))

    table = """
        One attention layer of Llama 3 8B, 512 tokens, causal, float32; CPU X, 2 threads
                            forward  backward     peak    error    error    error    error
                                 ms        ms   memory      out       dq       dk       dv
        onepass                  12      9.50    9 MiB  1.0e-07  2.0e-07  3.0e-07  4.0e-07
        torch SDPA               24        19  1.5 GiB  2.0e-07        -        -        -
        naive                     -         -        -        -        -        -        -
        budget                                          1.0e-06  2.0e-06  3.0e-06  4.0e-06
        onepass, window        6.00      4.00    8 MiB  5.0e-07        -        -        -
        torch SDPA, window       18        12        -        -        -        -        -
        budget, window                                  5.0e-06        -        -        -
    """
    caption = """
        naive: would need 9 GiB. Time: best of 2. Peak memory: beyond the inputs, the 7 MiB of results included;
        resident memory. Errors: largest difference from float64, all rows of 8 of the 32 query heads. Budget: 2 times
        (gradients 3 times) the error of dense PyTorch in float32, plus one rounding. Window: each query sees 256 keys;
        SDPA has a mask.
    """
    about_search = """
        24 sentences searched by meaning (all-MiniLM-L6-v2)
        query  cosine  sentence
        one     0.750  a
                0.500  b
        two     0.250  c
        12 calls of onepass (6 layers, 2 batches, 25% of the input padding), 0 of any other attention. Largest
        difference from the embeddings of eager attention: 3.0e-07, 1e-05 allowed.
    """
    ends = """
        onepass computed the layer and its gradients within its error budget against float64, at 2.00 times the speed
        of torch SDPA. It took 9 MiB; the naive form would need 9 GiB. With a window of 256 keys it has 3.0 times the
        speed of SDPA with a mask.
    """
    of_search = "Every attention layer of MiniLM ran on onepass, and its embeddings agree with eager attention's."
    last = """
        onepass is for exact attention whose memory does not grow with the square of the length. On NVIDIA GPUs since
        Ampere these calls run its kernels, which README.md compares with other libraries.
    """
    busy = "The machine was busy (load 1000.0): times are disturbed."
    found = printed(lambda console: show(console, layer_report(1e3), search))
    assert found == words(f"{table} {busy} {caption} {about_search} {ends} {of_search} {last}")
    missing = "Search by meaning skipped: a and b not installed; pip install '.[demo]' in a checkout of onepass"
    found = printed(lambda console: show(console, layer_report(0.0), SearchReport(missing=["a", "b"])))
    assert found == words(f"{table} {caption} {missing} {ends} {last}")

    layer = layer_report(0.0)
    layer.rows[0].within_budget = False
    layer.rows[2] = Row("naive", 1.0, 1.0, 5 * MIB)
    layer.window_rows[1].note = "no memory"
    text = demo.summary(layer, SearchReport(6, 2, 11, 0, 1e-4))
    assert "OUTSIDE ITS ERROR BUDGET" in text
    assert "It took 9 MiB, the naive form 5 MiB." in text
    assert "With a window" not in text
    assert "NOT EVERY ATTENTION LAYER of MiniLM ran on onepass, and its embeddings DIFFER FROM eager" in text


def test_verify(monkeypatch, tmp_path):
    scale = Scale(2e-4, 1e-4)
    rows = {
        "full": Comparison("out", 1e-3, 2e-3, 5e-4, 8e-4, (0,)),
        "causal": Comparison("dq", 3e-3, 2e-3, 0, 1e-3, ()),
    }
    rows["sinks"] = Comparison("dsinks", torch.inf, 4e-3, 0, 2e-3, (1,), scale)
    monkeypatch.setattr(verify, "SUPPORTED_DTYPES", (torch.bfloat16,))
    monkeypatch.setattr(verify, "_options", lambda length: {name: lambda *of: of for name in rows})
    monkeypatch.setattr(
        verify, "_error_row", lambda dtype, name, call: verify.ErrorRow(dtype, name, rows[name], rows[name].ok)
    )
    outliers = [
        table3.RmsError("standard", 2e-4, 1e-4, 3e-4, None),
        table3.RmsError("onepass", 1e-4, 2e-4, None, 3e-4),
        table3.RmsError("FP8", torch.nan, None, 9e-3, 1e-2),
    ]
    monkeypatch.setattr(table3, "table3", lambda *arguments: outliers)
    path = tmp_path / "verify.json"
    result = CliRunner().invoke(app, ["verify", "--device", "cpu", "--json", str(path)])
    assert result.exit_code == 1
    queries = table3.num_queries(8192, "cpu")
    expected = f"""
        Errors against float64, cpu
        dtype     option  tensor  max error    budget  plain PyTorch  scale off by
        bfloat16  full       out   1.00e-03  2.00e-03       8.00e-04      +0.0e+00  ok
        bfloat16  causal      dq   3.00e-03  2.00e-03       1.00e-03      +0.0e+00  OVER BUDGET
        bfloat16  sinks   dsinks        inf  4.00e-03       2.00e-03      +2.0e-04  OVER BUDGET
        Each line shows the tensor (out, lse or a gradient) that came closest to its budget: by its largest error, or
        by the scale of a block of rows.
        bfloat16, causal: {rows["causal"]}
        bfloat16, sinks: {rows["sinks"]}
        RMSE with outliers, 8192 keys
        method        RMSE  of rounded inputs     paper     limit
        standard  2.00e-04           1.00e-04  3.00e-04
        onepass   1.00e-04           2.00e-04            3.00e-04  ok
        FP8            nan                     9.00e-03  1.00e-02  OVER BUDGET
        The setting is that of Table 3 of arXiv:2407.08608: entries N(0, 1) + N(0, 100) Bernoulli(0.001), head_dim 128,
        8192 keys, against float64; {queries} of the queries, 3 seeds. Standard attention keeps its intermediates in 16
        bits. "Of rounded inputs" compares with float64 attention of the inputs after their rounding to 16 bits.
        wrote {path}
        onepass: 3 of 6 rows are over their budget
    """
    assert words(result.output) == words(expected)
    data = json.loads(path.read_text())
    names = ("tensor", "max_error", "budget", "plain_error", "scale_error", "scale_budget", "ok")
    assert [tuple(row[name] for name in names) for row in data["errors"]] == [
        ("out", 1e-3, 2e-3, 8e-4, Scale().error, Scale().budget, True),
        ("dq", 3e-3, 2e-3, 1e-3, Scale().error, Scale().budget, False),
        ("dsinks", None, 4e-3, 2e-3, 2e-4, 1e-4, False),
    ]
    assert [row["option"] for row in data["errors"]] == list(rows)
    assert [(row["method"], row["rmse"], row["ok"]) for row in data["outliers"]] == [
        ("standard", 2e-4, True),
        ("onepass", 1e-4, True),
        ("FP8", None, False),
    ]
    shorter = CliRunner().invoke(app, ["verify", "--device", "cpu", "--quick", "--seqlen", "64"]).output
    assert "64 keys (there 8192: its figures differ)" in " ".join(words(shorter))
    assert "1 seed." in " ".join(words(shorter))


# ---------------------------------------------------------------- the calls that verify and info make


def assert_same_options(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype, name
        else:
            assert found[name] == value, name


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_calls_of_verify():
    """No length is a multiple of a tile, and each call has the option that its name says."""
    sinks, rows = torch.linspace(-1.0, 2.0, 4), torch.arange(97, dtype=torch.int32)
    expected = {
        "full": {},
        "causal": {"causal": True},
        "causal, more keys": {"causal": True},
        "window": {"window": (24, 12)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": sinks},
        "scale": {"softmax_scale": 0.3},
        "GQA 4:1": {},
        "head_dim_v 40": {},
        "seqused_k": {"seqused_k": int32(32, 97)},
        "left padding": {"causal": True, "seqstart_k": int32(32, 0)},
        "ranges": {"key_ranges": torch.stack([rows // 2, rows + 3], -1)[None, None]},
        "query ranges": {"query_ranges": torch.stack([rows // 2, rows + 3], -1)[None, None]},
        "positions": {"causal": True, "q_positions": rows.flip(0)[None]},
        "ALiBi": {"alibi_slopes": torch.linspace(0.01, 0.3, 4)},
        "bias": {"bias": torch.linspace(-3.0, 3.0, 4 * 97).view(1, 4, 1, 97)},
        "dropout": {"dropout_p": 0.1},
        "packed": {"causal": True, "cu_seqlens_q": int32(0, 32, 97), "cu_seqlens_k": int32(0, 48, 97)},
        "all at once": {"causal": True, "window": (48, 0), "softcap": 20.0, "sinks": sinks},
    }
    # seqlen_q, seqlen_k, heads of k, head_dim_v
    sizes = {"causal, more keys": (48, 97, 2, 64), "full": (97, 97, 4, 64), "GQA 4:1": (97, 97, 1, 64)}
    sizes["head_dim_v 40"] = 97, 97, 2, 40
    options = verify._options(96)
    assert options.keys() == expected.keys()
    for name, build in options.items():
        call = build(torch.float16, "cpu")
        assert_same_options(call.options, expected[name])
        seqlen_q, seqlen_k, heads_kv, head_dim_v = sizes.get(name, (97, 97, 2, 64))
        batch = () if name == "packed" else (2,)
        shapes = (*batch, seqlen_q, 4, 64), (*batch, seqlen_k, heads_kv, 64), (*batch, seqlen_k, heads_kv, head_dim_v)
        assert {t: (tuple(x.shape), x.dtype) for t, x in call.tensors.items()} == {
            t: (shape, torch.float16) for t, shape in zip("qkv", shapes, strict=True)
        }


def test_calls_of_info():
    expected = {
        **{name: {} for name in ("float64", "float32", "bfloat16", "float16", "backward")},
        "causal": {"causal": True},
        "window": {"window": (3, 0)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": torch.zeros(2)},
        "GQA / MQA": {},
        "head_dim_v != head_dim": {},
        "seqused_k": {"seqused_k": int32(5)},
        "left padding": {"seqstart_k": int32(2)},
        "ranges": {"key_ranges": int32(0, 8).expand(1, 1, 8, 2)},
        "query ranges": {"query_ranges": int32(0, 8).expand(1, 1, 8, 2)},
        "positions": {"q_positions": torch.arange(8, dtype=torch.int32)[None]},
        "ALiBi": {"alibi_slopes": torch.ones(2)},
        "bias": {"bias": torch.zeros(1, 2, 8, 8)},
        "dropout": {"dropout_p": 0.1},
        "packed sequences": {"cu_seqlens_q": int32(0, 8), "cu_seqlens_k": int32(0, 8)},
        "lse": {"return_lse": True},
        "deterministic": {"deterministic": True},
    }
    probes = info._probes()
    assert probes.keys() == expected.keys()
    for name, probe in probes.items():
        call = probe("cpu")
        q, k, v = (call.pop(t) for t in "qkv")
        assert_same_options(call, expected[name])
        batch, heads_kv = () if "packed" in name else (1,), 1 if "GQA" in name else 2
        assert q.shape == (*batch, 8, 2, 16)
        assert k.shape == (*batch, 8, heads_kv, 16)
        assert v.shape == (*batch, 8, heads_kv, 8 if "head_dim_v" in name else 16)
        dtype = getattr(torch, name) if "float" in name else torch.float32
        assert {t.dtype for t in (q, k, v)} == {dtype}
        assert {t.requires_grad for t in (q, k, v)} == {name in ("backward", "deterministic")}
    meta = probes["sinks"]("meta")
    assert {t.device.type for t in meta.values()} == {"meta"}


# ---------------------------------------------------------------- trace and tune


def test_trace(monkeypatch):
    from benchmarks.timeline import record as recording
    from benchmarks.timeline.acts import Role
    from benchmarks.timeline.record import Timeline

    asked = []

    def record(case, labels, device, on_start):
        asked.append((case, labels, device))
        on_start("one")
        roles = [Role("producer", [None] * 2, 1.0), Role("consumer", [None] * 3, 1.0)]
        return [Timeline("one", {}, roles, 1.25, 1.0), Timeline("two", {}, roles[:1], 0.75, 1.5)]

    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr(trace, "resolve_device", lambda name: "cuda:1" if name == "auto" else name)
    monkeypatch.setattr(trace, "describe", lambda device: {"device": device})
    result = CliRunner().invoke(app, ["trace"])
    assert result.exit_code == 0, result.output
    default = Case(8, 2048, 2048, 16, 16, 128, 128, "bfloat16", False, direction="fwd")
    expected = f"""
        compiling: one
        forward, {default.label}
        configuration     ms  with stamps    change  stamps
        one            1.000        1.250  +25.0 %        5
        two            1.500        0.750  -50.0 %        2
    """
    assert words(result.output) == words(expected)
    options = {
        "--direction": "backward",
        "--head-dim": 64,
        "--seqlen": 512,
        "--batch": 3,
        "--heads": 8,
        "--heads-kv": 2,
    }
    arguments = [str(part) for pair in options.items() for part in pair] + ["--causal", "--dtype", "float16"]
    assert CliRunner().invoke(app, ["trace", *arguments, "--row", "a", "--row", "b", "--device", "cuda"]).exit_code == 0
    given = Case(3, 512, 512, 8, 2, 64, 64, "float16", True, direction="bwd")
    assert asked == [(default, None, "cuda:1"), (given, ["a", "b"], "cuda")]
    for wrong, message in (
        (("--direction", "up"), "--direction: expected forward or backward, got 'up'"),
        (("--dtype", "int8"), "--dtype: expected one of"),
        (("--heads", "8", "--heads-kv", "3"), "--heads-kv: expected a divisor of 8 heads, got 3"),
        (("--device", "cpu"), "run on a Hopper GPU"),
    ):
        result = CliRunner().invoke(app, ["trace", *wrong])
        assert (result.exit_code, message in result.output) == (2, True), result.output


def test_tune(printed, tmp_path):
    configs = candidates(*tuning_fakes.TASK, HOPPER)
    best, usual = configs[3], configs[0]

    def result(config, speedup, kept, *measured):
        about = ("fwd", "sm90", tuning_fakes.PROBLEM, "A GPU", "key", config, usual, speedup, 0.015, 25)
        return TuningResult(*about, measured, interrupted=not kept, kept=kept)

    timed_one, timed_two = (Candidate(c, "", ms, 1.0, None) for c, ms in ((usual, 1.5), (best, 1.25)))
    untimed = Candidate(configs[1], "stages", None, None, "does not compile")
    found = [
        result(best, 1.2, True, timed_one, timed_two, untimed),
        result(usual, 1.0, True, timed_one),
        result(usual, 1.0, False),
    ]
    problem, label = summary(tuning_fakes.PROBLEM), tuning_fakes.TASK.label
    gain = changes(usual, best)
    table = f"""
        Tuned on A GPU
        pass      problem    instead of the heuristics' choice  heuristics ms   tuned ms  faster %  noise %
        fwd sm90  {problem}  {gain}                                    1.5000     1.2500      20.0      1.5
        fwd sm90  {problem}  -                                         1.5000     1.5000                1.5
        fwd sm90  {problem}  interrupted                                                                1.5
        ms: medians; faster: median of the rounds of the final; noise: the same configuration twice
    """
    assert printed(lambda console: console.print(tune._summary(found))) == words(table)
    assert [tune._line(one) for one in found] == [
        f"{label}: {gain}: 20.0 % faster (noise 1.5 %), of 2",
        f"{label}: the heuristics' choice stays, of 1",
        f"{label}: interrupted, nothing kept",
    ]
    path = tmp_path / "table.json"
    assert tune._conclusion(2, found, path) == f"faster than the heuristics: 1 of 2, at most 20.0 %; kept in {path}"
    assert tune._conclusion(0, found[2:], path) == "faster than the heuristics: 0 of 0"
    early = result(best, 1.3, False)  # the fastest one when it was interrupted
    assert tune._conclusion(1, [found[1], early], path) == f"faster than the heuristics: 0 of 1; kept in {path}"


@pytest.mark.parametrize("command", ["cache clear --tuned", "cache clear --tuned --yes"])
def test_tuned_configurations_are_removed_where_the_answer_is_yes(command, monkeypatch, tmp_path):
    monkeypatch.setenv("ONEPASS_CACHE_DIR", str(tmp_path))
    tuned.save("A GPU", {})
    assert tuned.own_path().exists()
    result = CliRunner().invoke(app, command.split(), input="n\n")
    assert (result.exit_code, tuned.own_path().exists()) == ((0, False) if "--yes" in command else (1, True))
    if "--yes" not in command:
        assert CliRunner().invoke(app, command.split(), input="y\n").exit_code == 0
        assert not tuned.own_path().exists()
