"""The pictures of docs/performance.md, drawn from results files: onepass compared with other libraries on one GPU.

    python -m benchmarks chart                                      # from benchmarks/results/ into docs/
    python -m benchmarks chart --results benchmarks/results --out /tmp

performance.png            geometric means: forward, backward, FP8 and decoding
performance-forward.png, performance-backward.png, performance-fp8.png, performance-decode.png     case by case
performance-cpu.png        the forward and the backward on a CPU, compared with torch's SDPA

Nothing is measured here. Needs matplotlib: pip install '.[bench]'
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from onepass.bench.plot import INK, LINES, MUTED

# One color a library, the same in every picture. The peers are cool and pale, so that onepass stands out.
COLORS = {
    "cuDNN": "#a9bccb",
    "FlashAttention-3": "#6f9bbd",
    "FlashAttention-4": "#3b5f86",
    "torch SDPA": "#8a7fb0",
    "onepass": "#d1495b",
}
OURS = "onepass"
HEAD_DIMS = (64, 128, 256)


class Case(NamedTuple):
    """One case of a results file. batch, heads and kv_bytes are None, except for decoding."""

    head_dim: int
    causal: bool
    batch: int | None
    seqlen: int
    heads: str | None = None
    kv_bytes: int | None = None
    direction: str = "fwd"


Speeds = dict[Case, dict[str, float]]  # by library, TFLOP/s or, for decoding, TB/s


class Measurement(NamedTuple):
    """A comparison that is drawn.

    Attributes:
        title: the title of the picture. unit: the unit of the speeds.
        files: results files. Where several hold a case, the last one counts.
        contenders: name in the files -> library. Where a library has several, the fastest in each case counts.
        kind: the entry of a contender that holds its speed.
        case_set: the set that is drawn, if the files have several.
        least_seqlen: the shortest sequences that are drawn.
    """

    title: str
    unit: str
    files: tuple[str, ...]
    contenders: dict[str, str]
    kind: str = "tflops"
    case_set: str | None = None
    least_seqlen: int = 0


_PEERS = {"cudnn": "cuDNN", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
MEASUREMENTS = {
    "forward": Measurement(
        "Forward, bfloat16", "TFLOP/s", ("h200-forward.json",), {OURS: OURS, **_PEERS, "sdpa-cudnn": "cuDNN"}
    ),
    "backward": Measurement(
        "Backward, bfloat16",
        "TFLOP/s",
        ("h200-backward.json",),
        {OURS: OURS, **_PEERS, "sdpa-cudnn": "cuDNN"},
    ),
    "fp8": Measurement(
        "FP8 forward, row-major e4m3",
        "TFLOP/s",
        ("h200-fp8.json",),
        # both start from row-major tensors, so that the comparison is like for like
        {"rows": OURS, "fa3": "FlashAttention-3"},
        # FlashAttention-3's calls of 512 tokens wait for the host
        least_seqlen=1024,
    ),
    "decode": Measurement(
        "Decoding, bfloat16 cache",
        "TB/s",
        ("h200-decode.json",),
        {OURS: OURS, "fa3": "FlashAttention-3", "fa3 prepared": "FlashAttention-3"},
        kind="tb_per_s",
    ),
    "cpu": Measurement(
        "CPU, float32, 2 cores", "TFLOP/s", ("cpu.json",), {OURS: OURS, "sdpa": "torch SDPA"}, case_set="cpu"
    ),
}
_OVERVIEW = ("forward", "backward", "fp8", "decode")


def read(measurement: Measurement, results: Path) -> Speeds:
    """The speeds of all cases in which onepass and a peer were measured."""
    runs: dict[Case, dict[str, list[float]]] = {}
    for file in measurement.files:
        of_file: dict[Case, dict[str, list[float]]] = {}
        for row in json.loads((results / file).read_text())["rows"]:
            if measurement.case_set not in (None, row.get("set")):
                continue
            for case, contender, speed in _speeds_of_row(row, measurement.kind):
                if contender in measurement.contenders and case.seqlen >= measurement.least_seqlen:
                    of_file.setdefault(case, {}).setdefault(contender, []).append(speed)
        runs |= of_file
    speeds: Speeds = {}
    for case, by_contender in runs.items():
        by_library: dict[str, float] = {}
        for contender, values in by_contender.items():
            library = measurement.contenders[contender]
            by_library[library] = max(by_library.get(library, 0.0), statistics.median(values))
        if OURS in by_library and len(by_library) > 1:
            speeds[case] = by_library
    return speeds


def _speeds_of_row(row: dict[str, Any], kind: str) -> Iterator[tuple[Case, str, float]]:
    """(case, contender, speed) of a row, which holds all contenders of a case or one of them."""
    case = row.get("case", row)
    seqlen = case["seqlen"] if "seqlen" in case else case["seqlen_k"]
    heads = f"{case['heads_q']}/{case['heads_kv']}" if kind == "tb_per_s" else None
    batch = case.get("batch") if kind == "tb_per_s" else None
    direction = case.get("direction", "fwd")
    key = Case(case["head_dim"], case["causal"], batch, seqlen, heads, row.get("kv_bytes"), direction)
    entries = row["contenders"] if "contenders" in row else {row["contender"]: row}
    for name, entry in entries.items():
        if entry.get(kind) is not None:
            yield key, name, entry[kind]


def ratios(speeds: Speeds) -> dict[Case, float]:
    """The speed of onepass over that of the fastest peer, for each case."""
    return {
        case: found[OURS] / max(speed for library, speed in found.items() if library != OURS)
        for case, found in speeds.items()
    }


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


# ---------------------------------------------------------------- pictures


def draw(results: Path, out: Path) -> list[Path]:
    """Draw all pictures. Returns: the files written."""
    import matplotlib

    matplotlib.use("Agg")
    speeds = {name: read(measurement, results) for name, measurement in MEASUREMENTS.items()}
    out.mkdir(parents=True, exist_ok=True)
    pictures = {"performance.png": _draw_means({name: speeds[name] for name in _OVERVIEW})}
    for name in ("forward", "backward", "fp8"):
        panels = {_title(d, causal): (d, causal, "fwd") for causal in (False, True) for d in HEAD_DIMS}
        note = "sequence length, 16k tokens in all"
        pictures[f"performance-{name}.png"] = _draw_grid(MEASUREMENTS[name], speeds[name], panels, 3, note, ", H200")
    directions = {"fwd": "forward", "bwd": "backward"}
    panels = {
        f"{words}, {_title(d, causal)}": (d, causal, direction)
        for direction, words in directions.items()
        for d in (64, 128)
        for causal in (False, True)
    }
    pictures["performance-cpu.png"] = _draw_grid(MEASUREMENTS["cpu"], speeds["cpu"], panels, 4, "sequence length")
    pictures["performance-decode.png"] = _draw_decoding(MEASUREMENTS["decode"], speeds["decode"])
    from matplotlib import pyplot as plt

    for file, figure in pictures.items():
        # no version in the file: the same results draw the same bytes
        figure.savefig(out / file, dpi=140, facecolor="white", metadata={"Software": None})
        plt.close(figure)
    return [out / file for file in pictures]


def _libraries(speeds: Iterable[Speeds]) -> list[str]:
    measured = {library for found in speeds for by_library in found.values() for library in by_library}
    return [library for library in COLORS if library in measured]


def _draw_means(speeds: dict[str, Speeds]) -> Any:
    """Four panels of bars: geometric means by head_dim and, for decoding, by the number of keys."""
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(2, 2, figsize=(10.5, 6.9))
    for (name, found), ax in zip(speeds.items(), all_axes.flat, strict=True):
        if name == "decode":
            groups = {_length(n): _of(found, "seqlen", n) for n in sorted({case.seqlen for case in found})}
            xlabel = "keys in the cache"
        else:
            groups = {f"head_dim {d}": _of(found, "head_dim", d) for d in HEAD_DIMS}
            xlabel = ""
        _bars(ax, groups, MEASUREMENTS[name].unit)
        ax.set_xlabel(xlabel, fontsize=10, color=MUTED)
        peers = [library for library in _libraries([found]) if library != OURS]
        best = peers[0] if len(peers) == 1 else f"the fastest of {len(peers)}"
        ax.set_title(MEASUREMENTS[name].title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=20)
        note = f"{geometric_mean(ratios(found).values()):.2f} × {best}, mean of {len(found)} cases"
        ax.text(0, 1.035, note, transform=ax.transAxes, fontsize=9.5, color=MUTED)
    _legend(figure, _libraries(speeds.values()))
    _headline(figure, "onepass on one NVIDIA H200", "geometric means; above a bar: speed over the fastest peer")
    figure.tight_layout(rect=(0, 0.05, 1, 0.95), h_pad=2.2, w_pad=2.5)
    return figure


def _of(speeds: Speeds, field: str, value: Any) -> Speeds:
    return {case: found for case, found in speeds.items() if getattr(case, field) == value}


def _bars(ax: Any, groups: dict[str, Speeds], unit: str) -> None:
    libraries = _libraries(groups.values())
    width = 0.8 / len(libraries)
    highest = 0.0
    for at, speeds in enumerate(groups.values()):
        for i, library in enumerate(libraries):
            height = geometric_mean(found[library] for found in speeds.values() if library in found)
            highest = max(highest, height)
            x = at - 0.4 + (i + 0.5) * width
            ax.bar(x, height, 0.92 * width, color=COLORS[library], zorder=2)
            is_ours = library == OURS
            text = f"{height:.0f}" if height >= 20 else f"{height:.1f}"
            ax.text(x, height * 0.97, text, ha="center", va="top", fontsize=8.5, zorder=3,
                    color=INK if library == "cuDNN" else "white")  # fmt: skip
            if is_ours:
                ratio = f"{geometric_mean(ratios(speeds).values()):.2f}×"
                ax.text(x, height + 0.015 * ax.get_ylim()[1], ratio, ha="center", va="bottom", fontsize=10,
                        fontweight="bold", color=COLORS[OURS])  # fmt: skip
    ax.set_ylim(0, 1.13 * highest)
    ax.set_xticks(range(len(groups)), list(groups), fontsize=10, color=INK)
    ax.set_ylabel(unit, fontsize=10, color=MUTED)
    _plain(ax)


def _title(head_dim: int, causal: bool) -> str:
    return f"head_dim {head_dim}{', causal' if causal else ''}"


def _draw_grid(
    measurement: Measurement,
    speeds: Speeds,
    panels: dict[str, tuple[int, bool, str]],
    across: int,
    xlabel: str,
    where: str = "",
) -> Any:
    """Speed over sequence length. Args: panels: by title head_dim, causal and direction. across: panels in a row."""
    from matplotlib import pyplot as plt

    down = len(panels) // across
    figure, all_axes = plt.subplots(down, across, figsize=(10.5, 6.2), sharex=True, sharey=True)
    seqlens = sorted({case.seqlen for case in speeds})
    for (title, panel), ax in zip(panels.items(), all_axes.flat, strict=True):
        members = {
            case: found for case, found in speeds.items() if (case.head_dim, case.causal, case.direction) == panel
        }
        found = ratios(members).values()
        summary = f"{geometric_mean(found):.2f}× (least {min(found):.2f})"
        ax.set_title(f"{title}{': ' if across < 4 else chr(10)}{summary}", loc="left", fontsize=10.5, color=INK)
        _lines(ax, members, lambda case: case.seqlen)
        ax.set_xticks(seqlens, [_length(n) for n in seqlens])
        ax.minorticks_off()
        ax.set_ylim(0, 1.08 * max(max(by_library.values()) for by_library in speeds.values()))
    for ax in all_axes[:, 0]:
        ax.set_ylabel(measurement.unit, fontsize=10, color=MUTED)
    for ax in all_axes[-1]:
        ax.set_xlabel(xlabel, fontsize=9.5, color=MUTED)
    _legend(figure, _libraries([speeds]))
    _headline(figure, f"{measurement.title}{where}", "in each title: geometric mean of speed over the fastest peer")
    figure.tight_layout(rect=(0, 0.055, 1, 0.94))
    return figure


def _draw_decoding(measurement: Measurement, speeds: Speeds) -> Any:
    """A panel for each kind of model: bandwidth over the size of K and V."""
    from matplotlib import pyplot as plt

    kinds = list(dict.fromkeys((case.heads, case.head_dim) for case in speeds))
    figure, all_axes = plt.subplots(2, 3, figsize=(10.5, 6.2), sharex=True, sharey=True)
    for kind, ax in zip(kinds, all_axes.flat, strict=False):
        members = {case: found for case, found in speeds.items() if (case.heads, case.head_dim) == kind}
        mean, least = geometric_mean(ratios(members).values()), min(ratios(members).values())
        ax.set_title(
            f"{kind[0]} heads of {kind[1]}: {mean:.2f}× (least {least:.2f})",
            loc="left", fontsize=10.5, color=INK,
        )  # fmt: skip
        _lines(ax, members, lambda case: (case.kv_bytes or 0) / 1e9, joins=False)
        ax.set_ylim(0, 1.08 * max(max(found.values()) for found in speeds.values()))
        ax.set_xticks([0.001, 0.01, 0.1, 1, 10], ["0.001", "0.01", "0.1", "1", "10"])
        ax.minorticks_off()
        ax.tick_params(labelbottom=True)
        ax.set_xlabel("K and V, GB", fontsize=9.5, color=MUTED)
        if ax in all_axes[:, 0]:
            ax.set_ylabel(measurement.unit, fontsize=10, color=MUTED)
    for ax in all_axes.flat[len(kinds) :]:
        ax.axis("off")
    _legend(figure, _libraries([speeds]))
    _headline(figure, f"{measurement.title}, one query, H200", "in each title: geometric mean of speed over the peer")
    figure.tight_layout(rect=(0, 0.055, 1, 0.94))
    return figure


def _lines(ax: Any, speeds: Speeds, x_of: Callable[[Case], float], joins: bool = True) -> None:
    for library in _libraries([speeds]):
        points = sorted((x_of(case), found[library]) for case, found in speeds.items() if library in found)
        is_ours = library == OURS
        ax.plot(
            *zip(*points, strict=True),
            color=COLORS[library], marker="o", markersize=5 if is_ours else 4, linewidth=2.4 if is_ours else 1.6,
            linestyle="-" if joins else "none", zorder=3 if is_ours else 2,
        )  # fmt: skip
    ax.set_xscale("log", base=2 if joins else 10)
    _plain(ax)


def _legend(figure: Any, libraries: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    order = sorted(libraries, key=lambda library: library != OURS)
    handles = [Patch(color=COLORS[library]) for library in order]
    figure.legend(handles, order, loc="lower center", ncol=len(order), frameon=False, fontsize=11, labelcolor=INK)


def _headline(figure: Any, title: str, note: str) -> None:
    height = figure.get_size_inches()[1]
    figure.text(0.012, 1 - 0.1 / height, title, fontsize=14, fontweight="bold", color=INK, va="top")
    figure.text(0.988, 1 - 0.14 / height, note, fontsize=9.5, color=MUTED, ha="right", va="top")


def _plain(ax: Any) -> None:
    """Draw lines behind the data, and no frame."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(colors=MUTED, labelsize=9.5, length=0)
    ax.grid(axis="y", color=LINES, linewidth=0.8)
    ax.set_axisbelow(True)


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="folder of results files")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures")
    args = parser.parse_args(argv)
    for folder in (args.results, args.out):
        if not folder.is_dir():
            parser.error(f"expected a folder, got {folder}")
    for path in draw(args.results, args.out):
        print(f"wrote {path}")
