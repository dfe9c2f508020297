"""Makes a virtual environment for each version with uv: about a second once uv's cache is warm, by hard links."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any, Callable, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent

Item = TypeVar("Item")
Found = TypeVar("Found")

# It stands for the newest release, so that no command needs its number.
NEWEST = "newest"

# The next release, which can be given in place of a number.
MAIN = "main"

MAIN_SOURCE = "https://github.com/huggingface/transformers"

# The newest release with a pre-release of the next torch, from the index that uv's UV_INDEX names.
TORCH_NEXT = "torch-next"

# The file in an environment that says what it was made of. It is written last, when all is installed.
STAMP = "requirements"

# The names of versions to come begin with these, also if pins are added. Both may fail.
NEXT = (MAIN, TORCH_NEXT)


@dataclass(frozen=True)
class Version:
    """One block of versions.toml, which says what an environment is made of."""

    name: str
    transformers: str
    python: str
    torch: str
    pins: tuple[str, ...]  # a pin of torch, Transformers or wrapt replaces the number given here
    wrapt: str = ""  # empty takes the newest
    # they hold in place of what packages ask for, such as a torch that has a build for a CPU
    overrides: tuple[str, ...] = ()
    allowed_to_fail: bool = False  # totals and exit codes then leave the version out
    families: tuple[str, ...] = ()  # empty takes all architectures of the release

    @property
    def requirements(self) -> list[str]:
        numbers = {"torch": self.torch, "transformers": self.transformers.replace(MAIN, ""), "wrapt": self.wrapt}
        pinned = {_package(pin) for pin in self.pins}
        own = [f"{name}=={number}" if number else name for name, number in numbers.items() if name not in pinned]
        return [*own, *self.pins]

    @property
    def stated(self) -> list[str]:
        """What evidence says that its environment was made of."""
        return [f"python{self.python}", *self.requirements, *self._overridden]

    @property
    def _overridden(self) -> list[str]:
        return [f"override {requirement}" for requirement in self.overrides]

    @property
    def stamp(self) -> str:
        # The environment of a version to come expires after a day.
        today = [f"on {date.today()}"] if self.name.startswith(NEXT) else []
        return "\n".join([*self.requirements, *self._overridden, *today])

    def changed(self, pins: Iterable[str] = (), torch: str | None = None, python: str | None = None) -> Version:
        # A pin replaces a pin of the same package.
        pins = tuple(pins)
        named = {_package(pin) for pin in pins}
        other = replace(
            self,
            python=python or self.python,
            torch=torch or self.torch,
            pins=(*(pin for pin in self.pins if _package(pin) not in named), *pins),
        )
        if other == self:
            return self
        told_apart = sha256("\n".join([other.python, *other.requirements, *other._overridden]).encode()).hexdigest()[:8]
        return replace(other, name=f"{self.name}-{told_apart}")


def _package(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def versions() -> dict[str, Version]:
    found = blocks(HERE / "versions.toml", "version")
    return {name: Version(name, **{"transformers": name, **block}) for name, block in found.items()}


def blocks(file: Path, kind: str) -> dict[str, dict[str, Any]]:
    read = tomllib.loads(file.read_text(encoding="utf-8"))
    found = {name: {**read["defaults"], **block} for name, block in read[kind].items()}
    lists = ("pins", "overrides")
    return {name: {k: tuple(v) if k in lists else v for k, v in block.items()} for name, block in found.items()}


def releases() -> list[Version]:
    # The oldest comes first. The last is the newest release everywhere.
    return [block for block in versions().values() if block.name == block.transformers != MAIN]


def newest() -> Version:
    return releases()[-1]


def version(name: str) -> Version:
    # A minor such as "4.44" takes its block. Another release takes the settings of its minor's block, else those of the
    # newest release. "main" is git's main if it can be reached, else the newest release or pre-release.
    known = versions()
    if name == NEWEST:
        return newest()
    if name in known:
        return known[name]
    ours = releases()
    if name == MAIN:
        return replace(ours[-1], name=MAIN, transformers=MAIN, allowed_to_fail=True)
    if name == TORCH_NEXT:
        major, minor = map(int, ours[-1].torch.split(".")[:2])
        after = f"torch>={major}.{minor + 1}.0.dev0"  # a pre-release in the bound lets uv take pre-releases
        return replace(ours[-1], name=TORCH_NEXT, pins=(*ours[-1].pins, after), allowed_to_fail=True)
    for block in ours:
        if block.transformers.split(".")[:2] == name.split(".")[:2]:
            return block if name.count(".") == 1 else replace(block, name=name, transformers=name)
    return replace(ours[-1], name=name, transformers=name)


def make(wanted: Version, folder: Path) -> Path:
    home = folder / wanted.name
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if _is_made(wanted, home):
        return python
    from filelock import FileLock  # it comes with torch. Versions are also listed with a Python that has no packages

    folder.mkdir(parents=True, exist_ok=True)
    # Threads and processes that share the folder make environments one after the other: none removes what another one
    # is making, and none writes the same files of uv's cache as another.
    with FileLock(folder / ".lock"):
        if not _is_made(wanted, home):  # another may have made it in the meantime
            _make(wanted, home, python)
    return python


def _is_made(wanted: Version, home: Path) -> bool:
    stamp, settings = home / STAMP, home / "pyvenv.cfg"
    if not (stamp.exists() and stamp.read_text() == wanted.stamp and settings.exists()):
        return False
    python = re.search(r"^version(?:_info)? *= *(\d+\.\d+)", settings.read_text(), re.M)
    return python is not None and python[1] == wanted.python


def _make(wanted: Version, home: Path, python: Path) -> None:
    _uv("venv", "--clear", "--python", interpreter(wanted.python), str(home))
    requirements = [_next() if requirement == "transformers" else requirement for requirement in wanted.requirements]
    overrides = home / "overrides.txt"
    overrides.write_text("\n".join(wanted.overrides))
    _uv("pip", "install", "--python", str(python), "--override", str(overrides), *_find_links(), *requirements)
    (home / STAMP).write_text(wanted.stamp)


def install(folder: Path, requirement: str) -> None:
    # Without what the package requires: only its sources are read.
    _uv("pip", "install", "--python", sys.executable, "--no-deps", "--target", str(folder), *_find_links(), requirement)


def variables(packages: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # an environment's second process starts in half the time if the first one may keep its bytecode
    return {**inherited, **more, "PYTHONPATH": str(packages), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def only_our_packages() -> Iterator[Path]:
    # Processes in an environment always import this package as compat_matrix, also if it is installed as
    # fa2patch.compat_matrix. So they can import it before fa2patch, as the stand-in for flash-attn must be.
    spec = importlib.util.find_spec("fa2patch")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("looked for the package fa2patch, found none: reinstall fa2patch")
    homes = {"fa2patch": Path(next(iter(spec.submodule_search_locations))), "compat_matrix": HERE}
    with tempfile.TemporaryDirectory(prefix="fa2patch-") as folder:
        for name, home in homes.items():
            link = Path(folder) / name
            try:
                link.symlink_to(home, target_is_directory=True)
            except OSError:  # symbolic links need a privilege on Windows
                shutil.copytree(home, link, ignore=shutil.ignore_patterns("__pycache__", "evidence"))
        yield Path(folder)


def _next() -> str:
    if _output(["git", "ls-remote", MAIN_SOURCE, MAIN]):
        return f"transformers @ git+{MAIN_SOURCE}@{MAIN}"
    return "transformers>=5.0.0.dev0"  # a pre-release in the bound lets uv take pre-releases


@functools.cache
def interpreter(python: str) -> str:
    candidates = [shutil.which(f"python{python}")]
    candidates += map(str, sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python")))
    for candidate in candidates:
        if candidate and _output([candidate, "-c", "print('%d.%d' % __import__('sys').version_info[:2])"]) == python:
            return candidate
    return python  # uv then downloads it


def printed(module: str, *arguments: str, python: Path | str = sys.executable, packages: Path | None = None) -> str:
    # packages: of only_our_packages; None takes those of this process
    command, settings = [str(python), "-m", module, *arguments], variables(packages) if packages else None
    done = subprocess.run(command, cwd=packages, capture_output=True, text=True, env=settings)
    if done.returncode:
        raise RuntimeError(done.stderr[-1500:])
    return done.stdout


def done(
    work: Callable[[Item], Found], items: Iterable[Item], at_a_time: int
) -> Iterator[tuple[Item, Found | Exception]]:
    # Versions are checked in threads. An error comes in the place of what was found.
    with ThreadPoolExecutor(max(1, at_a_time)) as pool:
        started = {pool.submit(work, item): item for item in items}
        for future in as_completed(started):
            error = future.exception()
            yield started[future], error if isinstance(error, Exception) else future.result()


def _find_links() -> list[str]:
    # uv ignores pip's configuration.
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    links = os.environ.get("PIP_FIND_LINKS") or _output(asked)
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
        raise SystemExit(
            "environments are made with uv, which was not found: pip install uv, or the extra that has it, "
            "pip install 'fa2patch[cli]'"
        )
    done = subprocess.run([uv, *arguments], capture_output=True, text=True)
    if done.returncode and "client cache" in done.stderr:
        # seen once with uv 0.13.9: a temporary file of its cache was gone before uv had renamed it
        done = subprocess.run([uv, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(_why(done.stderr) or f"uv {' '.join(arguments[:2])} failed:\n{done.stderr[-2000:]}")


def _why(said: str) -> str:
    """The reason in one sentence if uv found no release of this number; else empty."""
    missing = re.search(r"no version of ([\w.-]+==[\w.+!-]+)", " ".join(said.split()))
    return f"the package index has no {missing[1]}. Ask for a release that was published" if missing else ""
