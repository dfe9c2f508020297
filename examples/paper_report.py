"""The report of reproduce_paper.py: a table, the paper's claims one by one, and three figures."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from typing import Any

try:
    import matplotlib
except ImportError as error:
    raise SystemExit(f"{error}. This example needs a little more: pip install 'fa2patch[demo]'") from None

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

GREY, BLUE, ORANGE, INK = "#b8bec9", "#1f5fd0", "#d9822b", "#30343b"

PAPER = {
    "padding": (19_961, 742, 1.129),
    "packing, no ids": (2_294, 2_986, 1.306),
    "offline packing + ids": (585, 3_010, 1.284),
    "online mini-batch + ids": (19_961, 1_408, 1.127),
}
"""Rows, tokens/s and validation loss of arXiv 2407.09105, table 2: FLAN, 20,000 examples, Mistral-7B, one epoch."""

PADDING, ONLINE, OFFLINE = "padding", "online mini-batch + ids", "offline packing + ids"
LEAKY_ROWS, LEAKY = "packing, no ids", "online mini-batch, no ids"

SPEED = ("real_tokens_per_second", "real_tokens_per_processor_second")
"""The keys of the speed on a GPU and on a CPU. On a CPU, one thread's processor time does not depend on other
programs.
"""

SAME = 1e-3
"""Two float32 runs count as the same training if their validation losses differ by less than this, relatively.
The effect of rounding grows with steps.
"""

Results = dict[str, Any]
Runs = list[dict[str, Any]]


# --- numbers -------------------------------------------------------------------------------------------------


def by_variant(runs: Runs) -> dict[str, Runs]:
    """Group runs by variant, ordered by seed."""
    found: dict[str, Runs] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["variant"], []).append(run)
    return found


def summaries(runs: Runs) -> dict[str, dict[str, Any]]:
    """Summarise the seeds of each variant: counts of the first seed, medians of times and memory, means of losses."""
    found = {}
    for name, of in by_variant(runs).items():
        counts = ("rows", "mini_batches", "optimizer_steps", "real_tokens", "computed_tokens", "targets")
        found[name] = {key: of[0][key] for key in counts} | {
            "real_tokens_per_second": median(run[speed_of(of)] for run in of),
            "peak_memory_bytes": median(run["peak_memory_bytes"] for run in of),
            "training_memory_bytes": median(run["training_memory_bytes"] for run in of),
            "validation_loss": mean(run["validation_loss"] for run in of),
            "validation_losses": [run["validation_loss"] for run in of],
        }
    return found


def speed_of(runs: Runs) -> str:
    """Return the key of the speed to compare."""
    return SPEED[runs[0]["device"] == "CPU"]


def gaps(runs: Runs, worse: str, better: str) -> list[float]:
    """Return by how much one variant's validation loss exceeds the other's, seed by seed."""
    of = by_variant(runs)
    return [one["validation_loss"] - other["validation_loss"] for one, other in zip(of[worse], of[better])]


def findings(runs: Runs) -> list[dict[str, Any]]:
    """Return the paper's claims, each with its numbers and whether it holds here for every seed."""
    of, found = by_variant(runs), []

    def claim(text: str, holds: bool, numbers: str) -> None:
        found.append({"claim": text, "holds": holds, "numbers": numbers})

    def above(text: str, worse: str, better: str) -> None:
        if worse in of and better in of:
            by = gaps(runs, worse, better)
            steps = f"{of[worse][0]['optimizer_steps']} and {of[better][0]['optimizer_steps']} steps"
            claim(text, min(by) > 0, f"{spread(by, '{:+.4f}')} nats per token, {steps}")

    if PADDING in of and ONLINE in of:
        pairs = list(zip(of[PADDING], of[ONLINE]))
        same_batches = all(one["checksum"] == other["checksum"] for one, other in pairs)
        same_steps = all(one["optimizer_steps"] == other["optimizer_steps"] for one, other in pairs)
        largest = max(
            abs(one - other) / one
            for padded, packed in pairs
            for (_, one), (_, other) in zip(padded["validation_curve"], packed["validation_curve"])
        )
        noise = [run["validation_loss"] for run in of[PADDING]]
        claim(
            f"{ONLINE} equals {PADDING}: mini-batches, steps, loss",
            same_batches and same_steps and largest < SAME,
            f"{of[ONLINE][0]['optimizer_steps']} steps each; validation curves differ by {largest:.1e} (relative) at "
            f"most; seeds of {PADDING} lie {max(noise) - min(noise):.4f} apart",
        )
    above("leaky packing is worse than packing with ids, rows filled alike", LEAKY_ROWS, OFFLINE)
    above("(not in the paper) the leak alone is worse: the same mini-batches without ids", LEAKY, ONLINE)
    above("filled rows learn less in one epoch: fewer steps", OFFLINE, ONLINE)
    if {PADDING, ONLINE, OFFLINE} <= set(of):
        speed = {name: summary["real_tokens_per_second"] for name, summary in summaries(runs).items()}
        limit = of[PADDING][0]["computed_tokens"] / of[PADDING][0]["real_tokens"]
        claim(
            f"{OFFLINE} is faster than {ONLINE}, and that faster than {PADDING}",
            speed[OFFLINE] > speed[ONLINE] > speed[PADDING],
            f"×{speed[OFFLINE] / speed[PADDING]:.2f} and ×{speed[ONLINE] / speed[PADDING]:.2f}; these mini-batches "
            f"hold {limit:.2f} padded tokens for each real one",
        )
    return found


