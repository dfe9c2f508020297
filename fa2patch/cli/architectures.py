"""``fa2patch architectures``: the models of the installed Transformers that fa2patch isolates, and those it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from .. import evidence
from ..upstream import architectures as registry
from ..upstream.transformers_names import MODEL_CLASSES, imported
from .models import MASKED, config_of, model_types, resolve
from .options import as_json_option
from .output import Shown, Table, escaped, print_found

_QUIRKS = {"adjust": "options adjusted", "queries": "queries scaled", "refuse": "some configs refused"}
_NOT_CHECKED = "not checked"  # the state of every architecture in a version without evidence

_LEGEND = (
    "attention: every layer gets the documents' boundaries at its seam. mixers: layers that carry state along the row "
    "run document by document, or get the boundaries. Isolated in: the minors whose evidence shows it. "
    "llava:picture: with pictures in its rows. Encoder-decoders are packed as pairs and not listed. Models of pictures "
    "or sound alone are refused."
)


@click.command("architectures")
@click.argument("model", required=False)
@as_json_option
def architectures_command(model: str | None, as_json: bool) -> None:
    """Show which models of the installed Transformers fa2patch isolates, and which it refuses.

    The list comes from the evidence of the compatibility matrix; the fourteen families are first. With MODEL, which is
    named as in fa2patch status, everything that is known about its model type is shown, for all versions.
    """
    import transformers

    version = transformers.__version__
    found, rest = list(_rows(version)), []
    if model is None:
        auto: Any = imported(MODEL_CLASSES)
        rest = sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {row["model_type"] for row in found})
        shown = _all_of_them(found, rest, version)
    else:
        asked = resolve(model, known=evidence.by_architecture())
        name = asked.name if asked.kind == "type" else asked.model_type or config_of(asked).model_type
        found = [row for row in found if _bare(row["model_type"]) == _bare(name)]
        shown = _one_of_them(found, name, version)
    print_found({"transformers": version, "architectures": found, "without_evidence": rest}, as_json, shown)


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


def _all_of_them(found: list[dict[str, Any]], rest: list[str], version: str) -> Shown:
    minors, rows = evidence.minors(), []
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
    yield f"[bold]Transformers {version}[/bold]: {summary}"
    yield Table(("model type", "seam", "what is done", "isolated in"), rows)
    yield _LEGEND
    if rest:
        yield (
            f"Causal LMs of this Transformers without evidence: {', '.join(rest)}. apply looks at them when it is "
            "called; fa2patch verify NAME shows what it does."
        )
    yield "fa2patch architectures NAME shows everything about one of them."


def _one_of_them(found: list[dict[str, Any]], name: str, version: str) -> Shown:
    for row in found:
        does = f" ({', '.join(row['does'])})" if row["does"] else ""
        family = ", one of the fourteen families" if row["family"] else ""
        yield f"[bold]{row['model_type']}[/bold]{family}, in Transformers {version}: {escaped(_here(row))}{does}"
        for state, ranges_of in row["evidence"].items():
            for what, ranges in ranges_of.items():
                yield f"  {ranges}: {escaped(_in_words(state, what))}"
        if row["state"] == _NOT_CHECKED:
            yield f"fa2patch verify {_bare(name)} shows what fa2patch does with it here."
    if found:
        return
    if states := evidence.by_architecture().get(name):
        there = evidence.ranges_of(evidence.minors_with(states))
        yield f"{name}: the evidence has it in {there} only, and this is Transformers {version}."
        return
    why = evidence.evidence()["out of scope"].get(name, "")
    because = f" It is not checked{':' if why.startswith('vision') else ', because it'} {why}." if why else ""
    yield f"{name}: there is no evidence of it.{because} fa2patch verify {name} shows what fa2patch does with it."
