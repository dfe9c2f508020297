"""What a run of ``python -m compat_matrix.bench.first_gpu`` found, as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .. import commits
from ..diffable import of_results

Found = Mapping[str, Any]  # the content of first_gpu.json

MET = {True: "yes", False: "**no**", None: "not measured"}


def page(found: Found) -> str:
    # Whatever has failed or was not run is named.
    on = f"{found['device']}, Python {found['python']}, torch {found['torch']}, Transformers {found['transformers']}"
    rest = "" if found["done"] else " Time was over before all of it was done."
    parts = []
    if "not_run" in found:  # older results lack it
        met, jobs, left = [goal["met"] for goal in found["goals"]], len(found["jobs"]), found["not_run"]
        parts.append(
            f"**{met.count(True)} of {len(met)} goals are met, {met.count(False)} are not, {met.count(None)} not "
            f"measured. {jobs} of {jobs + len(left)} processes are done{f'; next: {left[0]}' if left else ''}.**"
        )
    parts += [f"`{found['command']}`; {found['date']}, {commits.named(found)}, {on}.{rest}"]
    parts += [of_results({**goal, "met": MET[goal["met"]]} for goal in found["goals"])]
    for name, rows, notes in stages(found["results"]):
        parts += [f"**{name}.** {notes}", of_results(rows)] if rows else []
    parts += [f"- {name}: {why}" for name, why in reasons(found)]
    return "\n\n".join(parts)


def stages(results: Mapping[str, Any]) -> Iterator[tuple[str, list[Mapping[str, Any]], str]]:
    yield (
        "Kernels",
        [_kernel(*item) for item in results["kernels"].items()],
        (
            "Cases against the reference, gradients too; *worst*: the largest error, relative to the largest value. "
            "Microseconds of a forward and backward of one layer (32 heads of 128): of the host / until the GPU "
            "is done."
        ),
    )
    models = [row for item in results["models"].items() for row in _models(*item)]
    yield "Tiny models", models, "In bfloat16: near float32, and nothing crosses documents, forward and backward."
    for run in results["training"].values():
        yield "Training", run["rows"], run["notes"]
    hybrids = [
        {"model": f"{family}, {lengths}", **{name: value for name, value in row.items() if name != "kernels"}}
        for one in results["hybrids"].values()
        for family, measured in one["families"].items()
        for lengths, row in measured["rows"].items()
    ]
    yield "Hybrids", hybrids, "Milliseconds of forward and backward, and the ratio of packed to the others."


def reasons(found: Found) -> Iterator[tuple[str, str]]:
    yield from found["missing"].items()
    yield from found["failed"].items()
    for kernel, result in found["results"]["kernels"].items():
        wrong = {name: case for name, case in result["cases"].items() if not case.get("ok", True)}
        for name, case in wrong.items():
            yield f"{kernel}, {name}", case.get("error") or f"relative errors {case['relative_errors']}"
    for run, result in found["results"]["models"].items():
        for family, cell in result["architectures"].items():
            counted = [counts[what] for counts in cell.get("fa2patch", {}).values() for what in ("fail", "n/a")]
            said = [cell.get("error"), cell.get("refused"), *(why for whys in counted for why in whys.values())]
            for why in dict.fromkeys(filter(None, said)):
                yield f"{run}, {family}", why
    for one in found["results"]["hybrids"].values():
        yield from one["missing"].items()


def _kernel(name: str, result: Mapping[str, Any]) -> Mapping[str, Any]:
    cases = [case for case in result["cases"].values() if "refused" not in case]
    right = [case for case in cases if case["ok"]]
    worst = max((error for case in right for error in case["relative_errors"].values()), default=0.0)
    row = {"kernel": name, "right": f"{len(right)} of {len(cases)}", "worst": f"{worst:.1e}"}
    for rows, time in result.get("speed", {}).items():
        row[f"{rows}, µs"] = f"{time['host_us']:.0f} / {time['done_us']:.0f}"
    return row


def _models(run: str, result: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for family, cell in result["architectures"].items():
        row = {"Transformers, kernel": run.replace("-", ", ", 1), "model": family}
        for implementation, counts in cell.get("fa2patch", {}).items():
            said = [f"{counts['ok']} right"] if counts["ok"] else []
            said += [f"{len(counts['fail'])} wrong"] if counts["fail"] else []
            said += [f"{len(counts['n/a'])} cannot run"] if counts["n/a"] else []
            row[implementation] = ", ".join(said)
        yield row
