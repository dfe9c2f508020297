"""The key of a cell: hashes of the items of code that the cell executed.

These are the functions that it called, the module level of each file that it imported, and the definitions whose names
these mention, and so on. A cell is stale if one of its items is another one now, or if versions.toml asks for another
environment.

A *function* is its parameters and its body, under its qualified name. A *definition*, ``@name``, is what runs where a
module defines a class, a function or a constant: no bodies of functions. The *rest* of the module has the empty name.
Comments, docstrings, annotations of parameters and line numbers do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

# Hashes by item. Outside its file an item is named "file::name".
Items = dict[str, str]

# Their module level is in no key, because most new architectures add a row there. python -m compat_matrix.plans makes
# the configs, and so finds the cells whose own config is another one now.
CONFIGS = ("compat_matrix/tiny_overrides.py", "compat_matrix/tiny_configs.py", "compat_matrix/media_families.py")

_LEFT_OUT = ("ctx", "kind", "returns", "type_comment", "type_params")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_RUNNING = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


@dataclass(frozen=True)
class File:
    items: Items = field(default_factory=dict)  # hashes by item, without the file's name
    # the qualified name of each function, by its name and the first line of its code object
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)
    # the names in the code of each item, which may mean definitions of this file and of others
    mentions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    defined: frozenset[str] = frozenset()


class Sources:
    """The items of the sources in a folder that holds fa2patch and compat_matrix."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._files: dict[str, File] = {}
        self._again: dict[Any, Items] = {}  # many cells executed the same

    def key(self, *executed: Mapping[str, Any], without: Collection[str] = CONFIGS) -> Items:
        # executed: what check.executed says of each process. without: files whose module level is left out.
        called = [each for one in executed for each in one["functions"]]
        named = [(file, self.file(file).lines.get((name, line))) for file, name, line in called]
        # what has no name is a lambda or a comprehension, which is part of what it is written in
        functions = [(file, name) for file, name in named if name is not None]
        return self.depended({file for one in executed for file in one["files"]} - {*without}, functions)

    def depended(self, files: Collection[str], functions: Collection[tuple[str, str]]) -> Items:
        # What no executed code mentions may change: a field of a class that a cell does not use makes it not stale.
        held = {file: self.file(file) for file in {*files, *(file for file, _ in functions)}}
        found = {(file, "") for file in files}
        for file, name in functions:
            found.add((file, name))
            inside = name.partition(".")[0]
            if file in files and inside in held[file].defined:
                found.add((file, f"@{inside}"))
        new, words = found, set[str]()
        while new:
            more = set[str]().union(*(held[file].mentions.get(name, ()) for file, name in new)) - words
            words |= more
            new = {(file, f"@{word}") for file in files for word in held[file].defined & more} - found
            found = found | new
        return {f"{file}::{name}": held[file].items.get(name, "") for file, name in found}

    def again(self, key: Mapping[str, str]) -> Items:
        """Return the key that the same files and functions have in these sources."""
        executed = [tuple(item.split("::")) for item in key if "::@" not in item]
        files = frozenset(file for file, name in executed if not name)
        functions = frozenset((file, name) for file, name in executed if name)
        if (files, functions) not in self._again:
            self._again[files, functions] = self.depended(files, functions)
        return self._again[files, functions]

    def changed(self, key: Mapping[str, str]) -> list[str]:
        now = self.again(key)
        return [] if now == key else [each for each in sorted({*key, *now}) if key.get(each) != now.get(each)]

    def file(self, name: str) -> File:
        if name not in self._files:
            path = self.home / name
            # Python imports a folder of this name instead of the file
            hidden = (path.with_suffix("") / "__init__.py").exists() or not path.exists()
            self._files[name] = File() if hidden else items_of(ast.parse(path.read_text(encoding="utf-8")))
        return self._files[name]


