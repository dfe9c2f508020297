"""Records which functions and files of fa2patch and of the checks this process executes.

Only calls of Python functions are looked at (``sys.settrace`` without a tracer of lines), which costs a few percent.
``sys.setprofile`` would also be called for every call into C and every return, and ``sys.monitoring`` is Python 3.12.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HOME = Path(__file__).parents[2]
_ROOTS = tuple(f"{HOME / package}{os.sep}" for package in ("fa2patch", "compat_matrix"))
_DYNAMO = os.path.join("torch", "_dynamo", "symbolic_convert.py")
_seen: dict[int, CodeType] = {}  # by id, because hashing a code object hashes all that it holds


def record() -> None:
    """Begin to record, in this thread and in every thread that is started from now on."""
    threading.settrace(_called)
    sys.settrace(_called)


def stop() -> None:
    """Stop recording."""
    threading.settrace(None)  # type: ignore[arg-type]
    sys.settrace(None)


def executed() -> dict[str, Any]:
    """Return what was executed since :func:`record`, in this process and before it was forked.

    Returns:
        ``functions``: file, name and first line of each function that was called, or traced by dynamo. ``files``: the
        files that were imported. Files are relative to the folder that holds both packages.
    """
    functions = {
        (code.co_filename, code.co_name, code.co_firstlineno) for code in list(_seen.values())
    }  # it records itself
    imported = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return {
        "functions": sorted((_relative(file), name, line) for file, name, line in functions),
        "files": sorted(_relative(file) for file in imported if file.startswith(_ROOTS)),
    }


def _relative(file: str) -> str:
    return Path(file).relative_to(HOME).as_posix()


def _called(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    if code.co_filename.startswith(_ROOTS):
        _seen[id(code)] = code
    elif code.co_name == "__init__" and code.co_filename.endswith(_DYNAMO):
        traced = frame.f_locals.get("f_code")  # dynamo reads the bytecode of this function instead of calling it
        if isinstance(traced, CodeType) and traced.co_filename.startswith(_ROOTS):
            _seen[id(traced)] = traced
