"""Makes ECOSYSTEM.md, LONG_ROWS.md and README's table of integrations from the evidence of other packages' stacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import commits, diffable
from ..bench import figures
from ..cells import grouped
from ..ecosystem.stacks import EVIDENCE, INTEGRATIONS, releases, rows, split, stacks
from ..results import Malformed
from . import words

# The evidence of these stacks is on LONG_ROWS.md, that of all others on ECOSYSTEM.md.
LONG = "long-rows-"

ENGINES = {
    "ulysses": "DeepSpeed's Ulysses",
    "ulysses_engine loop": "accelerate's `sp_size`",
    "ulysses_engine trainer": "Trainer's `sp_size`",
    "tensor_parallel": "tensor parallelism",
    "context_parallel torch": "torch's `context_parallel`",
    "context_parallel plain": "the same in plain order",
    "context_parallel accelerate": "accelerate's `cp_size`",
    "context_parallel Trainer": "Trainer's `cp_size`",
}
# the engines whose columns have what these scripts train
TRAINING = {
    "context_training fsdp": "context_parallel torch",
    "context_training loop": "context_parallel accelerate",
    "context_training trainer": "context_parallel Trainer",
}
IDS = ("packed rows by ids", "documents that cross the border")
# The rows of the tables of LONG_ROWS.md that a script's feature stands for, where they have other names.
FEATURES = {
    "ids": IDS,
    "lengths": ("packed rows by lengths",),
    "seq_idx": ("packed rows by `seq_idx`",),
    "window": ("windows",),
    "one key head": ("fewer key heads than processes",),
    "mixers": ("mixers, documents cut",),
    "qwen2": ("Qwen2",),
    "labels": ("labels of first tokens",),
}

# the engines with which these scripts run every architecture, and what can become of one
EVERY = {"architectures ulysses": "ulysses", "architectures torch": "context_parallel torch"}
OUTCOMES = ("right", "right if documents lie whole", "refused", "upstream", "wrong")

Evidence = dict[str, Any]
# by engine and feature: the number of processes and the cell of each run
Cells = dict[str, dict[str, list[tuple[int, dict[str, Any]]]]]


def pages(folder: Path) -> dict[Path, str]:
    # Stacks without evidence are named on the pages.
    known = [stack.name for stack in stacks().values() if stack.tests]
    files = {name: EVIDENCE / f"{name}.json" for name in known}
    found = {name: figures.read(file) for name, file in files.items() if file.exists()}
    return {
        folder / f"{page}.md": text_of(page, found, [name for name in known if name.startswith(LONG) == is_long])
        for page, is_long in (("ECOSYSTEM", False), ("LONG_ROWS", True))
    }


def text_of(page: str, found: dict[str, Evidence], known: list[str]) -> str:
    # page: "ECOSYSTEM" or "LONG_ROWS"
    found = {name: found[name] for name in known if name in found}
    reasons: dict[str, int] = {}
    return words.rendered(
        f"{page}.md.jinja",
        found=found,
        known=known,
        missing=[name for name in known if name not in found],
        failed=[f"{name}, {check}: {one.get('error', 'off')}" for name, check, one in _checks(found) if not one["ok"]],
        stacks=_stack_table(found),
        checks=lambda *names: [(stack, one) for stack, check, one in _checks(found) if check in names and one["ok"]],
        cell=_cell,
        batch=_batch,
        tables=lambda kind: _tables(found, kind, reasons),
        reasons=reasons,
        outcomes=OUTCOMES,
        architectures=dict(_architectures(found)),
        split=split,
    )


def _checks(found: dict[str, Evidence]) -> Iterator[tuple[str, str, Evidence]]:
    # Checks that do not apply are left out.
    for stack, evidence in found.items():
        for check, finding in evidence["checks"].items():
            if "skipped" not in finding:
                yield stack, check, {**finding, "check": check}


def _stack_table(found: dict[str, Evidence]) -> str:
    lines = []
    for name, evidence in found.items():
        made = [*evidence["made"].values()]
        dates, code = sorted({one["date"] for one in made}), sorted({*map(commits.named, made)})
        packages = ", ".join(f"{package} {release}" for package, release in evidence["versions"].items())
        lines.append([name, ", ".join(dates), ", ".join(code), packages])
    return diffable.table(["stack", "date", "made with", "packages"], lines)


def _cell(finding: Evidence | None) -> str:
    if finding is None or "skipped" in finding:
        return "" if finding is None else "–"
    if not finding["ok"]:
        return "**failed**"
    differences = [*_differences(finding)]
    return f"ok ({words.number(max(differences))})" if differences else "ok"


def _differences(finding: Evidence) -> Iterator[float]:
    wanted = ("weights_off_by",) if "resumed_at" in finding else ("largest_relative_difference", "logits_off_by")
    for name, value in finding.items():
        if name in wanted:
            yield value
        elif isinstance(value, dict) and name not in ("alone", "losses"):
            yield from _differences(value)


def _batch(batch: dict[str, str]) -> str:
    shapes = {name: shape[shape.find("[") :] if "[" in shape else "" for name, shape in batch.items()}
    return ", ".join(f"{name} {shape}".strip() for name, shape in shapes.items())


def _tables(found: dict[str, Evidence], kind: str, reasons: dict[str, int]) -> dict[str, str]:
    # kind: "table" or "alone"
    made = {}
    for stack, evidence in found.items():
        cells = by_engine(evidence, kind)
        features = dict.fromkeys(feature for of_engine in cells.values() for feature in of_engine)
        lines = [[feature, *(_said(one.get(feature, []), reasons) for one in cells.values())] for feature in features]
        made[stack] = diffable.table(["", *(ENGINES[engine] for engine in cells)], lines)
    return made


def by_engine(evidence: Evidence, kind: str) -> Cells:
    # An engine that was not run in a stack has no column.
    cells: Cells = {}
    for engine in ENGINES:
        for entry, finding in evidence["checks"].items():
            script, processes = split(entry)
            if f"{TRAINING.get(script, script)} ".startswith(f"{engine} "):
                for feature, cell in _features(script, finding, kind):
                    cells.setdefault(engine, {}).setdefault(feature, []).append((processes, cell))
    return cells


def _features(script: str, finding: Evidence, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    # Ten steps of training by accelerate or Trainer stand for several rows.
    if script in TRAINING:
        for name, row in (("whole", "fifty steps"), ("resumed", "fifty steps, resumed after half of them")):
            if kind == "table" and name in finding:
                yield row, {"found": "right" if finding["ok"] else "wrong", "off_by": finding[name]}
    elif not script.startswith("ulysses_engine"):
        for name, cell in finding.get(kind, {}).items():
            yield from ((feature, cell) for feature in FEATURES.get(name, (name,)))
    elif "alone" in finding:
        yield from ((feature, finding["alone"]) for feature in IDS if kind == "alone")
    elif kind == "table" and "loss" in finding:
        cell = {"found": "right" if finding["ok"] else "wrong", "off_by": max(finding["loss"], finding["weight"])}
        yield from ((feature, cell) for feature in IDS)
        yield f"ten steps with ZeRO-{script[-1]}", {**cell, "gradients_times": finding["gradients_times"]}
        yield "verify", {"found": "right" if finding["verify"].startswith("isolated") else "wrong"}


def _said(runs: list[tuple[int, dict[str, Any]]], reasons: dict[str, int]) -> str:
    # What holds for every run is said once, with the largest number.
    groups = grouped((cell["found"].lower(), (processes, cell)) for processes, cell in runs)
    texts = []
    for word, of_word in groups.items():
        cells = [cell for _, cell in of_word]
        text = f"**{word}**" if word in ("wrong", "leaks") else word
        if word in ("refused", "upstream", "error", "wrong") and cells[0].get("said"):
            reason = cells[0]["said"].partition("\n")[0].replace("off_by is", "The number is")
            reason = reason if len(reason) <= 400 else f"{reason[:400]} …"
            text += f" [{reasons.setdefault(reason, len(reasons) + 1)}]"
        off = [cell["off_by"] for cell in cells if cell.get("off_by") is not None]  # each a number, or several by name
        every = [one for each in off for one in (each.values() if isinstance(each, dict) else [each])]
        if every:
            text += f" ({f'{max(every):.2g}' if max(every) > 1e-3 else words.number(max(every))})"
        times = max(cell.get("gradients_times", 1) for cell in cells)
        text += f", gradients × {times}" if times > 1 else ""
        where = " and ".join(str(processes) for processes, _ in of_word)
        texts.append(f"{text} with {where} processes" if len(groups) > 1 else text)
    return "; ".join(texts)


def _architectures(found: dict[str, Evidence]) -> Iterator[tuple[tuple[str, str, int], dict[str, list[str]]]]:
    # by stack, engine and number of processes: the architectures of each outcome
    for stack, entry, finding in _checks(found):
        script, processes = split(entry)
        if script in EVERY:
            groups: dict[str, list[str]] = {outcome: [] for outcome in OUTCOMES}
            for name, one in finding.get("architectures", {}).items():
                first, *more = [run["found"].lower() for run in one.values()]
                whole = first == "refused" and "right" in more
                groups["wrong" if "wrong" in (first, *more) else OUTCOMES[1] if whole else first].append(name)
            yield (stack, ENGINES[EVERY[script]], processes), groups


def integrations() -> str:
    found, lines = figures.read(INTEGRATIONS), []
    for name, row in rows().items():
        run = found.get(name)
        if run is None or set(run["outcomes"]) != {"passed"} or run["command"] != row.command:
            raise Malformed(
                f"{INTEGRATIONS.name}: expected the passed tests of {row.command}, found {run and run['outcomes']}. "
                f"Run python -m compat_matrix.ecosystem {name}"
            )
        numbers = ", ".join(releases(row, run["stacks"]))
        passed = f"{run['outcomes']['passed']} passed at `{run['commit'][:8]}`"
        lines.append([f"[{row.title}]({words.DOCS}/{row.page})", numbers, row.what, passed, f"`{row.chosen}`"])
    return diffable.table(["with", "releases", "what runs", "tests", "`python -m pytest -m slow`"], lines)
