"""The choices of blocks in examples/block_sparsity.py, compared with definitions in loops and with the oracle."""

import inspect
import runpy
from pathlib import Path

import pytest
import torch

from onepass.testing import Call

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "block_sparsity.py"), run_name="block_sparsity")
SIZE, BLOCKS, DTYPE = 64, 6, torch.float64


def tensors(heads_q=4, heads_kv=2):
    torch.manual_seed(0)
    heads = {"q": heads_q, "k": heads_kv, "v": heads_kv}
    return {name: torch.randn(2, BLOCKS * SIZE, n, 16, dtype=DTYPE) for name, n in heads.items()}


def expected_blocks(name, q, k, count):
    """The numbers of the blocks that each block of queries keeps, by batch entry, head and block."""
    group, found = q.shape[2] // k.shape[2], {}
    mean = [[k[b, :, h].view(BLOCKS, SIZE, -1).mean(1) for h in range(k.shape[2])] for b in range(q.shape[0])]
    for b in range(q.shape[0]):
        for h in range(k.shape[2] if name == "nsa" else q.shape[2]):
            for m in range(BLOCKS):
                rows = slice(m * SIZE, (m + 1) * SIZE)
                if name == "video_tiles":
                    scores, always, candidates = mean[b][h // group] @ q[b, rows, h].mean(0), set(), range(BLOCKS)
                elif name == "moba":
                    scores, always, candidates = mean[b][h // group] @ q[b, rows.start, h], {m}, range(m)
                else:
                    own = q[b, rows.start, h * group : (h + 1) * group]
                    scores = (mean[b][h][:m] @ own.mT / 4).softmax(0).sum(1)
                    always = {0, max(m - 1, 0), m}
                    candidates = range(1, m - 1)
                best = sorted(candidates, key=lambda n, scores=scores: -float(scores[n]))
                found[b, h, m] = always | set(best[: count - len(always)])
    return found


@pytest.mark.parametrize(("name", "count"), [("video_tiles", 2), ("nsa", 4), ("moba", 3)])
@pytest.mark.parametrize("heads_kv", [2, 4])
def test_choices(name, count, heads_kv):
    given = tensors(heads_kv=heads_kv)
    mask = EXAMPLE[name](given["q"], given["k"], count)
    expected = expected_blocks(name, given["q"], given["k"], count)
    assert mask.kinds.shape == (2, heads_kv if name == "nsa" else 4, BLOCKS, BLOCKS)
    for where, blocks in expected.items():
        assert set(mask.kinds[where].nonzero().flatten().tolist()) == blocks
    is_causal = name != "video_tiles"
    kept = [min(count, m + 1) if is_causal else count for m in range(BLOCKS)]
    assert ((mask.kinds != 0).sum(-1) == torch.tensor(kept)).all()
    Call(given, {"block_mask": mask, "causal": is_causal}).check()


@pytest.mark.parametrize("options", list(EXAMPLE["LAYERS"].values())[1:], ids=["video_tiles", "nsa", "moba"])
def test_layers(options):
    """All blocks are ordinary attention. No causal layer looks at a later token, and each one learns."""
    torch.manual_seed(0)
    x = EXAMPLE["episode"](2)[0].double()
    assert EXAMPLE["difference_with_all_blocks"](options, x.clone()) < 1e-12
    layer = EXAMPLE["Layer"](**options).double()
    if layer.gate is not None:
        layer.gate.data.fill_(0.5)
    changed = x.clone()
    changed[:, 460:] = 5 * torch.randn_like(x[:, 460:])  # within the last block
    same = (layer(x) - layer(changed))[:, :460].abs().amax() < 1e-12
    assert same == layer.causal
    losses = EXAMPLE["train"](EXAMPLE["Layer"](**options), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_cubes_of_a_video():
    frames, height, width = 8, 4, 12
    where = torch.cartesian_prod(*map(torch.arange, (frames, height, width)))
    found = EXAMPLE["cubes"](where.expand(2, -1, -1), frames, height, width).view(2, -1, SIZE, 3)
    assert ((found // 4).amin(2) == (found // 4).amax(2)).all()
    assert found[0].flatten(0, 1).unique(dim=0).shape == where.shape


@pytest.mark.parametrize("name", ["means", "blocks_back", "mask_of_best", "video_tiles", "nsa", "moba"])
def test_the_cookbook_shows_them(name):
    page = (ROOT / "docs" / "guide" / "masks.md").read_text(encoding="utf-8")
    assert inspect.getsource(EXAMPLE[name]) in page