def packed(keys: Iterable[Items]) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    # The table holds the hashes of all items, by file and name. The n-th bit of a key's hexadecimal number stands for
    # the n-th hash.
    keys, table = list(keys), dict[str, dict[str, list[str]]]()
    places = {pair: place for place, pair in enumerate(sorted({pair for key in keys for pair in key.items()}))}
    for item, known in places:
        file, _, name = item.partition("::")
        table.setdefault(file, {}).setdefault(name, []).append(known)
    return table, [f"{sum(1 << places[pair] for pair in key.items()):x}" for key in keys]


def unpacked(table: Mapping[str, Mapping[str, list[str]]], numbers: Iterable[str]) -> list[Items]:
    pairs = [(f"{file}::{name}", known) for file, found in table.items() for name, of in found.items() for known in of]
    every = (int(number, 16) for number in numbers)
    return [{item: known for place, (item, known) in enumerate(pairs) if bits >> place & 1} for bits in every]


def items_of(tree: ast.Module) -> File:
    parts: dict[str, list[Any]] = {"": []}
    words: dict[str, set[str]] = {}
    ours = _ours(tree)
    for statement in tree.body:
        names = _defines(statement, ours) or [""]
        for item in (f"@{name}" if name else "" for name in names):
            parts.setdefault(item, []).append(statement)
            words.setdefault(item, set()).update(_words(_where_defined(statement)))
    lines = {}
    for name, function in _functions(tree):
        parts.setdefault(name, []).extend([function.args, function.body])  # a property has several of a name
        words.setdefault(name, set()).update(_words([function]))
        lines[function.name, min([function.lineno, *(each.lineno for each in function.decorator_list)])] = name
    hashes = {item: sha256(_told(held).encode()).hexdigest()[:8] for item, held in parts.items()}
    defined = frozenset(item[1:] for item in parts if item.startswith("@"))
    return File(hashes, lines, {item: frozenset(found) for item, found in words.items()}, defined)


def _defines(statement: ast.stmt, ours: Collection[str]) -> list[str]:
    # Only a statement that does nothing else defines names. A decorator of this project may keep what it decorates, as
    # a metaclass may. Python itself asks for names such as __getattr__.
    names = []
    if isinstance(statement, _DEFINITIONS):
        is_kept = any(_root(decorator) in ours for decorator in statement.decorator_list)
        names = [] if is_kept or getattr(statement, "keywords", ()) else [statement.name]
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if not any(isinstance(node, _RUNNING) for node in ast.walk(statement)):
            names = [target.id if isinstance(target, ast.Name) else "" for target in targets]
    return names if all(name and not name.startswith("__") for name in names) else []


def _ours(tree: ast.Module) -> set[str]:
    """The names of what this project wrote: the module's own definitions, and what it imports from beside it."""
    found = {statement.name for statement in tree.body if isinstance(statement, _DEFINITIONS)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            found.update(alias.asname or alias.name for alias in node.names)
    return found


def _root(node: Any) -> str:
    # The root of functools.cache(...) is "functools".
    while not isinstance(node, ast.Name):
        node = getattr(node, "func", None) or getattr(node, "value", None)
        if node is None:
            return ""
    return node.id


def _where_defined(statement: Any) -> list[Any]:
    # These parts run where the statement stands; bodies of functions do not. What a module imports from beside it
    # counts where it is used. If it gets another name there, that is taken for use.
    if isinstance(statement, _FUNCTIONS):
        return [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
    if isinstance(statement, ast.ClassDef):
        within = [part for each in statement.body for part in _where_defined(each)]
        return [*statement.decorator_list, *statement.bases, *statement.keywords, *within]
    if isinstance(statement, ast.ImportFrom) and statement.level:
        return [alias for alias in statement.names if alias.asname]
    return [statement]


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    # A text without a space may name an attribute.
    for node in (node for each in nodes for node in ast.walk(each)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield from re.findall(r"\w+", node.value)


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, Any]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield inside + child.name, child
            yield from _functions(child, f"{inside}{child.name}.<locals>.")
        else:
            yield from _functions(child, f"{inside}{child.name}." if isinstance(child, ast.ClassDef) else inside)


def _told(node: Any) -> str:
    # Two pieces of code have the same text if they do the same, in every Python that parses them. The text of a
    # function holds what runs where it is defined: decorators, name, parameters and their defaults.
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
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
