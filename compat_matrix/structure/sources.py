"""The modules of a package, from a folder or from a commit."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class Unreadable(Exception):
    """A folder, a commit or a file that cannot be measured, with the reason."""


@dataclass(frozen=True)
class Module:
    """One file of a package.

    Attributes:
        path: with the package's name in front, as ``fa2patch/kernels/flex.py``.
        name: as it is imported, as ``fa2patch.kernels.flex``; a folder's name for its ``__init__.py``.
        is_package: whether the file is an ``__init__.py``.
    """

    path: str
    name: str
    is_package: bool
    text: str
    tree: ast.Module

    def place(self, node: ast.AST, name: str) -> str:
        """A definition of this file as it is named in lists: file, line and name."""
        return f"{self.path}:{getattr(node, 'lineno', 1)} {name}"


def of_folder(folder: Path) -> list[Module]:
    """The modules of a folder as it is now."""
    if not folder.is_dir():
        raise Unreadable(f"There is no folder {folder}.")
    contents = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.py")}
    return _modules(folder, contents, str(folder))


def of_commit(folder: Path, commit: str) -> list[Module]:
    """The modules of the same folder as it was in a commit."""
    folder = folder.resolve()
    _git(folder, f"There is no commit {commit}", "rev-parse", "--verify", f"{commit}^{{commit}}")
    archive = _git(folder, f"{commit} has no folder {folder.name}", "archive", commit, "--", folder.name)
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            content = members.extractfile(member) if member.isfile() and member.name.endswith(".py") else None
            if content is not None:
                contents[PurePosixPath(member.name).relative_to(folder.name).as_posix()] = content.read()
    return _modules(folder, contents, f"{folder.name} of {commit}")


def module(path: str, content: bytes) -> Module:
    """One module, parsed."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = io.TextIOWrapper(io.BytesIO(content), encoding).read()
        tree = ast.parse(text, path)
    except (SyntaxError, ValueError) as error:
        raise Unreadable(f"{path} is not Python that this interpreter reads: {error}") from error
    parts = PurePosixPath(path).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(path, ".".join(parts[:-1] if is_package else parts), is_package, text, tree)


def _modules(folder: Path, contents: dict[str, bytes], where: str) -> list[Module]:
    if not contents:
        raise Unreadable(f"There is no Python file in {where}.")
    prefix = _import_path(folder.resolve())
    return [module(f"{prefix}/{path}", contents[path]) for path in sorted(contents)]


def _import_path(folder: Path) -> str:
    """``package/inner`` for a folder in a package, so that absolute imports of it are recognised."""
    names = [folder.name]
    while (folder.parent / "__init__.py").exists():
        folder = folder.parent
        names.insert(0, folder.name)
    return "/".join(names)


def _git(folder: Path, failure: str, *arguments: str) -> bytes:
    try:
        done = subprocess.run(["git", "-C", str(folder.parent), *arguments], capture_output=True)
    except OSError as error:
        raise Unreadable(f"git, which reads commits, cannot be started: {error}") from error
    if done.returncode:
        raise Unreadable(f"{failure}; git says: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
