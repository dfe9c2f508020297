"""Imports in fa2patch point one way, from the command line down to the ground floor. No package has a circle."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_module_imports_from_its_room_and_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("importlinter.cli", reason="import-linter needs Python 3.11")
    monkeypatch.chdir(ROOT)
    assert cli.lint_imports(no_cache=True) == cli.EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("package", ["fa2patch", "compat_matrix"])
def test_there_is_no_circle(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """import-linter's own contract counts circles of folders. Here a circle is one of modules."""
    grimp = pytest.importorskip("grimp", reason="import-linter needs Python 3.11")
    monkeypatch.syspath_prepend(ROOT)
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # a circle is an error that names its modules
    assert len(imports) > 50


def test_importing_fa2patch_loads_only_what_apply_needs() -> None:
    code = (
        "import sys, fa2patch\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('fa2patch.')}\n"
        "assert not rooms & {'data', 'packing', 'cli', 'run', 'callbacks'}, rooms\n"
        "assert 'fa2patch.proof.verify' not in sys.modules\n"
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
        "assert fa2patch.packed_trainer(Trainer).__mro__[1] is Trainer\n"
        "assert fa2patch.preference.__name__ == 'fa2patch.preference'\n"
        "assert 'preference' in dir(fa2patch) and 'preference' in fa2patch.__all__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
