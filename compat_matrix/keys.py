"""The key of a cell: hashes of the items of code (:mod:`.items`) that the cell executed.

These are the functions that it called, the module level of each file that it imported, and the definitions whose names
these mention, and so on. A cell is stale if one of its items is another one now, or if versions.toml asks for another
environment.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import items
from .items import File, Items

# Their module level is in no key, because most new architectures add a row there. python -m compat_matrix.plans makes
# the configs, and so finds the cells whose own config is another one now.
CONFIGS = ("compat_matrix/tiny_overrides.py", "compat_matrix/tiny_configs.py", "compat_matrix/media_families.py")


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
            self._files[name] = File() if hidden else items.read(ast.parse(path.read_text(encoding="utf-8")))
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
