"""``fa2patch run``: start a command as ``python`` would start it, with fa2patch in it.

The command replaces this process. It and every Python that it starts differ in three things only: a folder in front of
PYTHONPATH, whose :mod:`sitecustomize` waits for Transformers, and two environment variables, which hold the options and
name this environment. Pythons of other environments inherit them, and :mod:`sitecustomize` does nothing there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import CannotRun

VARIABLE = "FA2PATCH_RUN"
WHERE = "FA2PATCH_RUN_IN"
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True)
class RunOptions:
    kernel: str = "auto"
    collate: bool = False
    quiet: bool = False
    pack: bool = True
    max_tokens: int | None = None
    padded_batches: bool = False

    @classmethod
    def inherited(cls) -> RunOptions:
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


def command(arguments: Sequence[str]) -> list[str]:
    # Arguments mean what they mean to `python`. A name that is no file here may also be an installed command, such as
    # trl.
    first = arguments[0]
    if first == "-m" and len(arguments) == 1:
        raise CannotRun("-m: expected the name of a module behind it, found nothing.")
    if first not in ("-m", "-"):
        if not os.path.exists(first):
            beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
            found = None if os.path.dirname(first) else shutil.which(first, path=beside)
            if found is None:
                raise CannotRun(_no_command(first))
            _check_environment(found)
            return [found, *arguments[1:]]
        _check_script(first)
    # this interpreter's options (-X, -W, -O, ...), as multiprocessing passes them on, and -u
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *(["-u"] if getattr(sys.stdout, "write_through", False) else []), *arguments]


def _no_command(given: str) -> str:
    folder, name = os.path.split(given)
    here = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    installed = [] if folder else os.listdir(os.path.dirname(sys.executable))
    close = get_close_matches(name, [file for file in here if file.endswith(".py")] + installed, n=1)
    meant = f" Did you mean {os.path.join(folder, close[0])}?" if close else ""
    either = "" if folder else ", and no command of this environment or on the PATH"
    return (
        f"{given!r}: expected a script, -m MODULE or an installed command, found no file of this name{either}.{meant}"
    )


def _check_script(path: str) -> None:
    # JSON is Python, too, and would be run without a word.
    if not os.path.isfile(path) or path.endswith((".py", ".pyw", ".pyc")) or zipfile.is_zipfile(path):
        return
    with open(path, "rb") as file:
        if "." in os.path.basename(path) and file.read(2) != b"#!":
            raise CannotRun(
                f"{path}: expected a script, found a file that is neither called .py nor begins with #!. If a script "
                f"or a command reads it, name that first: fa2patch run SCRIPT {path}."
            )


def _check_environment(script: str) -> None:
    # A command's first line may name a Python of another environment, in which nothing would be patched.
    with open(script, "rb") as file:
        line = os.fsdecode(file.readline(1024)).strip()
    python = line[2:].strip().strip('"')
    if not line.startswith("#!") or not os.path.basename(python).startswith("python"):
        return
    own, other = (os.path.realpath(os.path.dirname(path)) for path in (sys.executable, python))
    if own != other:
        raise CannotRun(
            f"fa2patch run patches models in its own environment, {sys.prefix}, and {script} belongs to another one: "
            f"it starts {python}. Install fa2patch there too and use that fa2patch run, or call fa2patch.apply(model)."
        )


def environment(options: RunOptions, inherited: Mapping[str, str]) -> dict[str, str]:
    others = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(STARTUP)]
    path = os.pathsep.join([str(STARTUP), *others])
    here = os.pathsep.join([str(sys.implementation.cache_tag), os.path.realpath(sys.prefix)])
    return {**inherited, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(options)), WHERE: here}


def start(arguments: Sequence[str], options: RunOptions) -> None:
    # The command replaces this process, so this function does not return.
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CannotRun(
            "fa2patch run reaches the script's Python through PYTHONPATH and site, and this one was started with -I, "
            "-E or -S, which keep them out. Leave that option away, or call fa2patch.apply(model) in the script."
        )
    if options.kernel != "auto":
        from ..kernels import check_name

        check_name(options.kernel)
    line, variables = command(arguments), environment(options, os.environ)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if os.name == "nt":  # Windows' exec starts another process and ends this one before the other is done
        sys.exit(subprocess.run(line, env=variables).returncode)
    os.execve(line[0], line, variables)


def say(what: str) -> None:
    # With several processes, only rank 0 prints.
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    if rank not in ("0", "") or sys.stderr is None:
        return
    bars: Any = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is None:
        print(f"fa2patch: {what}", file=sys.stderr, flush=True)
    else:  # else the line goes on where a progress bar ends
        bars.write(f"fa2patch: {what}", file=sys.stderr)
        sys.stderr.flush()
