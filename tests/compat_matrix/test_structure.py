"""``python -m compat_matrix.structure``: circles, docstrings and the table, for the working tree and a commit."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from compat_matrix.structure import __main__ as command
from compat_matrix.structure import circles, docstrings, sources


def module(text, path="package/module.py"):
    return sources.module(path, text.encode())


def undocumented(text, path="package/module.py"):
    return [place.split(" ", 1)[1] for place in docstrings.undocumented(module(text, path))]


def packed(**texts):
    """Return modules of a package. The name ``inner__in__one`` is the module ``one`` in the folder ``inner``."""
    return [module(text, f"package/{name.replace('__in__', '/')}.py") for name, text in texts.items()]


def written(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    "a, b",
    [
        ("from . import b", "from . import a"),
        ("from .b import x", "from package.a import y"),
        ("import package.b as b", "def f():\n    from package import a"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x", "from .a import *"),
    ],
    ids=["relative", "absolute", "in a function", "for the type checker"],
)
def test_two_modules_that_import_each_other_are_a_circle(a, b):
    assert circles.circles(packed(a=a, b=b, c="from . import a, b")) == [["package.a", "package.b"]]


def test_circles_are_found_apart_and_over_folders():
    found = circles.circles(
        packed(
            __init__="from .inner.one import x",
            inner__in____init__="",
            inner__in__one="from ..two import x",
            two="import package.three",
            three="from .inner import one",
            four="from . import name_of_the_package",
            five="from .inner import name_of_inner, six\nfrom . import five",
            inner__in__six="from .. import five",
        )
    )
    assert found == [["package.five", "package.inner.six"], ["package.inner.one", "package.three", "package.two"]]


def test_a_folder_that_its_own_module_imports_from_is_a_circle():
    modules = packed(inner__in____init__="from .one import x", inner__in__one="from . import name")
    assert circles.circles(modules) == [["package.inner", "package.inner.one"]]
    modules = packed(inner__in____init__="from .one import x", inner__in__one="from other import inner\nimport json")
    assert circles.circles(modules) == []


def test_what_is_public_needs_a_docstring():
    text = '''
LIMIT = 3

def function():
    def nested(): ...

def documented():
    """It is."""

def _private(): ...

try:
    class Class:
        def __init__(self): ...
        def _hidden(self): ...
        async def method(self): ...
        @property
        def size(self): ...
        @size.setter
        def size(self, value): ...
        class Inner:
            """Documented."""
            def deep(self): ...
except ImportError:
    pass

class _Hidden:
    def method(self): ...
'''
    expected = ["(module)", "function", "Class", "Class.method", "Class.size", "Class.Inner.deep"]
    assert undocumented(text) == expected
    assert undocumented(text, "package/inner/__init__.py") == expected
    assert undocumented(text, "package/__main__.py") == expected
    assert undocumented(text, "package/_inner/module.py") == []


def test_of_overloads_only_the_implementation_counts():
    overloads = "@overload\ndef f(x: int): ...\n@typing.overload\ndef f(x: str): ...\n"
    assert undocumented(f'"""Module."""\n{overloads}def f(x): ...\n') == ["f"]
    assert undocumented(f'"""Module."""\n{overloads}def f(x):\n    """Documented."""\n') == []


def test_a_method_has_the_docstring_of_a_base_class_in_another_file():
    method = '    def f(self):\n        """Does it."""\n'
    base = module(f'"""Module."""\nclass Base:\n    """Base."""\n{method}', "package/a.py")
    text = '"""Module."""\nclass Own(Base):\n    """Own."""\n    def f(self): ...\n    def g(self): ...\n'
    own = module(text, "package/b.py")
    assert [place.split(" ")[1] for place in docstrings.undocumented(own)] == ["Own.f", "Own.g"]
    assert [place.split(" ")[1] for place in docstrings.undocumented(own, [base, own])] == ["Own.g"]


def test_a_method_has_the_docstring_of_a_base_class_in_the_same_file():
    text = '''"""Module."""
from elsewhere import Other

class _Base:
    def method(self):
        """What it does."""
    def bare(self): ...

class Middle(_Base, Generic[T]):
    """Middle."""
    def method(self): ...

class Last(Middle[int]):
    """Last."""
    def method(self): ...
    def bare(self): ...
    def own(self): ...

class Foreign(Other):
    """Foreign."""
    def method(self): ...

class Circle(Circle):
    """Its base has the same name."""
    def method(self): ...
'''
    assert undocumented(text) == ["Last.bare", "Last.own", "Foreign.method", "Circle.method"]


def test_a_place_says_file_and_line():
    assert [*docstrings.undocumented(module("\n\ndef f(): ...\n"))] == [
        "package/module.py:1 (module)",
        "package/module.py:3 f",
    ]


LONG = "def long():\n" + "    x = 1\n" * 50
COMPLEX = "def complex():\n" + "    if x: y\n" * 12
LIMITS = LONG[: -len("    x = 1\n")] + COMPLEX[: -len("    if x: y\n")]


def test_only_what_is_over_a_limit_is_named(tmp_path):
    folder = written(tmp_path / "package", a=LONG, b=COMPLEX, c=LIMITS, d="x = 1\n" * 250, e="x = 1\n" * 251)
    found = command.measured(sources.of_folder(folder))
    assert found.long_functions == ("package/a.py:1 long: 51",)
    assert found.complex_functions == ("package/b.py:1 complex: 13",)
    assert found.long_files == ("package/e.py: 251",)
    assert (found.files, found.functions) == (5, 4)


def test_json_holds_every_measure_and_every_name(tmp_path, capsys):
    folder = written(tmp_path / "package", a="from . import b\nx: Any = 1\n", b="# why\nfrom . import a\n")
    assert command.main(["--package", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["working tree"]
    assert set(found) == set(command.LABELS), "the table has a row for each measure"
    assert (found["files"], found["lines"], found["code_lines"], found["uses_of_any"]) == (2, 4, 3, 1)
    assert found["circles"] == ["package.a, package.b"]
    assert found["undocumented"] == ["package/a.py:1 (module)", "package/b.py:1 (module)"]


def test_an_inner_folder_knows_its_absolute_imports(tmp_path):
    package = written(tmp_path / "package", __init__="")
    inner = written(package / "inner", a="import package.inner.b", b="from . import a")
    assert [found.path for found in sources.of_folder(inner)] == ["package/inner/a.py", "package/inner/b.py"]
    assert command.measured(sources.of_folder(inner)).circles == ("package.inner.a, package.inner.b",)


@pytest.fixture
def repository(tmp_path):
    """Return a package whose commit has two files and all docstrings; the working tree has one file and none."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    folder = written(tmp_path / "package", a='"""Module."""\n\n\ndef f():\n    """Function."""\n', b='"""Module."""\n')
    settings = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "."], [*settings, "commit", "-q", "--no-verify", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    (folder / "b.py").unlink()
    return written(folder, a="def f(): ...\n")


def test_a_commit_is_a_column_before_the_working_tree(repository, capsys):
    assert command.main(["--package", str(repository), "--at", "HEAD", "--names"]) == 0
    said = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in said.splitlines() if line.startswith("│")}
    assert [found.path for found in sources.of_commit(repository, "HEAD")] == ["package/a.py", "package/b.py"]
    assert said.index("HEAD") < said.index("working tree")
    assert [int(number) for number in rows[command.LABELS["files"]]] == [2, 1]
    assert [int(number) for number in rows[command.LABELS["undocumented"]]] == [0, 2]
    assert said.endswith("  HEAD: none\n  working tree:\n    package/a.py:1 (module)\n    package/a.py:1 f\n")


def test_undocumented_names_are_printed_only_if_asked_for(repository, capsys):
    assert command.main(["--package", str(repository)]) == 0
    assert "package/a.py" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked, said",
    [
        (["--package", "nowhere"], "There is no folder nowhere."),
        (["--package", "package", "--at", "HEAD", "nothing"], "There is no commit nothing"),
        (["--package", "new", "--at", "HEAD"], "HEAD has no folder new"),
        (["--package", "empty"], "There is no Python file in empty."),
        (["--package", "broken"], "broken/a.py is not Python that this interpreter reads"),
    ],
    ids=["folder", "commit", "folder in the commit", "no file", "no Python"],
)
def test_what_cannot_be_measured_is_an_error(repository, monkeypatch, capsys, asked, said):
    monkeypatch.chdir(repository.parent)
    written(Path("new"), a="")
    written(Path("empty"))
    written(Path("broken"), a="def (")
    with pytest.raises(SystemExit) as ended:
        command.main(asked)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_a_folder_outside_of_any_repository_has_no_commits(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = written(tmp_path / "package", a="")
    with pytest.raises(SystemExit):
        command.main(["--package", str(folder), "--at", "HEAD"])
    assert "There is no commit HEAD" in capsys.readouterr().err
