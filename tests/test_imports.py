"""Imports in fa2patch point one way, from the command line down to the ground floor, and no package has a circle."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from compat_matrix.bench import own_time

ROOT = Path(__file__).parents[1]


def test_a_module_imports_from_its_room_and_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    cli = pytest.importorskip("importlinter.cli", reason="import-linter needs Python 3.11")
    monkeypatch.chdir(ROOT)
    assert cli.lint_imports(no_cache=True) == cli.EXIT_STATUS_SUCCESS


@pytest.mark.parametrize("package", ["fa2patch", "compat_matrix"])
def test_there_is_no_circle(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # import-linter's own contract counts circles of folders. Here a circle is one of modules.
    grimp = pytest.importorskip("grimp", reason="import-linter needs Python 3.11")
    monkeypatch.syspath_prepend(ROOT)
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # a circle is an error that names its modules
    assert len(imports) > 50


def test_importing_fa2patch_loads_only_what_apply_needs() -> None:
    code = (
        "import sys, torch, transformers\n"
        "before = {*sys.modules}\n"
        "import fa2patch\n"
        "fa2patch.apply\n"
        "rooms = {name.split('.')[1] for name in sys.modules if name.startswith('fa2patch.')}\n"
        "assert not rooms & {'data', 'packing', 'cli', 'run', 'callbacks', 'padded', 'trainers'}, rooms\n"
        "loaded = {name.partition('.')[2] for name in sys.modules}\n"
        "assert not loaded & {'proof.verify', 'proof.proving', 'upstream.seams.mixer'}, loaded\n"
        "others = {name for name in {*sys.modules} - before if not name.startswith('fa2patch')}\n"
        "assert not others, others\n"
        "assert set(fa2patch.__all__) <= set(dir(fa2patch))\n"
        "for name in (*fa2patch.__all__, 'preference', 'testing', 'traits'):\n"
        "    assert getattr(fa2patch, name) is not None\n"
        "assert not hasattr(fa2patch, 'no_such_name')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nothing_is_imported_from_inside_of_torch_s_compiled_module() -> None:
    # torch 2.1 to 2.4 has no modules there, only attributes.
    for file in (ROOT / "fa2patch").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("torch._C") for name in names), file


# What the import may cost after torch and Transformers, a little more than it does: 15,300 calls in Python 3.11.
MOST_CALLS, MOST_MODULES = 16_700, 72


def test_the_import_costs_few_calls() -> None:
    # Every process pays for the import: ranks, workers that load data, and programs that patch nothing in the end.
    # A module costs a hundred calls besides its own, a data class up to 300, an operator of torch 340 and the first one
    # 20,000. If this fails, ``python -X importtime -c "import torch, transformers, fa2patch"`` shows what is new. What
    # few models need is imported where a model is found to need it, and an operator is defined by ``operator_later`` of
    # ``fa2patch/_torch.py``. Raise the numbers only for what every model needs.
    found = own_time.of_import(1)
    assert found["import: calls"] <= MOST_CALLS and found["import: modules"] <= MOST_MODULES, found


def test_a_lazy_name_works_without_an_import_of_its_own() -> None:
    code = (
        "import fa2patch\n"
        "class Trainer:\n"
        "    'A stand-in for TRL.'\n"
        "assert issubclass(fa2patch.packed_trainer(Trainer), Trainer)\n"
        "assert fa2patch.preference.__name__ == 'fa2patch.preference'\n"
        "assert 'preference' in dir(fa2patch) and 'preference' in fa2patch.__all__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
