"""Reads stacks.toml (environments with other packages) and integrations.toml (the rows of README's table)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import environments
from ..results import Malformed

HERE = Path(__file__).parent
EVIDENCE = HERE / "evidence"
INTEGRATIONS = EVIDENCE / "integrations" / "tests.json"
DISTRIBUTED = "tests/distributed/test_distributed.py::test_a_script_in_several_processes[{}]"
"""The test that runs a script of tests/distributed, such as ``trainer zero2`` or ``ulysses, 4 processes``."""


@dataclass(frozen=True)
class Stack:
    """One block of stacks.toml.

    Attributes:
        variables: environment variables of its processes.
        tests: what pytest is given to run in it: files, tests, and ``-k``. Without any, only tests of the rows use it.
    """

    environment: environments.Version
    variables: dict[str, str]
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the block."""
        return self.environment.name

    @property
    def pins(self) -> dict[str, str]:
        """The pinned number of each package."""
        pins = dict(pin.split("==") for pin in self.environment.pins if "==" in pin)
        return {"transformers": self.environment.transformers, **pins}


@dataclass(frozen=True)
class Row:
    """One row of integrations.toml.

    Attributes:
        package: the package whose releases the table lists, as a pin of stacks.toml names it.
        what: what runs, in words.
        tests: the files of tests, and pytest's ``-k`` if only some of them belong to the row.
        title: the package's name in the table.
        page: its page in the documentation.
    """

    name: str
    package: str
    what: str
    tests: tuple[str, ...]
    title: str
    page: str

    @property
    def chosen(self) -> str:
        """The tests as one types them."""
        return " ".join(f'"{word}"' if " " in word else word for word in self.tests)

    @property
    def command(self) -> str:
        """The command that runs the tests."""
        return f"python -m pytest -m slow {self.chosen}"


def stacks() -> dict[str, Stack]:
    """Return every block by name, in the file's order."""
    found = {}
    for name, block in environments.blocks(HERE / "stacks.toml", "stack").items():
        variables, distributed = block.pop("variables", {}), block.pop("distributed", ())
        tests = (*block.pop("tests"), *map(DISTRIBUTED.format, distributed))
        found[name] = Stack(environments.Version(name, **block), variables, tests)
    return found


def rows() -> dict[str, Row]:
    """Return the rows of integrations.toml by name, in the file's order."""
    file = environments.tomllib.loads((HERE / "integrations.toml").read_text(encoding="utf-8"))
    return {
        name: Row(name, **{"package": name, **block, "tests": tuple(block["tests"])})
        for name, block in file["integration"].items()
    }


def split(entry: str) -> tuple[str, int]:
    """Return the script of an entry such as ``ulysses, 4 processes``, and its number of processes (2 if not given)."""
    script, _, processes = entry.partition(", ")
    return script, int(processes.split()[0]) if processes else 2


def stack_of(test: str) -> str:
    """Return the stack that a test's parameters name, or an empty string. The longest name that fits is meant."""
    parameters = test.partition("[")[2].rstrip("]")
    return max((name for name in stacks() if f"-{name}-" in f"-{parameters}-"), key=len, default="")


def releases(row: Row, names: Iterable[str]) -> list[str]:
    """Return the releases of a row's package in these stacks, each once.

    Raises:
        Malformed: A stack does not pin the package.
    """
    known = stacks()
    for name in names:
        if row.package not in known[name].pins:
            raise Malformed(f"stacks.toml: {name} runs tests of {row.name} and does not pin {row.package}")
    return list(dict.fromkeys(known[name].pins[row.package] for name in names))
