"""``fa2patch matrix``: a user's own models in the Transformers releases that they use."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .compat import compat
from .output import new_console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compat_matrix.environments import Version
    from compat_matrix.user_models.matrix import Model, Row

FORMATS = ("table", "markdown", "json")


@click.command()
@click.option(
    "--model", "models", multiple=True, required=True, metavar="CONFIG",
    help="A Hugging Face config.json, a folder that holds one, or an architecture's name (llama). Repeatable.",
)  # fmt: skip
@click.option(
    "--transformers", "releases", required=True, metavar="V,V", help="Releases, such as 4.44.2,4.57; or main."
)
@click.option("--format", "style", type=click.Choice(FORMATS), help="Default: table on a terminal, else markdown.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write it there as JSON, too.")
@click.option("--pins", multiple=True, metavar="REQ", help='Your stack\'s: "peft==0.13.2". Repeatable.')
@click.option("--torch", metavar="V", help="Default: what the project checks that release with.")
@click.option("--python", metavar="X.Y", help="Default: what the project checks that release with.")
@click.option("--environments", type=click.Path(file_okay=False, path_type=Path), help="Where environments are kept.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Releases checked at a time.")
@click.option("--allow-refused", is_flag=True, help="A model that fa2patch refuses is no failure.")
def matrix(
    models: tuple[str, ...],
    releases: str,
    style: str | None,
    file: Path | None,
    pins: tuple[str, ...],
    torch: str | None,
    python: str | None,
    environments: Path | None,
    jobs: int,
    allow_refused: bool,
) -> None:
    """Check tiny copies of your own models in the Transformers releases that you use.

    Each release gets its own environment, made by uv. For every model in every release, the matrix shows what packed
    rows give with fa2patch and with Transformers alone. Exits with 0 if every cell is ok, with 1 if anything leaks,
    fails or (without --allow-refused) is refused, and with 2 if the arguments are wrong.
    """
    matrix, report = compat("user_models.matrix"), compat("user_models.report")
    wanted_models = [_model(given) for given in models]
    versions = [_version(release.strip(), pins, torch, python) for release in releases.split(",")]

    def done(version: Version, rows: list[Row]) -> None:
        bad = sum(row.is_bad(allow_refused) for row in rows)
        click.echo(f"{version.name}: {f'{bad} not ok' if bad else 'done'}", err=True)

    folder = environments or matrix.environments_folder()
    rows = matrix.rows(wanted_models, versions, folder, jobs, done)
    nowhere = matrix.nowhere(rows)
    ok = not nowhere and not any(row.is_bad(allow_refused) for row in rows)
    if file:
        file.write_text(report.as_json(rows, ok) + "\n", encoding="utf-8")
    _show(rows, style or ("table" if sys.stdout.isatty() else "markdown"), ok)
    for complaint in nowhere:
        click.echo(complaint, err=True)
    sys.exit(0 if ok else 1)


def _model(given: str) -> Model:
    try:
        found: Model = compat("user_models.matrix").model(given)
        return found
    except compat("user_models.models").BadConfig as error:
        raise click.BadParameter(str(error), param_hint="--model") from None


def _version(release: str, pins: tuple[str, ...], torch: str | None, python: str | None) -> Version:
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.version import InvalidVersion, parse

    environments = compat("environments")
    for given, hint in ((release, "--transformers"), (torch, "--torch"), (python, "--python")):
        known = (environments.MAIN, *environments.versions()) if hint == "--transformers" else ()
        if given is None or given in known:
            continue
        try:
            parse(given)
        except InvalidVersion:
            raise click.BadParameter(
                f"looked for a version number such as {'3.11' if hint == '--python' else '4.57.6'}, found {given!r}. "
                "Give numbers, separated by commas where several may be given.",
                param_hint=hint,
            ) from None
    for pin in pins:
        try:
            Requirement(pin)
        except InvalidRequirement:
            raise click.BadParameter(
                f"looked for a requirement as pip takes it, such as peft==0.13.2, found {pin!r}. One --pins for each.",
                param_hint="--pins",
            ) from None
    found: Version = environments.version(release).changed(pins, torch, python)
    return found


def _show(rows: Sequence[Row], style: str, ok: bool) -> None:
    report = compat("user_models.report")
    if style == "json":
        click.echo(report.as_json(rows, ok))
    elif style == "markdown":
        click.echo(report.markdown(rows))
    else:
        console = new_console()
        console.print(report.table(rows))
        for line in report.explanations(rows):
            console.print(line, markup=False)
