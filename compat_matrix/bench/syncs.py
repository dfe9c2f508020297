"""Part ``syncs``: device-to-host reads and derivations of boundaries in one forward, by layers, version and variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import Progress

from .. import environments

VERSIONS = ("4.44.2", "4.57.6", environments.newest().name)
ARCHITECTURES = ("llama", "mistral", "qwen2")
LAYERS = (2, 4, 8, 16, 32)
QUICK_LAYERS = (2, 4)


def measure(progress: Progress, folder: Path, versions: tuple[str, ...] = VERSIONS, quick: bool = False) -> Any:
    """Count in every version's own environment (kept in ``folder``) and process, and return the result of the part."""
    from .syncs_once import DOCUMENTS

    asked = ["--layers", *map(str, QUICK_LAYERS if quick else LAYERS)]
    asked += ["--architectures", *ARCHITECTURES[: 1 if quick else 3]]
    task = progress.add_task("syncs", total=len(versions))
    found: dict[str, Any] = {}
    with environments.only_our_packages() as packages:
        for name in versions:
            python = environments.make(environments.version(name), folder.resolve())
            found[name] = environments.printed(python, packages, "compat_matrix.bench.syncs_once", *asked)
            progress.update(task, advance=1)
    return {"documents": list(DOCUMENTS), "versions": found}
