"""``fa2patch run``: start somebody's command with fa2patch in it, exactly as ``python`` would have started it.

The command takes this process's place. What it, and every Python that it starts, has of us is one folder in front of
PYTHONPATH (:mod:`sitecustomize` there waits for Transformers) and the options in a variable.
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

from ..errors import Fa2PatchError

VARIABLE = "FA2PATCH_RUN"
STARTUP = Path(__file__).parent / "startup"


class CannotRun(Fa2PatchError):
    """This Python keeps out what ``fa2patch run`` would bring in."""


@dataclass(frozen=True)
class Options:
    """What ``fa2patch run`` was asked for.

    Attributes:
        kernel: as for ``fa2patch.apply``.
        collate: flatten what a Trainer's standard padding collators give to its training.
        quiet: say what is left alone, and why, and nothing else.
    """

    kernel: str = "auto"
    collate: bool = False
    quiet: bool = False

    @classmethod
    def inherited(cls) -> Options:
        """Those that this process was started with."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))


def command(arguments: Sequence[str]) -> list[str]:
    """The whole command line of ``SCRIPT args...``, ``-m MODULE args...``, or a command's name and its arguments.

    As ``python`` takes them; what is no file here, but an installed command (``trl``), is that command.
    """
    first = arguments[0]
    if first not in ("-m", "-") and not os.path.exists(first) and not os.path.dirname(first):
        beside = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
        found = shutil.which(first, path=beside)
        if found is not None:
            return [found, *arguments[1:]]
    return [sys.executable, *_flags(), *arguments]


def _flags() -> list[str]:
    """This interpreter's own options (``-X``, ``-W``, ``-O``, ...), as multiprocessing hands them on; and ``-u``."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [*flags, *(["-u"] if getattr(sys.stdout, "write_through", False) else [])]


def environment(options: Options, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that the command is started with."""
    others = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(STARTUP)]
    path = os.pathsep.join([str(STARTUP), *others])
    return {**inherited, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(options))}


def start(arguments: Sequence[str], options: Options) -> None:
    """Become that command. Does not return.

    Raises:
        CannotRun: this Python ignores PYTHONPATH, or ``site``.
        UnknownKernel, KernelUnavailable.
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
    if os.name == "nt":  # where exec starts another process and ends this one, before that is done
        sys.exit(subprocess.run(line, env=variables).returncode)
    os.execve(line[0], line, variables)
