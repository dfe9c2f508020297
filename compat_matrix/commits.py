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

from . import items

ROOT = Path(__file__).parents[1]
STATED = "FA2PATCH_COMMIT"
"""The environment variable that names the commit of a copy of the files without git's folder, or with an older one."""

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
"""What a cell of the matrix depends on, as pathspecs of git's. The files that are left out are made from the cells.

versions.toml and xfail.toml are not among them: they say what is expected of a cell, not what is found. Neither are the
modules that only a user's config.json is read with.
"""

MADE = (
    ":(exclude)compat_matrix/bench/results",
    ":(exclude)compat_matrix/ecosystem/evidence",
    ":(exclude)*.md",
    ":(exclude)*.png",
)
"""What is made by measuring and from what was measured, as pathspecs that leave it out."""


class NoCommit(Exception):
    """git is missing, this folder is no clone, or it has no such commit. The message says which."""


def here(*paths: str) -> dict[str, Any]:
    """Return ``commit``, the one that last changed these paths of git's, and ``dirty``, whether they differ from it.

    If :data:`STATED` says a commit, it is that one, and ``dirty`` is None, which means unknown. Without it and without
    git's folder, both are None.
    """
    if os.environ.get(STATED):
        return {"commit": os.environ[STATED], "dirty": None}
    try:
        commit = git("log", "-1", "--format=%H", "--", *paths).decode().strip()
        return {"commit": commit or None, "dirty": bool(git("status", "--porcelain", "--", *paths))}
    except NoCommit:
        return {"commit": None, "dirty": None}


def of_code(*further: str) -> dict[str, Any]:
    """Return :func:`here` for :data:`CODE` and further paths. Later commits of evidence or documents change nothing."""
    return here(*CODE, *further, *MADE)


def named(commit: Mapping[str, Any]) -> str:
    """Return what :func:`here` returned in words, such as ``commit 1a2b3c4d5e6f with uncommitted changes``."""
    changes = {True: " with uncommitted changes", None: ", stated by hand"}.get(commit.get("dirty"), "")
    return f"commit {commit['commit'][:12]}{changes}" if commit.get("commit") else "an unknown commit"


def number(reference: str) -> str:
    """Return the full number of a commit, which a branch, a tag or any other name of git's may stand for.

    Raises:
        NoCommit: there is no such commit.
    """
    return git("rev-parse", "--verify", f"{reference}^{{commit}}").decode().strip()


def changed(commit: str) -> list[str]:
    """Return the files of :data:`CODE` whose code is another one in this clone's commit: not only texts or comments.

    ``compat_matrix/run.py`` is left out: it merges cells, and nothing that is measured imports it.

    Raises:
        NoCommit: there is no such commit.
    """
    before = number(commit)
    paths = (*CODE, ":(exclude)compat_matrix/run.py")
    lines = git("diff", "--name-status", "--no-renames", before, "HEAD", "--", *paths).decode().splitlines()
    found = (line.split("\t") for line in lines)
    return [file for status, file in found if status != "M" or _code(before, file) != _code("HEAD", file)]


def _code(commit: str, file: str) -> Any:
    """What a file of a commit does: the items of its code, or its bytes if it is no Python."""
    held = git("show", f"{commit}:{file}")
    return items.read(ast.parse(held)).items if file.endswith(".py") else held


def export(commit: str, package: str, folder: Path) -> None:
    """Write a package of this clone, as it was in a commit, into a folder.

    Raises:
        NoCommit: there is no such commit, or it has no such package.
    """
    with zipfile.ZipFile(io.BytesIO(git("archive", "--format=zip", commit, "--", package))) as archive:
        archive.extractall(folder)


def git(*arguments: str) -> bytes:
    """Return what git prints of this clone; NoCommit if it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    except OSError as error:
        raise NoCommit(f"git cannot be started: {error}") from error
    if done.returncode:
        raise NoCommit(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
