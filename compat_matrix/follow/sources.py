"""Reads the sources of a Transformers without importing it: its forwards, its names and its mapping tables.

Sources are a folder: an installed package, an unpacked sdist or wheel, or a git checkout.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import environments
from ..cells import grouped

_NOT_TORCH = re.compile(r"modeling_(tf|flax)_|/convert_|^models/deprecated/")
_READ = re.compile(
    r"^models/auto/\w+\.py$|^models/.*/modeling_\w+\.py$|^utils/generic\.py$|^((integrations|loss)/)?\w+\.py$"
)

# What a function does with position ids to find documents: it looks at neighbours, at zeros or at the smallest one.
_COMPARES = re.compile(r"\bdiff\(|== 0\b|\.min\(|nonzero\(")
# the attribute of a class that holds the library's attention functions, or the makers of their masks, by name
_REGISTERED = "_global_mapping"


@dataclass(frozen=True)
class File:
    text: str
    # The arguments of each class's forward, by the class: each name with its annotation, empty if it has none. The keys
    # that a forward reads from its **kwargs count as arguments.
    forwards: dict[str, dict[str, str]]
    unpacked: set[str]  # the classes of keywords that forwards unpack into their **kwargs
    keywords: dict[str, tuple[str, ...]]  # the fields of each TypedDict
    functions: dict[str, tuple[str, ...]]  # the arguments of module-level functions
    defined: set[str]  # classes, functions and methods
    derives: dict[str, str]  # the code of module-level functions that find documents in position ids
    implementations: set[str]  # names under which attention functions or their masks are registered
    tables: dict[str, dict[str, str]]  # the auto classes' tables by name: a class's name by the model type


@dataclass(frozen=True)
class Sources:
    release: str  # that the sources say, such as "5.22.2" or "5.22.0.dev0"
    files: dict[str, File]  # modeling files, and the library's modules that concern models, by path
    folders: frozenset[str]

    @functools.cached_property
    def modeling(self) -> dict[str, File]:
        return {path: file for path, file in self.files.items() if "/modeling_" in path and "models/auto/" not in path}

    @functools.cached_property
    def forwards(self) -> dict[tuple[str, str], dict[str, str]]:
        return {(path, cls): taken for path, file in self.modeling.items() for cls, taken in file.forwards.items()}

    @functools.cached_property
    def takers(self) -> dict[str, frozenset[str]]:
        # Each argument has the folders of models whose forwards take it.
        return _places((name, folder(path)) for (path, _), taken in self.forwards.items() for name in taken)

    @functools.cached_property
    def keywords(self) -> dict[str, frozenset[str]]:
        # Each of the library's classes of keywords that forwards unpack has its fields.
        unpacked = {cls for file in self.modeling.values() for cls in file.unpacked}
        return {
            cls: frozenset(fields)
            for path, file in self.files.items()
            if path not in self.modeling
            for cls, fields in file.keywords.items()
            if cls in unpacked
        }

    @functools.cached_property
    def tables(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for file in self.files.values():
            for name, rows in file.tables.items():
                found.setdefault(name, {}).update(rows)
        return found

    @functools.cached_property
    def modeled(self) -> dict[str, frozenset[str]]:
        # Each name has the modeling files with a class, a function or an argument of a forward of this name.
        return _places(
            (name, path)
            for path, file in self.modeling.items()
            for names in (file.defined, *file.forwards.values())
            for name in names
        )

    @functools.cached_property
    def library(self) -> dict[str, frozenset[str]]:
        # Each name has the other files with a class or a function of this name.
        others = self.files.keys() - self.modeling.keys()
        return _places((name, path) for path in others for name in self.files[path].defined)

    @functools.cached_property
    def derives(self) -> dict[str, str]:
        others = self.files.keys() - self.modeling.keys()
        return {name: code for path in sorted(others) for name, code in self.files[path].derives.items()}

    @functools.cached_property
    def implementations(self) -> frozenset[str]:
        return frozenset().union(*(file.implementations for file in self.files.values()))

    @functools.cached_property
    def homes(self) -> dict[str, str]:
        # Each class has the folder whose modeling file defines it.
        return {name: folder(path) for path, file in self.modeling.items() for name in file.defined}


def _places(pairs: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(places) for name, places in grouped(pairs).items()}


def folder(path: str) -> str:
    return path.split("/")[-2]


def read(home: Path, read_file: Callable[[int], None] = lambda count: None) -> Sources:
    # read_file: called after each file with the number of all
    candidates = (home, home / "transformers", home / "src" / "transformers", *home.glob("*/src/transformers"))
    package = next((each for each in candidates if (each / "modeling_utils.py").exists()), None)
    if package is None:
        raise FileNotFoundError(f"{home}: expected the sources of Transformers, found no modeling_utils.py")
    said = re.search(r'^__version__ = "(.+)"', (package / "__init__.py").read_text(encoding="utf-8"), re.M)
    paths = {path.relative_to(package).as_posix(): path for path in sorted(package.rglob("*.py"))}
    paths = {name: path for name, path in paths.items() if _READ.search(name) and not _NOT_TORCH.search(name)}
    files = {}
    for name, path in paths.items():
        files[name] = _parsed(path.read_text(encoding="utf-8"))
        read_file(len(paths))
    models = frozenset(each.parent.name for each in (package / "models").glob("*/__init__.py"))
    return Sources(said[1] if said else "", files, models)


def of_release(release: str, folder: Path) -> Path:
    # The release's environment has the sources if it was made. Else they are installed beside it.
    for package in folder.glob(f"{release}/lib/python*/site-packages/transformers"):
        return package
    home = folder / "sources" / release
    if not (home / "transformers").exists():
        environments.install(home, f"transformers=={release}")
    return home


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> File:
    # Most files of two releases have the same text.
    lines, tree = text.splitlines(), ast.parse(text)
    found = File(text, {}, set(), {}, {}, set(), {}, set(), {})
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.defined.add(node.name)
            if any(isinstance(base, ast.Name) and base.id == "TypedDict" for base in node.bases):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found.keywords[node.name] = tuple(each.id for each in fields if isinstance(each, ast.Name))
            for function in node.body:
                if isinstance(function, ast.Assign) and getattr(function.targets[0], "id", "") == _REGISTERED:
                    keys = getattr(function.value, "keys", [])
                    found.implementations.update(str(key.value) for key in keys if isinstance(key, ast.Constant))
                if isinstance(function, ast.FunctionDef):
                    found.defined.add(function.name)
                    if function.name == "forward":
                        found.forwards[node.name] = {**_from_kwargs(function, lines), **_arguments(function)}
                        if function.args.kwarg and function.args.kwarg.annotation:
                            found.unpacked.update(re.findall(r"\w+Kwargs", ast.unparse(function.args.kwarg.annotation)))
        elif isinstance(node, ast.FunctionDef):
            found.defined.add(node.name)
            found.functions[node.name] = tuple(_arguments(node))
            code = _code(node)
            if "position_ids" in found.functions[node.name] and _COMPARES.search(code):
                found.derives[node.name] = code
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").endswith("MAPPING_NAMES"):
            found.tables[ast.unparse(node.targets[0])] = dict(_rows(node.value))
    return found


def _arguments(function: ast.FunctionDef) -> dict[str, str]:
    taken = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {each.arg: ast.unparse(each.annotation) if each.annotation else "" for each in taken if each.arg != "self"}


def _code(function: ast.FunctionDef) -> str:
    # without its docstring and comments
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return "\n".join(map(ast.unparse, body))


def _from_kwargs(forward: ast.FunctionDef, lines: list[str]) -> dict[str, str]:
    if forward.args.kwarg is None:
        return {}
    body = "\n".join(lines[forward.lineno - 1 : forward.end_lineno])
    read = rf"""\b{forward.args.kwarg.arg}(?:\.(?:get|pop)\(|\[)\s*["'](\w+)["']"""
    return dict.fromkeys(re.findall(read, body), "")


def _rows(table: ast.expr) -> Iterator[tuple[str, str]]:
    # A table is a list of pairs, or a dict.
    for node in ast.walk(table):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            pairs = [(node.elts[0], node.elts[1])]
        elif isinstance(node, ast.Dict):
            pairs = list(zip(node.keys, node.values))
        for key, value in pairs:
            first = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
            if isinstance(key, ast.Constant) and isinstance(first, ast.Constant):
                yield str(key.value), str(first.value)
