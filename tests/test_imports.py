"""Imports in fa2patch point one way, from the command line down to the ground floor. No package has a circle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from compat_matrix.structure.circles import circles, imports
from compat_matrix.structure.sources import Module, of_folder

ROOT = Path(__file__).parents[1]

FLOORS = (
    ("_compile", "_types", "binding", "errors", "trying"),
    ("documents", "packing"),
    ("kernels",),
    ("upstream",),
    ("padded", "probing"),
    ("patch",),
    ("data",),
    ("callbacks", "proof", "run"),
    ("cli", "preference", "testing", "traits"),
    ("", "__main__"),
)
"""A module imports from its own room and from lower floors. A room is a folder, or a file beside them; "" is
``fa2patch`` itself."""

MODULES = {module.name: module for module in of_folder(ROOT / "fa2patch")}


def room(name: str) -> str:
    return name.partition(".")[2].partition(".")[0]


def floor(name: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(name) in rooms)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_module_imports_from_its_room_and_from_below(module: Module) -> None:
    found = {other for other in imports(module, set(MODULES)) if room(other) != room(module.name)}
    above = sorted(other for other in found if floor(other) >= floor(module.name))
    assert not above, f"{module.name} imports {above}, on the same floor or above"


@pytest.mark.parametrize("package", ["fa2patch", "compat_matrix"])
def test_there_is_no_circle(package: str) -> None:
    assert circles(of_folder(ROOT / package)) == []


def test_importing_fa2patch_loads_only_what_apply_needs() -> None:
    code = (
        "import sys, fa2patch\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('fa2patch.')}\n"
        "assert not rooms & {'data', 'packing', 'proof', 'cli', 'run', 'callbacks'}, rooms\n"
        "assert set(fa2patch.__all__) <= set(dir(fa2patch))\n"
        "for name in (*fa2patch.__all__, 'preference', 'testing', 'traits'):\n"
        "    assert getattr(fa2patch, name) is not None\n"
        "assert not hasattr(fa2patch, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_lazy_name_works_without_an_import_of_its_own() -> None:
    code = (
        "import fa2patch\n"
        "class Trainer:\n"
        "    'A stand-in for TRL.'\n"
        "assert fa2patch.preference.trainer_class(Trainer).__mro__[1] is Trainer\n"
        "assert 'preference' in dir(fa2patch) and 'preference' in fa2patch.__all__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
