"""The pictures of BENCH.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .table import Found
from .tables import total_reads

BLUE, GREY, GREEN, ORANGE, INK = "#1f5fd0", "#b8bec9", "#2a9d6f", "#d9822b", "#30343b"
OTHERS = ("#8a94a6", "#6b7485", "#3f4654")


def cpu(results: dict[str, Found], file: Path) -> None:
    """Draw reads by layers, attention by documents and training by distribution, side by side."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), dpi=150, layout="constrained", width_ratios=(1, 1, 0.95))
    draw_reads(axes[0], results["syncs"])
    draw_kernels(axes[1], results["kernels"])
    draw_training(axes[2], results["training"])
    for drawn in axes:
        drawn.spines[["top", "right"]].set_visible(False)
        drawn.set_axisbelow(True)
    figure.savefig(file)
    plt.close(figure)


def draw_reads(axes: Axes, found: Found) -> None:
    """Draw Llama's reads by layers. The logarithmic axis is symmetric, so that it can show zero."""
    for (version, run), colour in zip(found["versions"].items(), OTHERS):
        upstream = run["counts"]["llama"]["upstream"]
        layers = sorted(map(int, upstream))
        reads = [total_reads(upstream[str(count)]) for count in layers]
        axes.plot(layers, reads, marker="o", ms=4, color=colour, label=f"Transformers {version} alone")
    last = found["versions"][max(found["versions"])]["counts"]["llama"]
    for way, style, name in (("fa2patch", "-", "fa2patch"), ("fa2patch, lengths", ":", "fa2patch, given the lengths")):
        reads = [total_reads(last[way][str(count)]) for count in layers]
        axes.plot(layers, reads, style, marker="o", ms=4, color=BLUE, linewidth=2.2, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(-0.15, None)
    axes.set_xticks(layers, map(str, layers))
    axes.set_yticks((0, 1, 10, 100), ("0", "1", "10", "100"))
    axes.minorticks_off()
    axes.grid(axis="y", color="#e6e8ec")
    axes.set_xlabel(f"layers\n(Transformers alone, given the lengths: {_given_lengths(found)})", fontsize=9)
    axes.set_title("Device-to-host reads per forward", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=8.5, loc="center right", bbox_to_anchor=(1, 0.54))


def _given_lengths(found: Found) -> str:
    """Return the most reads of Transformers alone with the collator's lengths, which the lines do not show."""
    said = []
    for version, run in found["versions"].items():
        counts = list(run["counts"]["llama"]["upstream, lengths"].values())
        refused = any("refused" in count for count in counts)
        said.append(f"{version} {'refuses' if refused else max(map(total_reads, counts))}")
    return ", ".join(said)


def draw_kernels(axes: Axes, found: Found) -> None:
    """Draw the times of forward and backward for documents of equal length."""
    rows = [row for row in found["rows"] if " x " in row["row"]]
    documents = [row["documents"] for row in rows]

    def times(name: str) -> list[float]:
        return [row["causal"][name]["forward_backward"]["median_ms"] for row in rows]

    axes.plot(documents, times("block mask"), marker="o", ms=4, color=ORANGE, label="block-diagonal mask")
    axes.plot(documents, times("one by one"), marker="o", ms=4, color=OTHERS[1], label="sdpa, document by document")
    axes.plot(documents, times("batched"), marker="o", ms=4, color=GREY, label="sdpa, a batch of equal documents")
    axes.plot(documents, times("reference"), marker="o", ms=4, color=BLUE, linewidth=2.2, label="fa2patch's reference")
    scale = times("reference")[0] / rows[0]["scores"]
    axes.plot(
        documents, [scale * row["scores"] for row in rows], "--", color=INK, linewidth=1, label="sum of squared lengths"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_yticks((5, 10, 20, 50, 100, 200, 400), map(str, (5, 10, 20, 50, 100, 200, 400)))
    axes.set_xticks(documents[::2], [f"{count}\n×{found['tokens'] // count}" for count in documents[::2]])
    axes.minorticks_off()
    axes.grid(axis="y", color="#e6e8ec")
    axes.set_xlabel("documents × tokens in each")
    axes.set_title(f"Attention of {found['tokens']} tokens, fwd + bwd, ms", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=8.5, loc="lower left")


def draw_training(axes: Axes, found: Found) -> None:
    """Draw the rivals as bars, and the limit of each distribution as a dashed line."""
    names = (
        ("padded", GREY, "padded"),
        ("upstream", OTHERS[1], "packed, Transformers"),
        ("fa2patch", BLUE, "packed, fa2patch"),
    )
    for place, run in enumerate(found["runs"]):
        for index, (name, colour, label) in enumerate(names):
            ratio = run["rivals"][name]["ratio_to_padded"]
            x = place + (index - 1) * 0.27
            axes.bar(x, ratio, width=0.25, color=colour, label=label if not place else None)
            ink = INK if name == "padded" else "white"
            axes.annotate(f"{ratio:.2f}×", (x, ratio / 2), ha="center", va="center", color=ink, fontsize=9)
        axes.plot(
            [place - 0.42, place + 0.42], [run["limit"]] * 2, "--", color=INK, linewidth=1.2,
            label="padded / real tokens" if not place else None,
        )  # fmt: skip
    highest = max(max(run["limit"], run["rivals"]["fa2patch"]["ratio_to_padded"]) for run in found["runs"])
    axes.set_ylim(0, highest * 1.45)
    axes.set_xticks(range(len(found["runs"])), [run["distribution"] for run in found["runs"]])
    axes.grid(axis="y", color="#e6e8ec")
    axes.set_title("Training: real tokens/s, padded = 1", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)


def gpu(found: Found, file: Path) -> None:
    """Draw throughput on the left and memory on the right, one row for each model and distribution."""
    rows = [(shape, name) for shape, runs in found["shapes"].items() for name in runs["distributions"]]
    figure, axes = plt.subplots(
        len(rows), 2, figsize=(12, 2.4 * len(rows)), dpi=150, layout="constrained", squeeze=False
    )
    for (shape, distribution), (left, right) in zip(rows, axes):
        run = found["shapes"][shape]["distributions"][distribution]
        measured = {name: of for name, of in run["variants"].items() if "error" not in of}
        draw_bars(left, {name: of["real_tokens_per_second"] for name, of in measured.items()}, "{:,.0f}")
        draw_bars(right, {name: of["peak_bytes"] / 1e9 for name, of in measured.items()}, "{:.1f}")
        right.set_yticklabels([])
        padded = [of["real_tokens_per_second"] for name, of in measured.items() if name.startswith("padded")]
        if padded:
            left.axvline(max(padded) * run["limit"], color=INK, linestyle="--", linewidth=1.2)
        left.set_title(f"{shape}, {distribution}: real tokens/s", loc="left", fontweight="bold", fontsize=10)
        right.set_title("peak memory, GB", loc="left", fontweight="bold", fontsize=10)
    figure.suptitle(
        f"{found['device']}; dashed: the padded run times padded / real tokens", fontsize=9, x=0.99, ha="right"
    )
    figure.savefig(file)
    plt.close(figure)


def draw_bars(axes: Axes, values: dict[str, Any], form: str) -> None:
    """Draw one horizontal bar with its number for each variant."""
    colours = [
        BLUE if name.startswith("fa2patch") else GREEN if name.startswith("by-hand") else GREY for name in values
    ]
    axes.barh(range(len(values)), list(values.values()), color=colours, height=0.7)
    for place, value in enumerate(values.values()):
        axes.annotate(form.format(value), (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
