"""What ``compat_matrix.size`` counts in a file of which everything is known."""

from compat_matrix import size

ROOM = '''"""A docstring

of three lines."""

from typing import Any


def f(x: Any) -> None:
    """One line."""
    # a comment
    return x  # another


class F:
    pass
'''
LONG = "def long():\n" + "    pass\n" * 30


def test_lines_are_counted_by_kind() -> None:
    found = size.counted({"fa2patch/a.py": ROOM, "fa2patch/b/c.py": LONG})
    assert (found["files"], found["rooms"], found["lines"]) == (2, 2, 15 + 31)
    assert (found["lines of docstrings"], found["comments"]) == (4, 2)
    assert found["lines of code"] == 5 + 31
    assert (found["functions"], found["classes"], found["functions over 30 lines"]) == (2, 1, 1)
    assert (found["`Any`"], found["lines of imports"]) == (1, 1)


def test_a_name_of_two_modules_is_found() -> None:
    files = {
        "fa2patch/a.py": ROOM,
        "fa2patch/b/a.py": "def f(): ...\ndef _g(): ...\n",
        "fa2patch/c.py": "def _g(): ...",
    }
    assert size.names_twice(files) == {
        "a.py": ["fa2patch/a.py", "fa2patch/b/a.py"],
        "f": ["fa2patch/a.py", "fa2patch/b/a.py"],
    }
