"""A key changes with the code that a cell executed, and with nothing else."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace

import pytest

from compat_matrix import commits, environments, keys, stale

MODULE = dedent('''
    """A module."""

    import os

    LIMIT = 3


    class Found:
        """What is found."""

        size: int = 4

        @property
        def half(self) -> int:
            return self.size // 2


    def outer(first: int, second=LIMIT) -> int:
        """Add."""

        def inner():
            return first  # of the outer one

        return inner() + second


    def unused():
        return os.sep
''')


def changed(old, new):
    assert old in MODULE
    before, after = (keys.items(ast.parse(source)) for source in (MODULE, MODULE.replace(old, new)))
    return {name for name in {*before, *after} if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another text."""\n\n'),
        ('"""Add."""', ""),
        ('    """What is found."""\n', ""),
        ("  # of the outer one", ""),
        ("first: int,", "first: float,"),
        (') -> int:\n    """Add', '):\n    """Add'),
        ("\n\n\ndef unused", "\n\n\n\n\n\ndef unused"),
        ("return inner() + second", "return (inner()\n            + second)"),
    ],
)
def test_texts_annotations_and_lines_do_not_count(old, new):
    assert changed(old, new) == set()


@pytest.mark.parametrize(
    ("old", "new", "items"),
    [
        ("LIMIT = 3", "LIMIT = 4", {""}),
        ("size: int = 4", "size: int = 5", {""}),
        ("@property", "@functools.cached_property", {""}),
        ("second=LIMIT", "second=2", {"", "outer"}),
        ("import os", "import os.path", {""}),
        ("return inner() + second", "return inner() - second", {"outer"}),
        ("return first", "return -first", {"outer.<locals>.inner"}),
        ("self.size // 2", "self.size / 2", {"Found.half"}),
        ("return os.sep", "return os.altsep", {"unused"}),
        ("def unused", "def len", {"", "unused", "len"}),
    ],
)
def test_what_is_executed_counts_where_it_is_executed(old, new, items):
    assert changed(old, new) == items


PYTHONS = [found for found in map(environments.interpreter, ("3.9", "3.10", "3.12", "3.13")) if "python" in found]


@pytest.mark.skipif(not PYTHONS, reason="looked for other releases of Python, found none")
def test_the_same_text_gives_the_same_hashes_in_every_python():
    """Evidence of one Python is compared with sources that another one parses."""
    source = Path(keys.__file__).read_text().replace("from . import environments\n", "")  # which needs packages
    script = (
        f"exec({source!r}, found := {{'__name__': 'keys'}}); import ast; print(found['items'](ast.parse({MODULE!r})))"
    )
    for python in PYTHONS:
        said = subprocess.run([python, "-c", script], capture_output=True, text=True)
        assert said.stdout.strip() == str(keys.items(ast.parse(MODULE))), (python, said.stderr)


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "fa2patch").mkdir()
    (tmp_path / "fa2patch" / "module.py").write_text(MODULE)
    return keys.Sources(tmp_path)


EXECUTED = {"files": ["fa2patch/module.py"], "functions": [["fa2patch/module.py", "outer", 22]]}


def test_a_key_holds_the_functions_that_were_called_and_the_files_that_were_imported(sources, tmp_path):
    line = next(number for number, text in enumerate(MODULE.splitlines(), 1) if text.startswith("def outer"))
    called = [["fa2patch/module.py", "outer", line], ["fa2patch/module.py", "<lambda>", 3]]
    key = sources.key({"files": ["fa2patch/module.py"], "functions": called})
    assert set(key) == {"fa2patch/module.py::", "fa2patch/module.py::outer"}

    def now(source):
        (tmp_path / "fa2patch" / "module.py").write_text(source)
        return keys.Sources(tmp_path).changed(key)

    assert now(MODULE) == now(MODULE.replace("return os.sep", "return 1")) == now(f"# moved\n\n{MODULE}") == []
    assert now(MODULE.replace("LIMIT = 3", "LIMIT = 4")) == ["fa2patch/module.py::"]
    assert now(MODULE.replace("inner() + second", "second")) == ["fa2patch/module.py::outer"]
    assert set(now(MODULE.replace("def outer", "def other"))) == {"fa2patch/module.py::", "fa2patch/module.py::outer"}


