"""``fa2patch architectures``: the models of the installed Transformers that fa2patch isolates, and those it refuses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import click

from .. import evidence
from .models import MASKED, did_you_mean, model_type_of, model_types
from .options import as_json_option
from .output import escaped, new_console, new_table, print_json

_QUIRKS = {"adjust": "options adjusted", "queries": "queries scaled", "refuse": "some configs refused"}
NOT_CHECKED = "not checked"
"""The state of every architecture in a version without evidence."""

LEGEND = (
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

    found, rest, name = list(architecture_rows(transformers.__version__)), [], None
    if model is None:
        rest = others([row["model_type"] for row in found])
    else:
        name = _one(model)
        found = [row for row in found if row["model_type"].partition(":")[0] == name.partition(":")[0]]
    if as_json:
        print_json({"transformers": transformers.__version__, "architectures": found, "without_evidence": rest})
    elif name is None:
        _show_all(found, rest, transformers.__version__)
    elif found:
        for row in found:
            _show_one(row, transformers.__version__)
    else:
        click.echo(_without_evidence(name, transformers.__version__))


def architecture_rows(version: str) -> Iterator[dict[str, Any]]:
    """One dict for each architecture of a Transformers version that there is evidence of.

    In a version without evidence every state is ``not checked``, and the reason says what the newest version that was
    checked had.

    Returns:
        Dicts with ``model_type``, ``family`` (one of the fourteen), ``state`` (``ok``, ``refused``, ``known failure``,
        ``failing`` or ``not checked``), ``seam``, ``does``, ``isolated_in`` and ``reason``, and ``evidence`` with all
        minors by state and by seam or reason.
    """
    installed, minor = set(model_types()), evidence.minor_of(version)
    checked = minor in evidence.minors()
    if not checked:
        minor = evidence.minors()[-1]
    for name, states in evidence.architectures().items():
        state, what = evidence.state_in(minor, states)
        if name.partition(":")[0] not in installed or state == "absent":
            continue
        isolated = [each for each in evidence.minors() if evidence.state_in(each, states)[0] == "ok"]
        if not checked:
            state, what = NOT_CHECKED, f"In {minor}: {_said(state, what)}"
        yield {
            "model_type": name,
            "family": name in evidence.evidence()["families"],
            "state": state,
            "seam": what if state == "ok" else "",
            "does": _does(name, what) if state == "ok" else [],
            "isolated_in": evidence.ranges_of(isolated),
            "reason": "" if state == "ok" else what,
            "evidence": states,
        }


def others(known: list[str]) -> list[str]:
    """The causal LMs of the installed Transformers that are not among these model types, sorted."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    return sorted({*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {*known})


def _does(name: str, seam: str) -> list[str]:
    from ..upstream.architectures import architectures as registry

    parts = list(dict.fromkeys("mixers" if one == "mixer" else "attention" for one in seam.split(" and ")))
    if name.endswith(MASKED):
        parts = [f"{part} both ways" if part == "attention" else part for part in parts]
    row = next((row for row in registry() if row.model_type == name), None)
    return parts + [words for quirk, words in _QUIRKS.items() if getattr(row, quirk, None) is not None]


def _one(given: str) -> str:
    names = [*model_types(), *evidence.architectures()]
    found = model_type_of(given, names)
    if found is None:
        meant = did_you_mean(given, names)
        raise click.BadParameter(f"{given!r} is no model type that is known here.{meant}", param_hint="MODEL")
    return found


def _show_all(found: list[dict[str, Any]], rest: list[str], version: str) -> None:
    console, table = new_console(), new_table("model type", "seam", "what is done", "isolated in")
    for row in found:
        name = f"[bold]{row['model_type']}[/bold]" if row["family"] else row["model_type"]
        if row["state"] == "ok":
            table.add_row(name, row["seam"], ", ".join(row["does"]), row["isolated_in"])
        else:
            table.add_row(name, "-", f"[yellow]{escaped(_state_here(row))}[/yellow]", row["isolated_in"] or "-")
    console.print(f"[bold]Transformers {version}[/bold]: {_summary(found, version)}")
    console.print(table)
    console.print(LEGEND)
    if rest:
        console.print(
            f"Causal LMs of this Transformers without evidence: {', '.join(rest)}. apply looks at them when it is "
            "called; fa2patch verify NAME shows what it does."
        )
    console.print("fa2patch architectures NAME shows everything about one of them.")


def _summary(found: list[dict[str, Any]], version: str) -> str:
    if evidence.minor_of(version) not in evidence.minors():
        return (
            f"No architecture was checked in this release. The newest one with evidence is {evidence.minors()[-1]}: "
            "what was found there is shown. fa2patch verify NAME shows what fa2patch does with a model here."
        )
    ok = sum(row["state"] == "ok" for row in found)
    return f"{ok} of {len(found)} architectures with evidence are isolated. The fourteen families are first."


def _state_here(row: dict[str, Any]) -> str:
    """What is known of an architecture in the installed version."""
    if row["state"] == NOT_CHECKED:
        return f"{NOT_CHECKED} here. {row['reason']}"
    return "isolated" if row["state"] == "ok" else f"{row['state']}: {row['reason']}"


def _said(state: str, what: str) -> str:
    """What the evidence says of an architecture, by its state and the seam or the reason."""
    return f"isolated at the seam {what}" if state == "ok" else f"{state}: {what}"


def _show_one(row: dict[str, Any], version: str) -> None:
    console = new_console()
    does = f" ({', '.join(row['does'])})" if row["does"] else ""
    family, state = ", one of the fourteen families" if row["family"] else "", escaped(_state_here(row))
    console.print(f"[bold]{row['model_type']}[/bold]{family}, in Transformers {version}: {state}{does}")
    for state, found in row["evidence"].items():
        for what, ranges in found.items():
            console.print(f"  {ranges}: {escaped(_said(state, what))}")
    if row["state"] == NOT_CHECKED:
        console.print(f"fa2patch verify {row['model_type'].partition(':')[0]} shows what fa2patch does with it here.")


def _without_evidence(name: str, version: str) -> str:
    states = evidence.architectures().get(name)
    if states:
        there = evidence.ranges_of(evidence.minors_with(states))
        return f"{name}: the evidence has it in {there} only, and this is Transformers {version}."
    why = evidence.evidence()["out of scope"].get(name)
    reason = f": {why}" if str(why).startswith("vision") else f", because it {why}"
    because = f" It is not checked{reason}." if why else ""
    return f"{name}: there is no evidence of it.{because} fa2patch verify {name} shows what fa2patch does with it."
