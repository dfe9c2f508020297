"""Writes the schemas of torch's attention operators into ``aten_schemas.json``, beside those of other versions.

``python tests/helpers/aten_schemas.py``, with this repository on PYTHONPATH, does so for the torch that it runs with.
``tests/kernels/test_schemas.py`` holds fa2patch's calls against that file.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from compat_matrix.bench.operators import OPERATORS

SCHEMAS = Path(__file__).with_name("aten_schemas.json")


def with_version(known: dict[str, list[str]], version: str, schemas: list[str]) -> dict[str, list[str]]:
    # This version's schemas take the place of those known for it. Schemas and versions are sorted.
    pairs = [(schema, other) for schema, others in known.items() for other in others if other != version]
    pairs += [(schema, version) for schema in schemas]
    found: dict[str, list[str]] = {}
    for schema, of in sorted(pairs, key=lambda one: (one[0].partition("(")[0], *map(int, one[1].split(".")))):
        found.setdefault(schema, []).append(of)
    return found


if __name__ == "__main__":
    here = [str(getattr(torch.ops.aten, name).default._schema) for name in OPERATORS]
    made = with_version(json.loads(SCHEMAS.read_text(encoding="utf-8")), torch.__version__.partition("+")[0], here)
    SCHEMAS.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
