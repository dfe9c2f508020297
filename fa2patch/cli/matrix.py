"""``fa2patch matrix``: a user's own models in the Transformers releases that they use."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import click

from .. import evidence
from .loading import RANDOM, STANDS_IN
from .models import cannot, compat, resolve
from .options import out_file
from .output import escaped, new_console, progress_of, show, write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compat_matrix.environments import Version
    from compat_matrix.user_models.matrix import Model, Row


def _version_type(example: str) -> Callable[[str], str]:
    def version(given: str) -> str:
        from packaging.version import InvalidVersion, parse

        try:
            parse(given)
        except InvalidVersion:
            raise click.BadParameter(
                f"looked for a version number such as {example}, found {given!r}. Give numbers, separated by commas "
                "where several may be given."
            ) from None
        return given

    return version


def _releases(given: str) -> list[str]:
    from packaging.version import parse

    environments, oldest = compat("environments"), evidence.minors()[0]
    releases = [release.strip() for release in given.split(",")]
    for release in releases:
        if release in (environments.MAIN, *environments.versions()):
            continue
        if parse(_version_type("4.57.6")(release)) < parse(oldest):
            raise click.BadParameter(
                f"looked for Transformers {oldest} or newer, found {release}, which has no flash attention to patch."
            )
    return releases


def _requirement(given: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(given)
    except InvalidRequirement:
        raise click.BadParameter(
            f"looked for a requirement as pip takes it, such as peft==0.13.2, found {given!r}. One --pins for each."
        ) from None
    return given


_DEFAULT = "Default: what the project checks that release with."


@click.command("matrix")
@click.option("--model", "models", multiple=True, required=True, metavar="MODEL",
              help="A config.json, a folder that holds one, a model type (llama), or a name on the hub (org/name). "
              "Repeatable.")  # fmt: skip
@click.option("--transformers", "releases", type=_releases, required=True, metavar="V,V",
              help="Releases, such as 4.44.2,4.57; or main.")  # fmt: skip
@click.option("--format", "style", type=click.Choice(["table", "markdown", "json"]),
              help="Default: table on a terminal, else markdown.")  # fmt: skip
@click.option("--json", "file", **out_file, help="Write it there as JSON, too.")
@click.option("--pins", type=_requirement, multiple=True, metavar="REQ",
              help='Your stack\'s: "peft==0.13.2". Repeatable.')  # fmt: skip
@click.option("--torch", type=_version_type("2.7.1"), metavar="V", help=_DEFAULT)
@click.option("--python", type=_version_type("3.11"), metavar="X.Y", help=_DEFAULT)
@click.option("--environments", "folder", type=click.Path(file_okay=False, path_type=Path),
              help="Where environments are kept.")  # fmt: skip
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Releases checked at a time.")
@click.option("--allow-refused", is_flag=True, help="A model that fa2patch refuses is no failure.")
def matrix_command(
    models: tuple[str, ...], releases: list[str], style: str | None, file: Path | None, allow_refused: bool, jobs: int,
    folder: Path | None, **stack: Any,
) -> None:  # fmt: skip
    """Check tiny copies of your own models in the Transformers releases that you use.

    Each release gets its own environment, made by uv. For every model in every release, the matrix shows what packed
    rows give with fa2patch and with Transformers alone. Exits with 0 if every cell is ok, with 1 if anything leaks,
    fails or (without --allow-refused) is refused, and with 2 if the arguments are wrong.
    """
    matrix = compat("user_models.matrix")
    versions = [compat("environments").version(release).changed(**stack) for release in releases]
    wanted = [_model(given, versions) for given in models]
    with progress_of([version.name for version in versions]) as progress:

        def done(version: Version, rows: list[Row]) -> None:
            bad = sum(row.is_bad(allow_refused) for row in rows)
            progress(version.name, f"{bad} not ok" if bad else "done", ended=True)

        def doing(version: Version, what: str) -> None:
            progress(version.name, what)

        rows = matrix.rows(wanted, versions, folder or matrix.environments_folder(), jobs, done, doing)
    nowhere, report = matrix.nowhere(rows), compat("user_models.report")
    ok = not nowhere and not any(row.is_bad(allow_refused) for row in rows)
    if file:
        write_file(file, report.as_json(rows, ok) + "\n")
    style = style or ("table" if sys.stdout.isatty() else "markdown")
    if style == "table":
        show(new_console(), [report.table(rows), *map(escaped, report.explanations(rows))])
    else:
        click.echo(report.as_json(rows, ok) if style == "json" else report.markdown(rows))
    for complaint in nowhere:
        click.echo(complaint, err=True)
    sys.exit(0 if ok else 1)


def _model(given: str, versions: Sequence[Version]) -> Model:
    known = evidence.by_architecture()
    found = resolve(given, hint="--model", known=known)
    path = found.name
    if found.kind == "type":
        if path not in known:
            why = evidence.evidence()["out of scope"].get(path)
            raise cannot(
                f"{path}: the matrix does not check this model type{f' ({why})' if why else ''}. Give a config.json "
                f"to check it all the same. fa2patch verify {path} shows what fa2patch does with it here.",
                "--model",
            )
        asked, there = [version.transformers for version in versions], evidence.minors_with(known[path])
        if {*map(evidence.minor_of, asked)} <= {*evidence.minors()} - {*there}:
            raise cannot(
                f"{path}: looked for it in Transformers {', '.join(asked)}, found none. It is in "
                f"{evidence.ranges_of(there)}.",
                "--model",
            )
    elif found.kind == "hub":
        from huggingface_hub import hf_hub_download

        path = str(hf_hub_download(path, "config.json", local_files_only=found.local_only))
    try:
        model: Model = compat("user_models.matrix").model(path)
    except compat("user_models.models").BadConfig as error:
        raise cannot(str(error), "--model") from None
    found.say(RANDOM if found.kind == "type" else f"{STANDS_IN} Its sizes are not tried.")
    return replace(model, name=given) if found.kind == "hub" else model
