"""The key of a cell: hashes of the code that the cell executed. ``python -m compat_matrix.stale`` says what is stale.

An item is a function, by file and qualified name, or a file's module level: its statements with all class bodies, and
decorators, names and parameters of its functions. Comments, docstrings, annotations of parameters and line numbers do
not count. A cell depends on each function that it called, and on the module level of each file that it imported. It is
stale if one of these items is another one now, or if versions.toml asks for another environment.

A key does not hold the tables of tiny configs (:data:`CONFIGS`), because most new architectures add a row there.
``python -m compat_matrix.plans`` makes the configs, and so finds the cells whose own config is another one now.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

Items = dict[str, str]
"""Hashes by item. An item is named ``file::qualified.name``, or ``file::`` for the module level of a file."""

CONFIGS = ("compat_matrix/tiny_overrides.py", "compat_matrix/tiny_configs.py", "compat_matrix/media_families.py")

_LEFT_OUT = ("ctx", "kind", "returns", "type_comment", "type_params")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Sources:
    """The items of the present sources.

    Args:
        home: the folder that holds ``fa2patch`` and ``compat_matrix``.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._items: dict[str, Items] = {}
        self._names: dict[str, dict[tuple[str, int], str]] = {}

    def key(self, executed: Mapping[str, Any], without: Collection[str] = CONFIGS) -> Items:
        """Return the items of what ``check.executed`` says of a process, but not the module level of some files."""
        found = {}
        for file in executed["files"]:
            if file not in without:
                found[f"{file}::"] = self.hash(f"{file}::")
        for file, name, line in executed["functions"]:
            self._read(file)
            qualified = self._names[file].get((name, line))
            if qualified is not None:  # else a lambda or a comprehension, which is part of what it is written in
                found[f"{file}::{qualified}"] = self.hash(f"{file}::{qualified}")
        return found

    def hash(self, item: str) -> str:
        """Return the hash of an item; empty if there is no such item."""
        file, _, name = item.partition("::")
        self._read(file)
        return self._items[file].get(name, "")

    def changed(self, key: Mapping[str, str]) -> list[str]:
        """Return the items of a key that are others now."""
        return [item for item, known in key.items() if self.hash(item) != known]

    def _read(self, file: str) -> None:
        if file not in self._items:
            path = self.home / file
            # Python imports a folder of this name instead of the file
            hidden = (path.with_suffix("") / "__init__.py").exists() or not path.exists()
            tree = ast.parse("" if hidden else path.read_text(encoding="utf-8"))
            self._items[file], self._names[file] = {} if hidden else items(tree), names(tree)


def items(tree: ast.Module) -> Items:
    """Return the hash of each function by its qualified name, and that of the module level under an empty name."""
    told: dict[str, list[str]] = {"": [_told(tree.body)]}
    for name, function in _functions(tree):
        told.setdefault(name, []).append(_told([function.args, function.body]))  # a property has several of a name
    return {name: sha256("\n".join(parts).encode()).hexdigest()[:8] for name, parts in told.items()}


def names(tree: ast.Module) -> dict[tuple[str, int], str]:
    """Return the qualified name of each function by its name and the first line of its code object."""
    return {
        (function.name, min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])): name
        for name, function in _functions(tree)
    }


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield inside + child.name, child
            yield from _functions(child, f"{inside}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{inside}{child.name}." if isinstance(child, ast.ClassDef) else inside)


def _told(node: Any) -> str:
    """A text that two pieces of code share if they do the same, in every Python that parses them.

    Of a function it holds what runs where it is defined: decorators, name, parameters and their defaults.
    """
    if isinstance(node, list):
        return f"[{','.join(_told(each) for each in node if not _is_text(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: getattr(node, name, None) for name in node._fields if name not in _LEFT_OUT}
    if isinstance(node, _FUNCTIONS):
        del fields["body"]
    if isinstance(node, ast.arg):
        del fields["annotation"]
    said = (f"{name}={_told(value)}" for name, value in fields.items() if value not in (None, []))
    return f"{type(node).__name__}({','.join(said)})"


def _is_text(node: Any) -> bool:
    """Whether a statement is only a string, as a docstring is."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def packed(keys: Iterable[Items]) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """Return keys as evidence holds them: a table of all items, and for each key which of them it has.

    Returns:
        The hashes by file and name, and for each key a hexadecimal number whose n-th bit stands for the n-th hash.
    """
    keys = list(keys)
    table: dict[str, dict[str, list[str]]] = {}
    places = {pair: place for place, pair in enumerate(sorted({pair for key in keys for pair in key.items()}))}
    for item, known in places:
        file, _, name = item.partition("::")
        table.setdefault(file, {}).setdefault(name, []).append(known)
    return table, [f"{sum(1 << places[pair] for pair in key.items()):x}" for key in keys]


def unpacked(table: Mapping[str, Mapping[str, list[str]]], numbers: Iterable[str]) -> list[Items]:
    """Return the keys that :func:`packed` has packed."""
    pairs = [
        (f"{file}::{name}", known)
        for file, found in table.items()
        for name, hashes in found.items()
        for known in hashes
    ]
    found = []
    for number in numbers:
        bits = int(number, 16)
        found.append({item: known for place, (item, known) in enumerate(pairs) if bits >> place & 1})
    return found
