"""Checks a user's own models in several versions, with fa2patch and with Transformers alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from .. import environments, results, run
from ..cells import ABSENT, Cell, grouped
from .models import BadConfig, find, is_file, read


@dataclass(frozen=True)
class Model:
    """A model to check.

    Attributes:
        name: The name that reports show.
        architecture: What the check is told: a model type, or the path of a config.json.
        kind: The ``model_type``.
    """

    name: str
    architecture: str
    kind: str


@dataclass(frozen=True)
class Row:
    """One model in one version: its cell, whose state is ``error`` if nothing could be checked, and notes about it."""

    model: Model
    version: environments.Version
    cell: Cell
    notes: tuple[str, ...] = ()

    def is_bad(self, allow_refused: bool) -> bool:
        """Whether the row makes the command fail."""
        return self.cell.state in ("fail", "error", "xfail") or (self.cell.state == "refused" and not allow_refused)


def model(given: str) -> Model:
    """Return the model for an argument: a config.json, a folder with one, or an architecture's name.

    Raises:
        BadConfig: The path has no config.
    """
    path = Path(given)
    if not (is_file(given) or path.exists() or os.sep in given or "/" in given):
        return Model(given, given, given)
    file = find(path).resolve()
    kind = str(read(file)["model_type"])
    if not is_file(file.name):
        raise BadConfig(f"{file}: looked for a file that ends in .json, found {file.name}. Rename it.")
    return Model(file.parent.name if file.name == "config.json" else file.stem, str(file), kind)


def environments_folder() -> Path:
    """The folder in the user's cache where environments are kept between runs."""
    home = Path.home()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return cache / "fa2patch" / "environments"


def rows(
    models: Sequence[Model],
    versions: Sequence[environments.Version],
    folder: Path,
    jobs: int = 1,
    done: Callable[[environments.Version, list[Row]], None] = lambda version, rows: None,
    doing: Callable[[environments.Version, str], None] = lambda version, what: None,
) -> list[Row]:
    """Check every model in every version.

    Args:
        folder: The folder with the environments.
        jobs: How many versions are checked at a time.
        done: Called with each version that is finished and its rows.
        doing: Called with a version and what is being done for it, before each step, in the version's thread.
    """
    found: dict[str, list[Row]] = {}
    with environments.only_our_packages() as packages, ThreadPoolExecutor(max(1, jobs)) as pool:
        started = {pool.submit(_of_version, models, version, folder, packages, doing): version for version in versions}
        for future in as_completed(started):
            version = started[future]
            found[version.name] = future.result()
            done(version, found[version.name])
    return [row for version in versions for row in found[version.name]]


def _of_version(
    models: Sequence[Model],
    version: environments.Version,
    folder: Path,
    packages: Path,
    doing: Callable[[environments.Version, str], None],
) -> list[Row]:
    try:
        names = (model.architecture for model in models)
        evidence = run.evidence(
            version, folder, packages, "--families", *names, doing=lambda what: doing(version, what)
        )
        cells = results.read_data(evidence, evidence["name"]).cells
    except Exception as error:
        return [Row(model, version, Cell("error", f"{type(error).__name__}: {error}")) for model in models]
    notes = {name: tuple(found.get("notes", ())) for name, found in evidence["architectures"].items()}
    named = ((model, model.architecture) for model in models)
    return [Row(model, version, cells.get(name, ABSENT), notes.get(name, ())) for model, name in named]


def nowhere(rows: Iterable[Row]) -> list[str]:
    """One message, with advice, for each model that none of the versions has."""
    states = grouped((row.model, row.cell.state) for row in rows)
    return [
        f"{model.name}: looked for a causal LM of model type {model.kind!r}, found none in these versions. Ask for "
        "the versions that have it, or check the spelling: it is the config's model_type, such as qwen3_moe."
        for model, found in states.items()
        if {*found} == {"absent"}
    ]
