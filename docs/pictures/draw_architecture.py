"""Draws docs/pictures/architecture.png: the layers of the package, as the import contracts of pyproject.toml have them.

    python docs/pictures/draw_architecture.py

Needs matplotlib: pip install ".[bench]"
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INK, MUTED, EDGE = "#1f2933", "#5f6b7a", "#b8c2cc"
CAPTIONS = {
    "benchmarks": "programs that measure, only in a clone",
    "cli": "the command onepass",
    "tuning": "finds faster configurations",
    "bench": "measurements",
    "testing": "error budgets",
    "compat": "flash-attn, SDPA",
    "integrations": "transformers, torch, vLLM",
    "distributed": "many ranks",
    "api": "attention, attention_varlen, attention_decode, supports, warmup; repeated calls go from here to a launch",
    "ops": "torch operators: gradients, tracing, FLOP counts",
    "dispatch": "which backend computes the call",
    "validation": "refuses wrong arguments",
    "cpu": "torch's C++ attention, checked",
    "tiled": "the algorithm in PyTorch, on any device",
    "kernels": "sm90: Hopper, sm80: Ampere and later",
    "quantization": "FP8 in PyTorch",
    "geometry": "integer formulas, for host and kernels",
    "problem": "what is asked, without its tensors",
    "errors": "one meaning each",
    "processes": "Python processes",
    "variables": "of the environment",
    "launch": "tensors to arguments",
    "heuristics": "problem to configuration",
    "compiler": "once per machine, disk cache",
    "device": "the kernels, in CuTe DSL",
    "config": "tiles, buffers, order of work",
}
COLORS = {"kernels": "#d6e6f7", "tiled": "#dcefdc", "cpu": "#dcefdc", "api": "#fbe7c6"}


def layers(text: str, name: str) -> list[list[str]]:
    """The layers of the contract whose name begins so, from the top down: the names of each one's packages."""
    contract = next(part for part in text.split("[[tool.importlinter.contracts]]") if f'name = "{name}' in part)
    listed = re.search(r"^layers = \[(.*?)\]", contract, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return [re.split(r" [|:] ", row.replace("onepass.", "")) for row in re.findall(r'"([^"]+)"', listed[1])]


def draw() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    rows, inner = layers(text, "Imports only go down, from"), layers(text, "Imports only go down in the kernels")
    figure, ax = plt.subplots(figsize=(10.5, 7.2), layout="constrained")

    def box(x: float, y: float, width: float, name: str, height: float = 0.78, size: float = 10) -> None:
        color = COLORS.get(name, "white")
        style = "round,pad=0,rounding_size=0.08"
        ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=EDGE))
        middle = {"ha": "center", "va": "center"}
        ax.text(x + width / 2, y + height * 0.68, name, fontsize=size, color=INK, weight="bold", **middle)
        ax.text(x + width / 2, y + height * 0.27, CAPTIONS.get(name, ""), fontsize=size - 2.5, color=MUTED, **middle)

    for i, names in enumerate(rows):
        width = 12 / len(names)
        for j, name in enumerate(names):
            box(j * width, -i, width - 0.1, name)
    ax.annotate("", (-0.25, -len(rows) + 1), (-0.25, 0.7), arrowprops={"arrowstyle": "-|>", "color": MUTED})
    center = -len(rows) / 2 + 1
    ax.text(-0.45, center, "imports go down", rotation=90, ha="center", va="center", fontsize=9, color=MUTED)

    top = -next(i for i, names in enumerate(rows) if "kernels" in names)
    ax.text(14.15, top + 2.45, "inside kernels", ha="center", fontsize=10, color=INK)
    for i, names in enumerate(inner):
        box(12.5, top + 1.4 - i, 3.3, names[0])
    ax.set(xlim=(-0.7, 15.9), ylim=(-len(rows) + 0.8, 0.95))
    ax.axis("off")
    return figure


def main() -> None:
    draw().savefig(Path(__file__).parent / "architecture.png", dpi=120, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
