"""The commit of this clone, the commit that last changed what evidence depends on, and packages of other commits."""

from __future__ import annotations

import ast
import io
import os
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import keys

ROOT = Path(__file__).parents[1]
# This environment variable names the commit of a copy of the files that has no git folder, or an older one.
STATED = "FA2PATCH_COMMIT"

# git's pathspecs of what a cell depends on. The files that are left out are made from the cells. versions.toml and
# xfail.toml are missing, because they say what is expected of a cell, not what is found. Modules that only a user's
# config.json is read with are missing, too.
CODE = (
    "fa2patch",
    "compat_matrix/check",
    "compat_matrix/user_models/models.py",
    "compat_matrix/run.py",
    "compat_matrix/tiny_*.py",
    "compat_matrix/media_families.py",
    ":(exclude)fa2patch/evidence.json",
    ":(exclude)fa2patch/upstream.json",
)

# git's pathspecs that leave out what is measured, and what is made from measurements.
MADE = (
    ":(exclude)compat_matrix/bench/results",
    ":(exclude)compat_matrix/ecosystem/evidence",
    ":(exclude)*.md",
    ":(exclude)*.png",
)


class NoCommit(Exception):
    """git is missing, this folder is no clone, or it has no such commit. The message says which."""


def here(*paths: str) -> dict[str, Any]:
    # "dirty" says whether these paths differ from the commit. None stands for unknown.
    if os.environ.get(STATED):
        return {"commit": os.environ[STATED], "dirty": None}
    try:
        commit = git("log", "-1", "--format=%H", "--", *paths).decode().strip()
        return {"commit": commit or None, "dirty": bool(git("status", "--porcelain", "--", *paths))}
    except NoCommit:
        return {"commit": None, "dirty": None}


def of_code(*further: str) -> dict[str, Any]:
    return here(*CODE, *further, *MADE)


def named(commit: Mapping[str, Any]) -> str:
    changes = {True: " with uncommitted changes", None: ", stated by hand"}.get(commit.get("dirty"), "")
    return f"commit {commit['commit'][:12]}{changes}" if commit.get("commit") else "an unknown commit"


def number(reference: str) -> str:
    return git("rev-parse", "--verify", f"{reference}^{{commit}}").decode().strip()


def changed(commit: str) -> list[str]:
    before = number(commit)
    # compat_matrix/run.py is left out: it merges cells, and nothing that is measured imports it.
    paths = (*CODE, ":(exclude)compat_matrix/run.py")
    lines = git("diff", "--name-status", "--no-renames", before, "HEAD", "--", *paths).decode().splitlines()
    found = (line.split("\t") for line in lines)
    return [file for status, file in found if status != "M" or _code(before, file) != _code("HEAD", file)]


def _code(commit: str, file: str) -> Any:
    held = git("show", f"{commit}:{file}")
    return keys.items_of(ast.parse(held)).items if file.endswith(".py") else held


def export(commit: str, package: str, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(git("archive", "--format=zip", commit, "--", package))) as archive:
        archive.extractall(folder)


def git(*arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except OSError as error:
        raise NoCommit(f"git cannot be started: {error}") from error
    if done.returncode:
        raise NoCommit(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
