"""Draws docs/pictures/masks/: a picture for each mask of the cookbook in docs/guide/masks.md.

    python docs/pictures/draw_masks.py

A picture shows what the block of code below it on the page computes. The block runs with q of zeros, so that all
visible keys have equal scores, and with the identity matrix as v, so that out is the matrix of probabilities.
Needs matplotlib: pip install ".[bench]"
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "guide" / "masks.md"
SETUP = re.compile(r"^```python\n(import torch.*?)^```", re.MULTILINE | re.DOTALL)
RECIPE = re.compile(r"^!\[[^\]]*\]\(\.\./pictures/masks/(\w+)\.png\)\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
COLOR, EDGE = "#2f6fb3", "#dde2e7"


def probabilities() -> dict[str, torch.Tensor]:
    """The matrix (queries, keys) of the first head for each recipe of the page, by the name of its picture."""
    text, found = PAGE.read_text(encoding="utf-8"), {}
    setup = SETUP.search(text)
    assert setup is not None
    for name, code in RECIPE.findall(text):
        namespace: dict[str, Any] = {}
        exec(setup[1], namespace)
        seqlen, num_heads = namespace["q"].shape[1:3]
        namespace["q"] = torch.zeros_like(namespace["q"])
        namespace["v"] = torch.eye(seqlen)[None, :, None].expand(1, seqlen, num_heads, seqlen)
        exec(code, namespace)
        out = namespace["out"]
        found[name] = (out[0] if out.dim() == 4 else out)[:, 0]
    return found


def draw(weights: torch.Tensor, path: Path) -> None:
    """A square for each pair, as dark as the share of the row's largest probability."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    rows, columns = weights.shape
    figure, ax = plt.subplots(figsize=(columns / 8, rows / 8))
    for i, row in enumerate((weights / weights.amax(1, keepdim=True).clamp(min=1e-9)).tolist()):
        for j, share in enumerate(row):
            ax.add_patch(Rectangle((j, i), 1, 1, facecolor=(*matplotlib.colors.to_rgb(COLOR), share), edgecolor=EDGE))
    ax.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    ax.axis("off")
    figure.savefig(path, dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.02, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    folder = Path(__file__).parent / "masks"
    folder.mkdir(exist_ok=True)
    for name, weights in probabilities().items():
        draw(weights, folder / f"{name}.png")


if __name__ == "__main__":
    main()
