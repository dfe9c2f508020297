"""Checks a user's own models in several versions, with fa2patch and with Transformers alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from .. import environments, results, run
from ..cells import ABSENT, Cell, grouped
from .models import BadConfig, find, is_file, read


@dataclass(frozen=True)
class Model:
    name: str  # that reports show
    architecture: str  # what the check is told: a model type, or the path of a config.json
    kind: str  # the model_type


@dataclass(frozen=True)
class Row:
    model: Model
    version: environments.Version
    cell: Cell  # its state is "error" if nothing could be checked
    notes: tuple[str, ...] = ()

    def is_bad(self, allow_refused: bool) -> bool:
        return self.cell.state in ("fail", "error", "xfail") or (self.cell.state == "refused" and not allow_refused)


def model(given: str) -> Model:
    # given: a config.json, a folder with one, or an architecture's name
    path = Path(given)
    if not (is_file(given) or path.exists() or os.sep in given or "/" in given):
        return Model(given, given, given)
    file = find(path).resolve()
    kind = str(read(file)["model_type"])
    if not is_file(file.name):
        raise BadConfig(f"{file}: looked for a file that ends in .json, found {file.name}. Rename it.")
    return Model(file.parent.name if file.name == "config.json" else file.stem, str(file), kind)


def environments_folder() -> Path:
    # Environments are kept here between runs.
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
    folder: Path,  # of the environments
    jobs: int = 1,  # versions at a time
    done: Callable[[environments.Version, list[Row]], None] = lambda version, rows: None,
    # called before each step, in the version's thread
    doing: Callable[[environments.Version, str], None] = lambda version, what: None,
) -> list[Row]:
    found: dict[str, list[Row]] = {}
    options = "--families", *(model.architecture for model in models)
    with environments.only_our_packages() as packages:

        def checked(version: environments.Version) -> list[Row]:
            evidence = run.evidence(version, folder, packages, *options, doing=lambda what: doing(version, what))
            cells = results.read_data(evidence, evidence["name"]).cells
            notes = {name: tuple(cell.get("notes", ())) for name, cell in evidence["architectures"].items()}
            named = ((model, model.architecture) for model in models)
            return [Row(model, version, cells.get(name, ABSENT), notes.get(name, ())) for model, name in named]

        for version, of_version in environments.done(checked, versions, jobs):
            if isinstance(of_version, Exception):
                error = Cell("error", f"{type(of_version).__name__}: {of_version}")
                of_version = [Row(model, version, error) for model in models]
            found[version.name] = of_version
            done(version, of_version)
    return [row for version in versions for row in found[version.name]]


def nowhere(rows: Iterable[Row]) -> list[str]:
    states = grouped((row.model, row.cell.state) for row in rows)
    return [
        f"{model.name}: looked for a causal LM of model type {model.kind!r}, found none in these versions. Ask for "
        "the versions that have it, or check the spelling: it is the config's model_type, such as qwen3_moe."
        for model, found in states.items()
        if {*found} == {"absent"}
    ]
