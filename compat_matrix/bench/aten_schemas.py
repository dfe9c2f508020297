"""Read the schemas of torch's attention operators by version: ``python -m compat_matrix.bench.aten_schemas``.

They are written to ``aten_schemas.json``, which ``tests/kernels/test_schemas.py`` holds fa2patch's calls against. For
each schema the file has the versions of torch that have it. With ``--versions``, the other versions in the file stay.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from .. import environments
from . import dry
from .__main__ import ENVIRONMENTS

FILE = Path(__file__).with_suffix(".json")
OPERATORS = (
    "_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
    "_efficient_attention_backward",
)  # fmt: skip
OLDER = ("2.1.2", "2.2.2", "2.3.1")
"""The versions before those of part ``dry``, from the oldest on that fa2patch supports."""

_READ = "import json, torch; print(json.dumps([str(getattr(torch.ops.aten, x).default._schema) for x in {}]))"


def main(arguments: list[str] | None = None) -> int:
    """Read the schemas in each version's environment and write the file.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code, always 0.
    """
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.aten_schemas", description=__doc__)
    parser.add_argument("--versions", nargs="+", default=(*OLDER, *dry.TORCH), help="of torch")
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where environments are kept")
    given = parser.parse_args(arguments)
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for version in given.versions:
        python = environments.make(dry.environment(version), given.environments.resolve())
        said = subprocess.run([str(python), "-c", _READ.format(OPERATORS)], check=True, capture_output=True, text=True)
        known = with_version(known, version, json.loads(said.stdout))
    FILE.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return 0


def with_version(known: dict[str, list[str]], version: str, schemas: list[str]) -> dict[str, list[str]]:
    """The versions by schema, with this version's schemas in the place of those known for it. Both are sorted."""
    found = {schema: {*versions} - {version} for schema, versions in known.items()}
    for schema in schemas:
        found.setdefault(schema, set()).add(version)

    def number(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    ordered = {schema: sorted(versions, key=number) for schema, versions in found.items() if versions}
    return dict(sorted(ordered.items(), key=lambda one: (one[0].partition("(")[0], number(one[1][0]))))


if __name__ == "__main__":
    sys.exit(main())
