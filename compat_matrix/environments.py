"""An environment of its own for each version, made by uv; once uv's cache is warm, in about a second (hard links)."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Version:
    """One block of versions.toml."""

    name: str
    transformers: str
    python: str
    torch: str
    pins: tuple[str, ...]

    @property
    def requirements(self) -> list[str]:
        return [f"torch=={self.torch}", f"transformers=={self.transformers}", "wrapt", *self.pins]


def versions() -> dict[str, Version]:
    """Every block, by name, in the file's order."""
    file = tomllib.loads((HERE / "versions.toml").read_text())
    blocks = {}
    for name, block in file["version"].items():
        settings = {"transformers": name, **file["defaults"], **block}
        blocks[name] = Version(
            name, settings["transformers"], settings["python"], settings["torch"], tuple(settings["pins"])
        )
    return blocks


def version(name: str) -> Version:
    """The block of this name; for a release that has none, the defaults."""
    known = versions()
    if name in known:
        return known[name]
    newest = list(known.values())[-2]
    return Version(name, name, newest.python, newest.torch, newest.pins)


def make(wanted: Version, folder: Path) -> Path:
    """The Python of this version's environment, made if it is not there, or not as it should be."""
    home = folder / wanted.name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = home / "requirements"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted.requirements):
        return python
    _uv("venv", "--clear", "--python", interpreter(wanted.python), str(home))
    _uv("pip", "install", "--python", str(python), *_find_links(), *wanted.requirements)
    stamp.write_text("\n".join(wanted.requirements))
    return python


@functools.cache
def interpreter(python: str) -> str:
    """A Python of this version on this machine (also one pyenv keeps off the PATH); else its number, for uv to get."""
    candidates = [shutil.which(f"python{python}")]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python")))
    for candidate in candidates:
        if candidate and _output([candidate, "-c", "print('%d.%d' % __import__('sys').version_info[:2])"]) == python:
            return candidate
    return python


def _find_links() -> list[str]:
    """uv does not look where pip is configured to look for wheels (a local torch build, say) unless told."""
    links = os.environ.get("PIP_FIND_LINKS") or _output(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    )
    return [argument for link in links.split() for argument in ("--find-links", link)]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise SystemExit("compat_matrix makes its environments with uv, which was not found: pip install uv")
    done = subprocess.run([uv, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"uv {' '.join(arguments[:2])} failed:\n{done.stderr[-2000:]}")
