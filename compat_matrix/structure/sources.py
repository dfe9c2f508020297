"""Read the modules of a package from a folder or from a commit."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


class Unreadable(Exception):
    """A folder, a commit or a file cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Module:
    """One file of a package.

    Attributes:
        path: the path from the package's name on, such as ``fa2patch/kernels/flex.py``.
        name: the import name, such as ``fa2patch.kernels.flex``; for an ``__init__.py`` the name of its folder.
        is_package: whether the file is an ``__init__.py``.
        text: the source.
        tree: the parsed source.
    """

    path: str
    name: str
    is_package: bool
    text: str
    tree: ast.Module

    def place(self, node: ast.AST, name: str) -> str:
        """Return how lists name a definition of this file: file, line and name."""
        return f"{self.path}:{getattr(node, 'lineno', 1)} {name}"


def of_folder(folder: Path) -> list[Module]:
    """Return the modules of a folder as it is now.

    Raises:
        Unreadable: the folder does not exist, has no Python file, or a file cannot be parsed.
    """
    if not folder.is_dir():
        raise Unreadable(f"There is no folder {folder}.")
    contents = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*.py")}
    return _modules(folder, contents, str(folder))


def of_commit(folder: Path, commit: str) -> list[Module]:
    """Return the modules of the same folder as it was in a commit.

    Raises:
        Unreadable: git fails, the folder has no Python file, or a file cannot be parsed.
    """
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
    """Parse one module; raise :class:`Unreadable` if that fails."""
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
    """Return ``package/inner`` for a folder inside a package, so that its absolute imports are recognised."""
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
