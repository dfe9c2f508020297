"""``fa2patch architectures``: the models of the installed Transformers that fa2patch isolates, and those it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from .. import evidence
from ..upstream import architectures as registry
from ..upstream.transformers_names import MODEL_CLASSES, imported
from .models import MASKED, cannot, did_you_mean, model_type_of, model_types
from .options import as_json_option
from .output import escaped, new_console, print_json, print_table

_QUIRKS = {"adjust": "options adjusted", "queries": "queries scaled", "refuse": "some configs refused"}
_NOT_CHECKED = "not checked"  # the state of every architecture in a version without evidence

_LEGEND = (
    "attention: every layer gets the documents' boundaries at its seam. mixers: layers that carry state along the row "
    "run document by document, or get the boundaries. Isolated in: the minors whose evidence shows it. "
    "llava:picture: with pictures in its rows. Encoder-decoders, and models of pictures or sound alone, are refused."
)


@click.command("architectures")
@click.argument("model", required=False)
@as_json_option
def architectures_command(model: str | None, as_json: bool) -> None:
    """Show which models of the installed Transformers fa2patch isolates, and which it refuses.

    The list comes from the evidence of the compatibility matrix; the fourteen families are first. With MODEL, a model
    type such as llama, everything that is known about this one is shown, for all versions.
    """
    import transformers

    version = transformers.__version__
    found, rest, name = list(_rows(version)), [], model
    if model is None:
        auto: Any = imported(MODEL_CLASSES)
        rest = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {row["model_type"] for row in found})
    else:
        names = [*model_types(), *evidence.by_architecture()]
        name = model_type_of(model, names)
        if name is None:
            raise cannot(f"{model!r} is no model type that is known here.{did_you_mean(model, names)}")
        found = [row for row in found if _bare(row["model_type"]) == _bare(name)]
    if as_json:
        print_json({"transformers": version, "architectures": found, "without_evidence": rest})
    elif name is None:
        _show_all(found, rest, version)
    elif found:
        for row in found:
            _show_one(row, version)
    else:
        click.echo(_without_evidence(name, version))


def _bare(name: str) -> str:
    return name.partition(":")[0]


def _rows(version: str) -> Iterator[dict[str, Any]]:
    installed, minor = set(model_types()), evidence.minor_of(version)
    checked = minor in evidence.minors()
    if not checked:  # what the newest version that was checked had
        minor = evidence.minors()[-1]
    for name, states in evidence.by_architecture().items():
        state, what = evidence.state_in(minor, states)
        if _bare(name) not in installed or state == "absent":
            continue
        isolated = [each for each in evidence.minors() if evidence.state_in(each, states)[0] == "ok"]
        if not checked:
            state, what = _NOT_CHECKED, f"In {minor}: {_in_words(state, what)}"
        yield {
            "model_type": name,
            "family": name in evidence.evidence()["families"],
            "state": state,  # ok, refused, known failure, failing or not checked
            "seam": what if state == "ok" else "",
            "does": _does(name, what) if state == "ok" else [],
            "isolated_in": evidence.ranges_of(isolated),
            "reason": "" if state == "ok" else what,
            "evidence": states,  # all minors by state and by seam or reason
        }


def _in_words(state: str, what: str) -> str:
    return f"isolated at the seam {what}" if state == "ok" else f"{state}: {what}"


def _does(name: str, seam: str) -> list[str]:
    attention = "attention both ways" if name.endswith(MASKED) else "attention"
    parts = dict.fromkeys("mixers" if one == "mixer" else attention for one in seam.split(" and "))
    row = next((row for row in registry.architectures() if row.model_type == name), None)
    return [*parts, *(words for quirk, words in _QUIRKS.items() if getattr(row, quirk, None) is not None)]


def _here(row: dict[str, Any]) -> str:
    if row["state"] == _NOT_CHECKED:
        return f"{_NOT_CHECKED} here. {row['reason']}"
    return "isolated" if row["state"] == "ok" else f"{row['state']}: {row['reason']}"


def _show_all(found: list[dict[str, Any]], rest: list[str], version: str) -> None:
    console, minors, rows = new_console(), evidence.minors(), []
    for row in found:
        name = escaped(row["model_type"], "bold" if row["family"] else "")
        does = row["does"] or escaped(_here(row), "yellow")  # only what is isolated has a seam, and something is done
        rows.append((name, row["seam"] or "-", does, row["isolated_in"] or "-"))
    ok = sum(row["state"] == "ok" for row in found)
    summary = f"{ok} of {len(found)} architectures with evidence are isolated. The fourteen families are first."
    if evidence.minor_of(version) not in minors:
        summary = (
            f"No architecture was checked in this release. The newest one with evidence is {minors[-1]}: what was "
            "found there is shown. fa2patch verify NAME shows what fa2patch does with a model here."
        )
    console.print(f"[bold]Transformers {version}[/bold]: {summary}")
    print_table(console, ("model type", "seam", "what is done", "isolated in"), rows)
    console.print(_LEGEND)
    if rest:
        console.print(
            f"Causal LMs of this Transformers without evidence: {', '.join(rest)}. apply looks at them when it is "
            "called; fa2patch verify NAME shows what it does."
        )
    console.print("fa2patch architectures NAME shows everything about one of them.")


def _show_one(row: dict[str, Any], version: str) -> None:
    console, name = new_console(), row["model_type"]
    does = f" ({', '.join(row['does'])})" if row["does"] else ""
    family = ", one of the fourteen families" if row["family"] else ""
    console.print(f"[bold]{name}[/bold]{family}, in Transformers {version}: {escaped(_here(row))}{does}")
    for state, found in row["evidence"].items():
        for what, ranges in found.items():
            console.print(f"  {ranges}: {escaped(_in_words(state, what))}")
    if row["state"] == _NOT_CHECKED:
        console.print(f"fa2patch verify {_bare(name)} shows what fa2patch does with it here.")


def _without_evidence(name: str, version: str) -> str:
    if states := evidence.by_architecture().get(name):
        there = evidence.ranges_of(evidence.minors_with(states))
        return f"{name}: the evidence has it in {there} only, and this is Transformers {version}."
    why = evidence.evidence()["out of scope"].get(name, "")
    because = f" It is not checked{':' if why.startswith('vision') else ', because it'} {why}." if why else ""
    return f"{name}: there is no evidence of it.{because} fa2patch verify {name} shows what fa2patch does with it."
