"""``fa2patch run``: start a command as ``python`` would start it, with fa2patch in it.

The command replaces this process. It and every Python that it starts differ in two things only: a folder in front of
PYTHONPATH, whose :mod:`sitecustomize` waits for Transformers, and an environment variable with the options.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import CannotRun

VARIABLE = "FA2PATCH_RUN"
STARTUP = Path(__file__).parent / "startup"


@dataclass(frozen=True)
class Options:
    """The options of ``fa2patch run``.

    Attributes:
        kernel: As for ``fa2patch.apply``.
        collate: Flatten the training batches that a Trainer's standard padding collators make.
        quiet: Print only what is left alone, and why.
    """

    kernel: str = "auto"
    collate: bool = False
    quiet: bool = False

    @classmethod
    def inherited(cls) -> Options:
        """Read the options that this process was started with."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


def command(arguments: Sequence[str]) -> list[str]:
    """The whole command line for ``SCRIPT args...``, ``-m MODULE args...`` or ``COMMAND args...``.

    Arguments mean what they mean to ``python``. A name that is no file here but an installed command, such as ``trl``,
    is that command.
    """
    first = arguments[0]
    if first not in ("-m", "-") and not os.path.exists(first) and not os.path.dirname(first):
        beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        found = shutil.which(first, path=beside)
        if found is not None:
            return [found, *arguments[1:]]
    return [sys.executable, *_flags(), *arguments]


def _flags() -> list[str]:
    """This interpreter's options (``-X``, ``-W``, ``-O``, ...), as multiprocessing passes them on, and ``-u``."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*flags, *(["-u"] if getattr(sys.stdout, "write_through", False) else [])]


def environment(options: Options, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that the command is started with."""
    others = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(STARTUP)]
    path = os.pathsep.join([str(STARTUP), *others])
    return {**inherited, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(options))}


def start(arguments: Sequence[str], options: Options) -> None:
    """Replace this process with the command. This function does not return.

    Raises:
        CannotRun: This Python ignores PYTHONPATH or ``site``.
        UnknownKernel, KernelUnavailable: The requested kernel does not exist or cannot run here.
    """
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
