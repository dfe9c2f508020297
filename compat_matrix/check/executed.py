"""Records which functions and files of fa2patch and of the checks this process executes.

CPython before 3.12 counts in each code object how often it began to run, until it is optimised. To look whether that
counter moved costs nothing. CPython from 3.12 on tells when a code object begins to run, and no more once it was told.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

import wrapt

HOME = Path(__file__).parents[2]
_ROOTS = tuple(f"{HOME / package}{os.sep}" for package in ("fa2patch", "compat_matrix"))
_TOOL = 4  # one of the numbers of tools that debuggers, coverage and profilers do not take
_DYNAMO = "torch._dynamo.symbolic_convert"
# the module level of each file that was imported; its constants hold the code of its functions
_loaded: list[CodeType] = []
# the code that began to run, from 3.12 on, or that dynamo saw, by id: hashing a code object hashes all that it holds
_seen: dict[int, CodeType] = {}


def record() -> None:
    # Files that are imported later are recorded whole.
    get_code = SourceFileLoader.get_code

    def kept(loader: SourceFileLoader, name: str) -> CodeType | None:
        code = get_code(loader, name)
        if code is not None and _is_ours(code):
            _loaded.append(code)
        return code

    SourceFileLoader.get_code = kept  # type: ignore[method-assign]
    wrapt.register_post_import_hook(_watch_dynamo, _DYNAMO)
    if COUNTER is None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        monitoring.use_tool_id(_TOOL, __name__)
        monitoring.register_callback(_TOOL, monitoring.events.PY_START, _begun)
        monitoring.set_events(_TOOL, monitoring.events.PY_START)


def executed() -> dict[str, Any]:
    # What ran before a fork counts, too. Functions are given by file, name and first line. Files are relative to the
    # folder that holds both packages.
    files = ((module, getattr(module, "__file__", None) or "") for module in list(sys.modules.values()))
    imported = [module for module, file in files if file.startswith(_ROOTS)]
    before = [getattr(value, "__code__", None) for module in imported for value in vars(module).values()]
    own = [code for code in before if isinstance(code, CodeType) and _is_ours(code)]  # loaded before `record`
    ran = [code for code in _within([*_loaded, *own]) if COUNTER is not None and _count(code) != COUNTER[1]]
    functions = {(code.co_filename, code.co_name, code.co_firstlineno) for code in [*ran, *_seen.values()]}
    return {
        "functions": sorted((_relative(file), name, line) for file, name, line in functions if name != "<module>"),
        "files": sorted({_relative(str(module.__file__)) for module in imported}),
    }


def _counter() -> tuple[int, int] | None:
    """The place of a code object's counter, in bytes, and what it is before the first call; None if none counts."""
    # It is co_warmup in CPython 3.11 (https://github.com/python/cpython/blob/3.11/Include/cpython/code.h), and
    # co_opcache_flag in 3.9 and 3.10.
    if sys.implementation.name != "cpython":
        return None
    probed: dict[str, Any] = {}
    exec("def probe(): pass", probed)
    probe = probed["probe"]
    halves = (ctypes.c_short * (sys.getsizeof(probe.__code__) // 2)).from_address(id(probe.__code__))
    states = [list(halves)]
    for _ in range(3):
        probe()
        states.append(list(halves))
    for place, first in enumerate(states[0]):
        if [state[place] for state in states] == [first, first + 1, first + 2, first + 3]:
            return 2 * place, first
    return None


COUNTER = _counter()


def _count(code: CodeType) -> int:
    assert COUNTER is not None
    return ctypes.c_short.from_address(id(code) + COUNTER[0]).value


def _within(codes: list[CodeType]) -> Iterator[CodeType]:
    for code in codes:
        yield code
        yield from _within([constant for constant in code.co_consts if isinstance(constant, CodeType)])


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_ROOTS)


def _relative(file: str) -> str:
    return Path(file).relative_to(HOME).as_posix()


def _watch_dynamo(symbolic_convert: Any) -> None:
    # Dynamo reads a function's bytecode instead of calling the function.
    translator = symbolic_convert.InstructionTranslatorBase
    init = translator.__init__

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if _is_ours(self.f_code):
            _seen[id(self.f_code)] = self.f_code

    translator.__init__ = begun


def _begun(code: CodeType, place: int) -> Any:
    if _is_ours(code):
        _seen[id(code)] = code
    return sys.monitoring.DISABLE  # type: ignore[attr-defined]  # of this code object
