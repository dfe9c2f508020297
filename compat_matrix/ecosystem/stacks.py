"""Read stacks.toml: groups of packages, as environments that ``compat_matrix.environments`` makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import environments

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Stack:
    """One block of stacks.toml.

    Attributes:
        environment: what its environment is made of.
        trl: TRL's version, or None where Transformers' own Trainer is checked.
        variables: environment variables of its processes.
        distributed: scripts of tests/distributed that run in it, as ``distributed.launched`` takes them.
        checks: the names of its checks in one process; None for all of ``checks.CHECKS``.
    """

    name: str
    environment: environments.Version
    trl: str | None
    variables: dict[str, str]
    distributed: tuple[str, ...]
    checks: tuple[str, ...] | None = None


def stacks() -> dict[str, Stack]:
    """Return every block by name, in the file's order."""
    file = environments.tomllib.loads((HERE / "stacks.toml").read_text(encoding="utf-8"))
    found = {}
    for name, block in file["stack"].items():
        settings = {**file["defaults"], **block}
        distributed = tuple(settings.pop("distributed", ()))
        variables = settings.pop("variables", {})
        checks = tuple(settings.pop("checks")) if "checks" in settings else None
        pins = tuple(settings.pop("pins"))
        trl = next((pin.partition("==")[2] for pin in pins if pin.startswith("trl==")), None)
        found[name] = Stack(
            name, environments.Version(name, pins=pins, **settings), trl, variables, distributed, checks
        )
    return found


def checked() -> dict[str, Stack]:
    """Return the blocks that ``python -m compat_matrix.ecosystem`` checks. The others are for tests of integrations."""
    return {name: stack for name, stack in stacks().items() if stack.checks != () or stack.distributed}