def spread(values: list[float], form: str) -> str:
    """Format the mean of the values, and their range if there are several."""
    if len(values) == 1:
        return form.format(values[0])
    return f"{form.format(mean(values))} ({form.format(min(values))} to {form.format(max(values))})"


# --- table ---------------------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    """Return the report as Markdown."""
    rows = results["summaries"]
    first, settings = results["runs"][0], results["settings"]
    padded = rows.get(PADDING, {}).get("real_tokens_per_second")
    seeds = len(next(iter(rows.values()))["validation_losses"])
    clock = "Seconds of processor time, one thread." if first["device"] == "CPU" else "Seconds by the clock."
    code = f"commit {results['commit']}, " if results.get("commit") else ""
    lines = [
        "<!-- Made by examples/reproduce_paper.py from results.json beside it: do not edit. -->",
        "",
        "# The batching variants of arXiv 2407.09105, on a small model",
        "",
        f"    {results['command']}",
        "",
        f"{results['date']}, {code}{first['model_class']} with {first['parameters'] / 1e6:.1f} M parameters, "
        f"{first['device']}, float32 on a CPU, bfloat16 autocast on a GPU; "
        + ", ".join(f"{name} {number}" for name, number in results["versions"].items())
        + f". {settings['documents']:,} documents of up to {settings['max_length']} tokens, one epoch, mini-batches of "
        f"{settings['batch_size']}, {settings['accumulate']} of them a step; filled rows of {settings['row_length']} "
        f"tokens. Validation: {settings['held_out']} other documents, the same and padded for all. Seeds: {seeds}; "
        "counts are the first one's, speed and memory the median, losses the mean.",
        "",
    ]
    head = ["batching", "rows", "optimizer steps", "real tokens/s", "× padding", "memory MB", "validation loss"]
    cells = []
    for name, row in rows.items():
        speed = row["real_tokens_per_second"]
        counts = [f"{row['rows']:,}", f"{row['optimizer_steps']:,}", f"{speed:,.0f}"]
        ratio = f"{speed / padded:.2f}" if padded else ""
        cells.append(
            [name, *counts, ratio, f"{row['training_memory_bytes'] / 1e6:,.0f}", f"{row['validation_loss']:.4f}"]
        )
    lines += table(head, cells)
    lines += ["", f"{clock} Memory: the process's peak less what it held before the first step.", ""]
    lines += ["The paper's own, table 2 (FLAN, 20,000 examples, Mistral-7B, one epoch; steps not given):", ""]
    theirs = PAPER[PADDING][1]
    lines += table(
        ["batching", "rows", "tokens/s", "× padding", "validation loss"],
        [
            [name, f"{count:,}", f"{speed:,}", f"{speed / theirs:.2f}", f"{loss:.3f}"]
            for name, (count, speed, loss) in PAPER.items()
        ],
    )
    lines += ["", "What the paper says, held against every seed here:", ""]
    lines += [
        f"- {'holds' if found['holds'] else '**does not hold**'}: {found['claim']}. {found['numbers']}."
        for found in results["findings"]
    ]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table with aligned columns; all but the first are right-aligned."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths)
        return " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [f"| {line(row)} |" for row in [head, rule, *rows]]


# --- figures -------------------------------------------------------------------------------------------------


def colour(name: str) -> str:
    """Return the colour of a variant."""
    return BLUE if "+ ids" in name else ORANGE if "no ids" in name else GREY


def figure(results: Results, file: Path) -> None:
    """Draw throughput, memory and validation loss side by side, with a dot for each seed."""
    of = by_variant(results["runs"])
    drawn, axes = plt.subplots(1, 3, figsize=(14, 0.9 + 0.5 * len(of)), dpi=150, layout="constrained", sharey=True)
    draw(axes[0], of, speed_of(results["runs"]), 1, "{:,.0f}", "Real tokens per second")
    draw(axes[1], of, "training_memory_bytes", 1e6, "{:,.0f}", "Peak memory added by training, MB")
    draw(axes[2], of, "validation_loss", 1, "{:.3f}", "Validation loss, nats per token", from_zero=False)
    axes[0].set_yticks(range(len(of)), [f"{name}\n{runs[0]['optimizer_steps']} steps" for name, runs in of.items()])
    axes[0].invert_yaxis()
    drawn.savefig(file)
    plt.close(drawn)


def draw(axes: Axes, of: dict[str, Runs], key: str, unit: float, form: str, title: str, from_zero: bool = True) -> None:
    """Draw bars from zero. For losses only differences matter: draw dots, and a line at the padded run's mean."""
    middle = mean if key == "validation_loss" else median
    for place, (name, runs) in enumerate(of.items()):
        values = [run[key] / unit for run in runs]
        if from_zero:
            axes.barh(place, middle(values), height=0.7, color=colour(name))
            axes.plot(values, [place] * len(values), "o", ms=3, color=INK)
        else:
            axes.plot(values, [place] * len(values), "o", ms=5, color=colour(name), alpha=0.6, markeredgewidth=0)
            axes.plot([middle(values)] * 2, [place - 0.3, place + 0.3], color=colour(name), linewidth=2.5)
        number, beside = form.format(middle(values)), {"textcoords": "offset points", "va": "center", "fontsize": 9}
        axes.annotate(number, (max(values), place), (6, 0), **beside)
    if not from_zero and PADDING in of:
        axes.axvline(middle([run[key] / unit for run in of[PADDING]]), color=INK, linestyle="--", linewidth=1, zorder=0)
    axes.margins(x=0.18)
    axes.locator_params(axis="x", nbins=6)
    if from_zero:
        axes.set_xlim(left=0)
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e6e8ec")
    axes.set_axisbelow(True)
