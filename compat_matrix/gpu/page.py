"""What is known of GPUs, as a page of Markdown: goals first, then a table for each step, then reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .. import commits
from ..cells import grouped
from ..diffable import of_results, some
from .store import Records

WHAT = {
    "matrix": "A tiny model of every architecture, in bfloat16: near float32, and nothing crosses documents, forward "
    "and backward.",
    "families": "The first families in other releases, by what they are loaded as.",
    "kernels": "Every kernel against the reference, gradients too, and whole models with it by name. Microseconds are "
    "of a forward and backward of one layer with 32 heads of 128, of the host / until the device is done.",
    "training": "Real tokens a second, and peaks of memory with and without weights, gradients and the optimizer's "
    "states; bfloat16, AdamW. The limit is the padded tokens to the real ones. *Budget*: steps of four "
    "mini-batches, in passes of at most 16,384 tokens.",
    "cuda": "What only a CUDA device does.",
    "rivals": "Medians of forward and backward, in turns with what packing replaces.",
    "tests": "The tests that need a GPU, and never_silent with its tensors there.",
    "beyond": "What is left: every architecture by another implementation and in older releases.",
}

MET = {True: "yes", False: "**no**", None: "not measured"}

SHARE, OVERHEAD = 0.97, 0.01
# The least throughput of packed training, relative to padded, and the least part that it saves of the peak that is not
# states: what the paper reports (arXiv 2407.09105)
RATIO = {"FLAN-like": 2.0, "OrcaMath-like": 1.4}
MEMORY = {"FLAN-like": 0.20, "OrcaMath-like": 0.06}


class Goal(NamedTuple):
    goal: str
    found: str
    met: bool | None  # None if nothing was measured


def page(records: Records, waiting: Sequence[str] = ()) -> str:
    met = [goal.met for goal in goals(records)]
    done = f"{len(records)} of {len(records) + len(waiting)} tasks are done" if waiting else f"{len(records)} results"
    parts = [
        "# What was run on GPUs",
        f"**{met.count(True)} of {len(met)} goals are met, {met.count(False)} are not, {met.count(None)} not measured. "
        f"{done}{f'; next: {waiting[0]}' if waiting else ''}.**",
        of_results(goals_table(records)),
    ]
    for step, held in _by_step(records).items():
        parts += [f"## {step}", WHAT[step], *_machines(held), of_results(_rows(step, held))]
        parts += ["\n".join(f"- {name}: {why}" for name, why in reasons(held))]
    return "\n\n".join(part for part in parts if part)


def goals_table(records: Records) -> list[dict[str, Any]]:
    return [{"": goal.goal, "found": goal.found, "met": MET[goal.met]} for goal in goals(records)]


def _by_step(records: Records) -> dict[str, Records]:
    held = {step: {name: found for name, found in records.items() if name.startswith(f"{step}: ")} for step in WHAT}
    return {step: found for step, found in held.items() if found}


def _machines(records: Records) -> Iterator[str]:
    every = [found["made"] for found in records.values()]
    for said, releases in grouped((described(made), made["transformers"]) for made in every).items():
        yield f"{len(releases)} of {len(records)}: {said}, Transformers {', '.join(dict.fromkeys(releases))}."


def described(made: dict[str, Any]) -> str:
    builds = "".join(f", {name} {version}" for name, version in made["builds"].items())
    driver = f" (driver {made['driver']})" if "driver" in made else ""
    return f"{made['when'][:10]}, {commits.named(made)}, {made['device']}{driver}, torch {made['torch']}{builds}"


def reasons(records: Records) -> Iterator[tuple[str, str]]:
    for name, found in records.items():
        told = {**found, "error": {"": found["error"]} if "error" in found else {}}
        for what in ("error", "wrong", "refused"):
            for where, why in told.get(what, {}).items():
                yield f"{name}, {what}{f', {where}' if where else ''}", " ".join(why.split())


def _rows(step: str, records: Records) -> list[dict[str, Any]]:
    if step == "training":
        rows = [*training(records)]
        found = [{"": f"{row['setting']}, {row['lengths']}, {row['variant']}", **row["columns"]} for row in rows]
        return found + [{"": name.partition(": ")[2], **one["row"]} for name, one in records.items() if "row" in one]
    named = {name.partition(": ")[2]: found for name, found in records.items()}
    single = [{"": name, **found["row"]} for name, found in named.items() if "row" in found]
    return single + [{"": name, **row} for found in named.values() for name, row in found.get("rows", {}).items()]


# --- training -------------------------------------------------------------------------------------------------


def training(records: Records) -> Iterator[dict[str, Any]]:
    # Each variant comes beside the padded ones of its setting and lengths.
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for name, found in records.items():
        setting, _, variant = name.partition(": ")[2].rpartition(", ")
        for lengths, row in found.get("rows", {}).items():
            runs.setdefault((setting, lengths), {})[variant] = row
    for (setting, lengths), of in runs.items():
        padded = [row for variant, row in of.items() if variant.startswith("padded:")]
        best = max((row["real tokens/s"] for row in padded), default=None)
        for variant, row in of.items():
            columns = dict(row)
            if best:
                columns["limit"] = padded[0]["limit"]
                columns["to padded"] = row["real tokens/s"] / best
                columns["share of the limit"] = round(columns["to padded"] / columns["limit"], 4)
            yield {"setting": setting, "lengths": lengths, "variant": variant, "columns": columns}


PEAK = "peak less states, GB"


def _of_training(records: Records) -> Iterator[Goal]:
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in training(records):
        kind = row["variant"].partition(":")[0] + "+" * row["variant"].endswith("+lengths")
        runs.setdefault((row["setting"], row["lengths"]), {}).setdefault(kind, row["columns"])
    for (setting, lengths), of in runs.items():
        own, bare, padded = (of.get(kind, {}) for kind in ("fa2patch+", "by-hand", "padded"))
        rates = [each.get("real tokens/s") for each in (bare, own)]
        over = rates[0] / rates[1] - 1 if all(rates) else None
        less = 1 - own[PEAK] / padded[PEAK] if PEAK in own and PEAK in padded else None
        share = of.get("budget+", {}).get("share of the limit")
        for goal, found, shown, least in (
            (f"at least {RATIO[lengths]} times padded", own.get("to padded"), "{:.2f}", RATIO[lengths]),
            (f"a budget has {SHARE:.0%} of the limit", share, "{:.1%}", SHARE),
            (f"at most {OVERHEAD:.0%} over the kernel by hand", over, "{:+.2%}", None),
            (f"{MEMORY[lengths]:.0%} less memory beside the states", less, "{:.1%} less", MEMORY[lengths]),
        ):
            met = found is not None and (found <= OVERHEAD if least is None else found >= least)
            named = f"{setting}, {lengths}: {goal}"
            yield Goal(named, "", None) if found is None else Goal(named, shown.format(found), met)


def goals(records: Records) -> list[Goal]:
    found, held = [], _by_step(records)
    for step in WHAT:
        of = held.get(step, {})
        wrong = [name.partition(": ")[2] for name, one in of.items() if one.get("wrong") or "error" in one]
        refused = sum(bool(one.get("refused")) for one in of.values())
        said = f"{len(of) - len(wrong)} of {len(of)}{f'; wrong: {some(wrong)}' if wrong else ''}"
        said += f"; a build or release refuses a part of {refused}" if refused else ""
        found.append(Goal(f"{step}: nothing is wrong", said if of else "", not wrong if of else None))
    return [*found, *_of_training(held.get("training", {}))]
