"""The suites that measure whole models, with tiny ones on the CPU."""

import json

import pytest
import torch

from benchmarks.suites import engine, models


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p == "first")) for p in models.PARTS])
def test_each_part_of_the_models_suite(tmp_path, part):
    if part != "diffusion":
        pytest.importorskip("transformers")
    out = tmp_path / "models.json"
    assert models.SUITE.main(["--parts", part, "--small", "--rounds", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert rows
    assert {row["part"] for row in rows} == {part}
    if part == "first":
        assert rows[0]["seconds"].keys() == {models.OURS, models.TORCH}
        return
    for row in rows:
        assert row["ratio"] > 0
        assert row.get("agrees", True)
        assert row.get("same_first_tokens", 1.0) == 1.0


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        models.SUITE.main(["--parts", "generate,tarin", "--small"])
    assert "got tarin" in capsys.readouterr().err


def test_requests_of_a_batch_get_the_tokens_that_each_gets_alone():
    """Prompts of different lengths arrive in chunks, so requests join the batch in different steps."""
    model = engine.Model(engine.SMALL)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(256, (n,), generator=generator) for n in (40, 7, 31)]
    with torch.inference_mode():
        for is_paged in (True, False):
            together = engine.Engine(model, engine.by_onepass, 3, is_paged).serve(prompts)
            alone = [engine.Engine(model, engine.by_onepass, 1, is_paged).serve([p]) for p in prompts]
            assert torch.equal(together, torch.cat(alone))


def test_the_engine_suite(tmp_path):
    out = tmp_path / "engine.json"
    assert engine.SUITE.main(["--small", "--rounds", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 3]
