"""Says how many cells are stale, and because of which code: ``python -m compat_matrix.stale``.

A cell is stale if an item of its key is another one now (see ``keys``), if it has no key, or if versions.toml asks for
another environment. Evidence ages; only a release needs cells that are not stale.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from . import environments
from .cells import Environment
from .keys import Sources
from .results import EVIDENCE, read

NO_KEY = "it was made before cells had keys"


def cells(environment: Environment, sources: Sources) -> dict[str, list[str]]:
    """Return the cells of an environment that are stale, each with the items that are others now.

    Args:
        environment: the evidence.
        sources: the present sources.
    """
    wanted = environments.version(environment.name).stated
    other = [f"versions.toml: {environment.name}"] if list(environment.requirements) != wanted else []
    found = {}
    for name, cell in environment.cells.items():
        known = None if cell.made is None else cell.made.key
        against = [NO_KEY] if known is None else sources.changed(known) + other
        if against:
            found[name] = against
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print how many cells are stale, in each environment and because of which items."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.stale", description=__doc__)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="folder of the evidence")
    parser.add_argument("--cells", action="store_true", help="name every stale cell")
    given = parser.parse_args(arguments)
    sources, total, reasons = Sources(environments.HERE.parent), 0, Counter[str]()
    results = read(given.evidence)
    for environment in results.environments:
        found = cells(environment, sources)
        total += len(found)
        reasons.update(item for items in found.values() for item in items)
        if found:
            print(f"{environment.name}: {len(found)} of {len(environment.cells)} cells are stale")
        for name, items in found.items() if given.cells else ():
            print(f"  {name}: {', '.join(items[:3])}")
    for item, count in reasons.most_common(20):
        print(f"{count:6,} because of {item}")
    print(f"{total:,} of {len(results.made):,} cells are stale.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
