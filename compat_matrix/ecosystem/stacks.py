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
# It runs a script of tests/distributed, such as "trainer zero2" or "ulysses, 4 processes".
DISTRIBUTED = "tests/distributed/test_distributed.py::test_a_script_in_several_processes[{}]"


@dataclass(frozen=True)
class Stack:
    environment: environments.Version
    variables: dict[str, str]  # of its processes
    tests: tuple[str, ...]  # what pytest is given: files, tests, and -k. Without any, only tests of the rows use it

    @property
    def name(self) -> str:
        return self.environment.name

    @property
    def pins(self) -> dict[str, str]:
        pins = dict(pin.split("==") for pin in self.environment.pins if "==" in pin)
        return {"transformers": self.environment.transformers, **pins}


@dataclass(frozen=True)
class Row:
    name: str
    package: str  # whose releases the table lists, as a pin of stacks.toml names it
    what: str  # what runs, in words
    tests: tuple[str, ...]  # files, and pytest's -k if only some of their tests belong to the row
    title: str  # the package's name in the table
    page: str  # of the documentation

    @property
    def chosen(self) -> str:
        # Words are quoted as one types them.
        return " ".join(f'"{word}"' if " " in word else word for word in self.tests)

    @property
    def command(self) -> str:
        return f"python -m pytest -m slow {self.chosen}"


def stacks() -> dict[str, Stack]:
    found = {}
    for name, block in environments.blocks(HERE / "stacks.toml", "stack").items():
        variables, distributed = block.pop("variables", {}), block.pop("distributed", ())
        tests = (*block.pop("tests"), *map(DISTRIBUTED.format, distributed))
        found[name] = Stack(environments.Version(name, **block), variables, tests)
    return found


def rows() -> dict[str, Row]:
    file = environments.tomllib.loads((HERE / "integrations.toml").read_text(encoding="utf-8"))
    return {
        name: Row(name, **{"package": name, **block, "tests": tuple(block["tests"])})
        for name, block in file["integration"].items()
    }


def split(entry: str) -> tuple[str, int]:
    # "ulysses, 4 processes" names 4 processes. Without a number there are 2.
    script, _, processes = entry.partition(", ")
    return script, int(processes.split()[0]) if processes else 2


def stack_of(test: str) -> str:
    # The longest name that fits is meant.
    parameters = test.partition("[")[2].rstrip("]")
    return max((name for name in stacks() if f"-{name}-" in f"-{parameters}-"), key=len, default="")


def releases(row: Row, names: Iterable[str]) -> list[str]:
    known = stacks()
    for name in names:
        if row.package not in known[name].pins:
            raise Malformed(f"stacks.toml: {name} runs tests of {row.name} and does not pin {row.package}")
    return list(dict.fromkeys(known[name].pins[row.package] for name in names))