def test_a_folder_that_hides_a_file_and_a_file_that_is_gone_are_changes(sources, tmp_path):
    key = sources.key({"files": ["fa2patch/module.py"], "functions": []})
    (tmp_path / "fa2patch" / "module").mkdir()
    assert keys.Sources(tmp_path).changed(key) == [], "a folder without __init__.py hides nothing"
    (tmp_path / "fa2patch" / "module" / "__init__.py").write_text("")
    assert keys.Sources(tmp_path).changed(key)
    (tmp_path / "fa2patch" / "module" / "__init__.py").unlink()
    (tmp_path / "fa2patch" / "module.py").unlink()
    assert keys.Sources(tmp_path).changed(key)


def test_a_commit_makes_stale_what_executes_what_it_changed(sources, tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    def committed(text):
        (tmp_path / "fa2patch" / "module.py").write_text(text)
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "more")

    (tmp_path / "compat_matrix").mkdir(exist_ok=True)
    (tmp_path / "compat_matrix" / "__init__.py").write_text("")
    git("init")
    committed(MODULE)
    line = next(number for number, text in enumerate(MODULE.splitlines(), 1) if text.startswith("def outer"))
    keyed = {
        "calls": sources.key({"files": ["fa2patch/module.py"], "functions": [["fa2patch/module.py", "outer", line]]}),
        "imports": sources.key({"files": ["fa2patch/module.py"], "functions": []}),
        "neither": sources.key({"files": [], "functions": []}),
    }
    cells = {name: SimpleNamespace(made=SimpleNamespace(key=key)) for name, key in keyed.items()}
    monkeypatch.setattr(commits, "ROOT", tmp_path)

    def stale_now():
        stale._sources.cache_clear()
        return set(stale.by_commit(SimpleNamespace(cells=cells), "HEAD"))

    committed(MODULE.replace("inner() + second", "second"))
    assert stale_now() == {"calls"}
    committed(MODULE.replace("inner() + second", "second").replace("LIMIT = 3", "LIMIT = 4"))
    assert stale_now() == {"calls", "imports"}
    committed(MODULE)
    committed(f"# moved\n\n{MODULE}")
    assert stale_now() == set()


def test_tables_of_tiny_configs_are_no_part_of_a_key(sources):
    assert sources.key({"files": list(keys.CONFIGS), "functions": []}) == {}


def test_keys_are_packed_without_loss():
    some = [{"a.py::": "1", "a.py::f": "2"}, {"a.py::": "3", "b.py::A.<locals>.g": "4"}, {}]
    table, numbers = keys.packed(some)
    assert keys.unpacked(table, numbers) == some
    assert table["a.py"][""] == ["1", "3"]


@pytest.mark.slow
def test_a_process_records_what_it_calls_what_it_imports_and_what_dynamo_traces(tmp_path):
    """Threads too; a function that is only defined does not count."""
    for package in ("fa2patch", "compat_matrix"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "compat_matrix" / "executed.py").write_text(
        (environments.HERE / "check" / "executed.py").read_text().replace("parents[2]", "parents[1]")
    )
    (tmp_path / "fa2patch" / "some.py").write_text(
        "def called(): pass\ndef inlined(x): return x * 2\ndef compiled(x): return inlined(x)\n"
        "def in_a_thread(): pass\ndef never(): pass\n"
    )
    script = (
        "from compat_matrix import executed; executed.record()\n"
        "import json, threading, torch\nfrom fa2patch import some\n"
        "some.called(); torch.compile(some.compiled, backend='eager', fullgraph=True)(torch.ones(2))\n"
        "thread = threading.Thread(target=some.in_a_thread); thread.start(); thread.join()\n"
        "print(json.dumps(executed.executed()))"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = keys.Sources(tmp_path).key(json.loads(said.stdout))
    of_some = {item.partition("::")[2] for item in found if item.startswith("fa2patch/some.py")}
    assert of_some == {"", "called", "inlined", "compiled", "in_a_thread"}
