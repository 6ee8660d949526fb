"""A results file as pictures: one PNG for each case set, bars like those of the FlashAttention-3 paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# One colour a contender, the same in every picture; onepass in the strongest.
_COLORS = {
    "onepass": "#d1495b",
    "onepass-no-window": "#e9b3ba",
    "sdpa": "#30638e",
    "sdpa-flash": "#30638e",
    "sdpa-cudnn": "#00798c",
    "sdpa-efficient": "#8d96a3",
    "fa3": "#edae49",
    "fa4": "#7a5195",
}
_FALLBACK = "#555555"


def plot(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw all sets of a report (the JSON content, or `Report.to_dict()`).

    Args:
        path: the PNG; with several sets in the report, the set's name is put before the suffix.

    Returns: the files written, none for a report without results.
    """
    import matplotlib

    matplotlib.use("Agg")
    sets = list(dict.fromkeys(row["set"] for row in report["rows"]))
    written = []
    for name in sets:
        rows = [row for row in report["rows"] if row["set"] == name and row["contenders"]]
        if not rows:
            continue
        target = path if len(sets) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        _draw(rows, report["header"], target)
        written.append(target)
    return written


def _draw(rows: Sequence[Row], header: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot as plt

    kind, unit, scale = _what_to_show(rows)
    panels: dict[tuple, dict[Any, list[Row]]] = {}
    for row in rows:
        case = row["case"]
        panel = (case["direction"], case["causal"])
        panels.setdefault(panel, {}).setdefault(case["head_dim"], []).append(row)
    head_dims = sorted({row["case"]["head_dim"] for row in rows})
    ordered = sorted(panels, key=lambda panel: (panel[0] != "fwd", panel[1]))
    names = [name for name in _COLORS if any(name in row["contenders"] for row in rows)]
    names += sorted({name for row in rows for name in row["contenders"]} - set(names))

    width = max(3.6, 1.1 + 0.24 * len(names) * max(len(r) for p in panels.values() for r in p.values()))
    figure, axes = plt.subplots(
        len(ordered),
        len(head_dims),
        figsize=(max(6.0, width * len(head_dims)), 2.6 * len(ordered) + 1.2),
        squeeze=False,
    )
    for axes_row, panel in zip(axes, ordered, strict=True):
        for ax, head_dim in zip(axes_row, head_dims, strict=True):
            members = panels[panel].get(head_dim, [])
            if not members:
                ax.axis("off")
                continue
            direction = "forward" if panel[0] == "fwd" else "backward"
            ax.set_title(f"{direction}, {'causal' if panel[1] else 'not causal'}, head dim {head_dim}", fontsize=10)
            _bars(ax, members, names, kind, scale)
            ax.set_ylabel(unit, fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLORS.get(name, _FALLBACK)) for name in names]
    figure.suptitle(_title(rows, header), fontsize=10)
    figure.legend(handles, names, loc="lower center", ncol=len(names), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _what_to_show(rows: Sequence[Row]) -> tuple[str, str, float]:
    """(key of a contender's entry, unit, factor from the JSON's unit to the shown one)."""
    if rows[0]["measure"] == "memory":
        return "extra_bytes", "peak extra MiB", 2.0**-20
    if any(row["case"]["window"] is not None for row in rows):
        # contenders with and without a window do different amounts of work: time says what TFLOP/s would hide
        return "median_ms", "ms (log scale)", 1.0
    fastest = max(entry["tflops"] for row in rows for entry in row["contenders"].values())
    return ("tflops", "TFLOP/s", 1.0) if fastest >= 10 else ("tflops", "GFLOP/s", 1e3)


def _bars(ax: Any, rows: Sequence[Row], names: Sequence[str], kind: str, scale: float) -> None:
    rows = sorted(rows, key=lambda row: row["case"]["seqlen_q"])
    bar = 0.84 / len(names)
    highest = 0.0
    for index, name in enumerate(names):
        for group, row in enumerate(rows):
            entry = row["contenders"].get(name)
            if entry is None:
                continue
            height = entry[kind] * scale
            highest = max(highest, height)
            at = group - 0.42 + (index + 0.5) * bar
            ax.bar(at, height, 0.92 * bar, color=_COLORS.get(name, _FALLBACK))
            ax.annotate(
                _number(height),
                (at, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7 if len(names) < 4 else 6,
                rotation=0 if len(names) < 3 else 90,
            )
    if kind == "median_ms":
        ax.set_yscale("log")
        ax.margins(y=0.25)
    else:
        ax.set_ylim(0, highest * (1.15 if len(names) < 3 else 1.3))
    ax.set_xticks(range(len(rows)), [_length(row["case"]["seqlen_q"]) for row in rows], fontsize=8)
    ax.tick_params(axis="y", labelsize=8)
    ax.set_xlabel("sequence length", fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def _title(rows: Sequence[Row], header: dict[str, Any]) -> str:
    versions = header["versions"]
    dtypes = "/".join(sorted({row["case"]["dtype"] for row in rows}))
    threads = "" if header["device"].startswith("cuda") else f", {header['cpu']['torch_threads']} threads"
    return (
        f"{rows[0]['set']}: {dtypes} on {header['device_name']}{threads}; "
        f"onepass {versions['onepass']}, torch {versions['torch']}"
    )
