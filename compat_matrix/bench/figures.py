"""Write BENCH.md and the pictures from the committed results: ``python -m compat_matrix.bench.figures``.

``--check`` writes nothing. It fails if BENCH.md differs from what the results give; pictures are not compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .. import commits
from . import PARTS, about, tables
from .table import Found

HERE = Path(__file__).parent
COMMAND = "python -m compat_matrix.bench.figures"
OWED = (
    "There are no GPU figures yet. `python -m compat_matrix.bench.gpu --out FOLDER` makes "
    "FOLDER/gpu.json. Commit it as results/gpu.json."
)

WHAT = {
    "startup": "The time to import fa2patch after torch, and to patch a large model.",
    "syncs": "How often one forward waits for the device, and how often it derives boundaries, by layers.",
    "dry": "What every GPU kernel's path dispatches beyond the kernel itself, traced without a GPU.",
    "kernels": "The cost of attention within documents: the reference kernel and other ways.",
    "overhead": "The time that the patch adds on the host, without the kernel.",
    "mixers": "Packed rows of hybrid models compared with their documents run one by one.",
    "training": "Training on the same mini-batches, padded and packed.",
    "sharing": "One prompt with many completions: padded, packed, and packed with the prompt once.",
    "embeddings": "sentence-transformers: encode and a training step, padded and patched.",
    "packing": "Planners decide which examples share a row: fa2patch's, TRL's and axolotl's on the same lengths.",
    "collator": "DataCollatorWithFlattening: fa2patch's and Transformers' on the same examples.",
    "compile": "Packed rows of many layouts in a compiled model: graphs, and time beside the eager model.",
    "gpu": "Models of published sizes with random weights.",
}


def main(arguments: list[str] | None = None) -> int:
    """Write BENCH.md and the pictures, or compare BENCH.md with the results.

    Args:
        arguments: the command line; None reads ``sys.argv``.

    Returns:
        The exit code: 1 if ``--check`` finds a difference.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if BENCH.md is not as it would be")
    parser.add_argument("--folder", type=Path, default=HERE, help="of BENCH.md, bench.png and results/")
    given = parser.parse_args(arguments)
    results = read(given.folder / "results")
    file, text = given.folder / "BENCH.md", page(results)
    if given.check:
        if file.exists() and file.read_text(encoding="utf-8") == text:
            return 0
        print(f"{file.name} is not what the results say. Run {COMMAND} and commit it.", file=sys.stderr)
        return 1
    file.write_bytes(text.encode())
    print(f"wrote {file.name}")
    from . import plots

    if all(part in results for part in ("syncs", "kernels", "training")):
        plots.cpu(results, given.folder / "bench.png")
        print("wrote bench.png")
    if "gpu" in results:
        plots.gpu(results["gpu"], given.folder / "gpu.png")
        print("wrote gpu.png")
    return 0


def read(folder: Path) -> dict[str, Found]:
    """Read the results in the folder, by part. Results of toy runs are left out."""
    found = {}
    for part in (*PARTS, "gpu"):
        file = folder / f"{part}.json"
        if file.exists():
            result = about.read(file)
            if not result.get("toy"):
                found[part] = result
    return found


def page(results: dict[str, Found]) -> str:
    """Return the text of BENCH.md."""
    lines = [f"<!-- Made by {COMMAND} from results/*.json: do not edit. -->", "# What packed rows cost and save"]
    if all(part in results for part in ("syncs", "kernels", "training")):
        lines.append("![Reads per forward, attention by documents, training throughput](bench.png)")
    for part, found in results.items():
        lines += [f"## {part}", f"{WHAT[part]}\n\n    {found['command']}", measured_on(found)]
        lines += [table.as_markdown() for table in tables.of({part: found})]
        if part == "gpu":
            lines.append("![Throughput and memory](gpu.png)")
    if "gpu" not in results:
        lines += ["## gpu", OWED]
    return "\n\n".join(lines) + "\n"


def measured_on(found: Found) -> str:
    """Return one sentence with the date, commit, device and versions of a result."""
    made = f"{found['date']}, {commits.named(found)}"
    threads = "" if found["part"] in ("syncs", "gpu") else f", {found['threads']} thread"
    versions = f"Python {found['python']}, torch {found['torch']}"
    if found["part"] == "syncs":
        each = (f"{name} with torch {run['torch']}" for name, run in found["versions"].items())
        return f"{made}. Transformers {', '.join(each)}. A count, the same on any machine."
    if found["part"] == "dry":
        return f"{made}. torch {', '.join(found['torch_versions'])}. A count, the same on any machine."
    if found["part"] == "packing":
        each = (f"{name} {number}" for name, number in found["versions"].items() if name != "transformers")
        return f"{made}, {found['device']}{threads}, {', '.join(each)}."
    return f"{made}, {found['device']}{threads}, {versions}, Transformers {found['transformers']}."


if __name__ == "__main__":
    sys.exit(main())
