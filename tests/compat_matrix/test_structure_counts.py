"""``compat_matrix.structure.counts``: lines, functions, complexity and uses of Any in small sources."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from compat_matrix.structure import counts, sources

PACKAGE = Path(__file__).parents[2] / "fa2patch"


def module(text):
    return sources.module("package/module.py", text.encode())


@pytest.mark.parametrize(
    "text, lines, code",
    [
        ("", 0, 0),
        ("x = 1", 1, 1),
        ("x = 1\n\n# a comment\ny = 2  # another\n", 4, 2),
        ('"""A module.\n\nMore of it.\n"""\n\nx = 1\n"""What x is."""\n', 7, 1),
        ('class A:\n    """A class."""\n\n    def f():\n        """Two\n        lines."""\n        return 1\n', 7, 3),
        ('text = """one\n\n  \nfour"""\n', 4, 2),
        ("call(\n    1,\n    # why\n    2,\n)\n", 5, 4),
        ('def f(): "A docstring behind code."\n', 1, 1),
    ],
    ids=["none", "no end", "comments", "docstrings", "inside", "a string that is a value", "a call", "the same line"],
)
def test_lines_and_lines_of_code(text, lines, code):
    assert (counts.lines(module(text)), counts.code_lines(module(text))) == (lines, code)


def test_methods_and_nested_functions_are_functions_and_lambdas_are_not():
    text = "class A:\n    def m():\n        def inner(): ...\n        return lambda: 1\nif A:\n    async def g(): ...\n"
    assert [name for name, _ in counts.functions(module(text).tree)] == ["A.m", "A.m.inner", "g"]


def test_a_function_is_as_long_as_from_def_to_its_end():
    ((_, function),) = counts.functions(module("@one\n@two\ndef f(\n    x,\n):\n\n    return x\n\n\n").tree)
    assert counts.length(function) == 5


BRANCHES = [
    ("pass", 1),
    ("if a: b\nelif c: d\nelse: e", 3),
    ("for x in y: z\nelse: w", 2),
    ("while x: y", 2),
    ("try: a\nexcept X: b\nexcept Y: c\nfinally: e", 3),
    ("try: a\nexcept X: b\nelse: d", 3),
    ("with a: b", 1),
    ("return a and b or [x for x in y if x] if c else d", 1),
    ("def inner():\n    if a: b", 3),
    ("async def inner(): ...", 2),
    ("class A:\n    def m(self):\n        if a: b", 3),
]
MATCHES = [
    ("match x:\n    case 1: a\n    case 2 if b: c", 3),
    ("match x:\n    case 1: a\n    case _: b", 2),
    ("match x:\n    case 1: a\n    case other: b", 2),
    ("match x:\n    case 1: a\n    case _ if b: c", 3),
    ("match x:\n    case 1: a\n    case (2 | _) as found: b", 2),
    ("match x:\n    case 1: a\n    case 2 as found: b", 3),
]


def function_of(body):
    indented = "".join(f"    {line}\n" for line in body.split("\n"))
    return f"def f():\n{indented}"


@pytest.mark.parametrize("body, complexity", BRANCHES)
def test_complexity(body, complexity):
    assert counts.complexity(module(function_of(body)).tree.body[0]) == complexity


@pytest.mark.skipif(sys.version_info < (3, 10), reason="match is Python 3.10")
@pytest.mark.parametrize("body, complexity", MATCHES)
def test_complexity_of_a_match(body, complexity):
    assert counts.complexity(module(function_of(body)).tree.body[0]) == complexity


def test_complexity_is_what_ruff_counts_in_fa2patch():
    pytest.importorskip("ruff", reason="ruff is not installed")
    asked = ["--isolated", "--no-cache", "--ignore-noqa", "--select", "C901", "--output-format", "json"]
    limit = ["--config", "lint.mccabe.max-complexity=4"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", *asked, *limit, str(PACKAGE)], capture_output=True, text=True
    )
    theirs = {(PACKAGE / one["filename"], one["location"]["row"], one["message"]) for one in json.loads(done.stdout)}
    ours = {
        (PACKAGE.parent / found.path, function.lineno, f"`{function.name}` is too complex ({complexity} > 4)")
        for found in sources.of_folder(PACKAGE)
        for _, function in counts.functions(found.tree)
        if (complexity := counts.complexity(function)) > 4
    }
    assert ours == theirs and len(theirs) > 20


@pytest.mark.parametrize(
    "text, uses",
    [
        ("from typing import Any\nimport typing\n", 0),
        ("def f(x: Any, *args: list[Any]) -> typing.Any: ...", 3),
        ("Batch = dict[str, Any]\nx: Any = cast(Any, y)", 3),
        ("def f(x: 'Any', y: dict[str, 'list[Any]']) -> 'typing.Any | Any': ...", 4),
        ("x: 'Any' = cast('list[Any]', 'Any')", 2),
        ("x: Literal['Any'] = 'Any'\nprint('Any')  # Any", 0),
        ("x: 'not an annotation, Any'", 0),
        ("Any = object()\nAnything = any(x)", 0),
    ],
    ids=["imports", "plain", "alias and cast", "quoted", "quoted in a cast", "strings", "no Python", "other names"],
)
def test_uses_of_any(text, uses):
    assert counts.uses_of_any(ast.parse(text)) == uses
