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
    FOLDER = os.getcwd()


    class Found:
        """What is found."""

        size: int = 4

        @property
        def half(self) -> int:
            return self.size // 2


    @keeping
    def kept():
        return Found.size


    def keeping(function):
        return function


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
    before, after = (keys.items_of(ast.parse(source)).items for source in (MODULE, MODULE.replace(old, new)))
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
    ("old", "new", "others"),
    [
        ("LIMIT = 3", "LIMIT = 4", {"@LIMIT"}),
        ("os.getcwd()", "os.getcwd", {"", "@FOLDER"}),  # what calls something may do more than define
        ("size: int = 4", "size: int = 5", {"@Found"}),
        ("@property", "@functools.cached_property", {"@Found"}),
        ("second=LIMIT", "second=2", {"@outer", "outer"}),
        ("import os", "import os.path", {""}),
        ("@keeping\n", "@os.keeping\n", {"", "@kept"}),  # a decorator of this project may keep what it decorates
        ("class Found:", "class Found(metaclass=type):", {"", "@Found"}),
        ("return inner() + second", "return inner() - second", {"outer"}),
        ("return first", "return -first", {"outer.<locals>.inner"}),
        ("self.size // 2", "self.size / 2", {"Found.half"}),
        ("return os.sep", "return os.altsep", {"unused"}),
        ("def unused", "def __getattr__", {"", "@unused", "unused", "__getattr__"}),
        ("def unused", "def len", {"@unused", "@len", "unused", "len"}),
    ],
)
def test_what_is_executed_counts_where_it_is_executed(old, new, others):
    assert changed(old, new) == others


PYTHONS = [found for found in map(environments.interpreter, ("3.9", "3.10", "3.12", "3.13")) if "python" in found]


@pytest.mark.skipif(not PYTHONS, reason="looked for other releases of Python, found none")
def test_the_same_text_gives_the_same_hashes_in_every_python():
    # Evidence of one Python is compared with sources that another one parses.
    read = f"import ast; found = keys.items_of(ast.parse({MODULE!r}))"
    script = f"{read}; print(found.items, sorted((name, sorted(words)) for name, words in found.mentions.items()))"
    here = subprocess.run([sys.executable, "-c", f"from compat_matrix import keys; {script}"], capture_output=True)
    for python in PYTHONS:  # the package itself needs packages
        alone = f"import sys; sys.path.insert(0, {str(Path(keys.__file__).parent)!r}); import keys; {script}"
        said = subprocess.run([python, "-c", alone], capture_output=True)
        assert said.stdout == here.stdout and here.stdout, (python, said.stderr)


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "fa2patch").mkdir()
    (tmp_path / "fa2patch" / "module.py").write_text(MODULE)
    return keys.Sources(tmp_path)


FILE = "fa2patch/module.py"


def line_of(text):
    return next(number for number, line in enumerate(MODULE.splitlines(), 1) if line.startswith(text))


def test_a_key_holds_what_was_called_and_imported_and_the_definitions_that_it_mentions(sources, tmp_path):
    called = [[FILE, "outer", line_of("def outer")], [FILE, "<lambda>", 3]]
    key = sources.key({"files": [FILE], "functions": called})
    # `kept` stays where it is decorated, and its decorator is called there
    assert set(key) == {f"{FILE}::{name}" for name in ("", "outer", "@outer", "@LIMIT", "@keeping")}

    def now(source):
        (tmp_path / FILE).write_text(source)
        return {item.partition("::")[2] for item in keys.Sources(tmp_path).changed(key)}

    assert now(MODULE) == now(MODULE.replace("return os.sep", "return 1")) == now(f"# moved\n\n{MODULE}") == set()
    assert now(MODULE.replace("size: int = 4", "size: int = 5")) == set(), "nothing that was called mentions it"
    assert now(MODULE.replace("def unused", "def used")) == now(f"{MODULE}\n\ndef more(): pass") == set()
    assert now(MODULE.replace("LIMIT = 3", "LIMIT = 4")) == {"@LIMIT"}
    assert now(MODULE.replace("inner() + second", "second")) == {"outer"}
    assert {"outer", "@outer"} <= now(MODULE.replace("def outer", "def other"))
    assert now(f"{MODULE}\n\ninner = 3\n") == {"@inner"}, "a new one whose name is mentioned"


def test_a_definition_counts_where_a_word_of_another_file_may_mean_it(tmp_path):
    (tmp_path / "fa2patch").mkdir()
    (tmp_path / "fa2patch" / "a.py").write_text(
        "from . import b as other, c\nfrom .b import Used, Unused\nfrom .b import Renamed as Known\n"
        "def f(): return Used, other.by_module, getattr(c, 'by_text'), 'no name by_sentence'\n"
    )
    (tmp_path / "fa2patch" / "b.py").write_text(
        "class Base: x = 1\nclass Used(Base): pass\nclass Unused: pass\nclass Renamed: pass\n"
        "def by_module(): return Unused\nby_text = 1\nby_sentence = 2\n"
    )
    files = ["fa2patch/a.py", "fa2patch/b.py"]
    key = keys.Sources(tmp_path).key({"files": files, "functions": [["fa2patch/a.py", "f", 4]]})
    names = {item.partition("@")[2] for item in key if "@" in item}
    assert names == {"f", "Used", "Base", "by_module", "by_text", "Renamed"}


def test_the_key_of_two_processes_is_fresh_although_each_mentions_what_the_other_imports(tmp_path):
    (tmp_path / "fa2patch").mkdir()
    (tmp_path / "fa2patch" / "a.py").write_text("def f(): return shared\nother = 1\n")
    (tmp_path / "fa2patch" / "b.py").write_text("shared = 2\ndef g(): return other\n")
    parts = [
        {"files": ["fa2patch/a.py"], "functions": [["fa2patch/a.py", "f", 1]]},
        {"files": ["fa2patch/b.py"], "functions": [["fa2patch/b.py", "g", 2]]},
    ]
    key = keys.Sources(tmp_path).key(*parts)
    assert {"fa2patch/a.py::@other", "fa2patch/b.py::@shared"} <= {*key}
    assert keys.Sources(tmp_path).changed(key) == []


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
    keyed = {
        "calls": sources.key({"files": [FILE], "functions": [[FILE, "outer", line_of("def outer")]]}),
        "imports": sources.key({"files": [FILE], "functions": []}),
        "neither": sources.key({"files": [], "functions": []}),
    }
    cells = {name: SimpleNamespace(made=SimpleNamespace(key=key)) for name, key in keyed.items()}
    monkeypatch.setattr(commits, "ROOT", tmp_path)

    def stale_now():
        stale._sources.cache_clear()
        return set(stale.by_commit(SimpleNamespace(cells=cells), "HEAD"))

    committed(MODULE.replace("inner() + second", "second"))
    assert stale_now() == {"calls"}
    committed(MODULE.replace("LIMIT = 3", "LIMIT = 4"))
    assert stale_now() == {"calls"}
    committed(MODULE.replace("os.getcwd()", "os.getcwd"))
    assert stale_now() == {"calls", "imports"}
    committed(MODULE.replace("size: int = 4", "size: int = 5"))
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
    # Calls in threads count too. A function that is only defined does not count.
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
    assert {name for name in of_some if "@" not in name} == {"", "called", "inlined", "compiled", "in_a_thread"}
