"""Result files, and what is made of them: ``python -m compat_matrix.bench.figures`` writes BENCH.md.

``--check`` writes nothing. It fails if BENCH.md is not what the results give, or if a sentence of the documents that
quotes a result has other numbers. A result file holds its part's name, command, commit, date, device and versions,
``what`` is measured, ``notes`` for the reader, and ``rows``: by column, a text or a number with its unit in the name.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import commits, diffable, screen
from ..cells import grouped
from ..diffable import of_results

HERE = Path(__file__).parent
COMMAND = "python -m compat_matrix.bench.figures"
# What is measured on a CPU, in the order of BENCH.md. Each has a result file and a function bench_...
PARTS = [
    "calls", "startup", "overhead", "growth", "syncs", "kernels", "steps", "memory", "training", "sharing",
    "embeddings", "pairs", "pair_counts", "packing", "dealing", "budget", "preferences", "streams",
]  # fmt: skip

Result = dict[str, Any]


def header(command: str, device: str = "cpu") -> dict[str, Any]:
    import torch  # not above: the page is made without torch
    import transformers

    return {
        "command": command,
        **commits.of_code("compat_matrix/bench"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def write(file: Path, found: Result) -> None:
    diffable.write(file, json.dumps(found, indent=1) + "\n")


def read(file: Path) -> Result:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def committed(part: str) -> Result:
    return read(HERE / "results" / f"{part}.json")


def show(title: str, rows: Sequence[Mapping[str, Any]], notes: str = "") -> None:
    text = screen.Markdown(f"## {title}\n\n{of_results(rows)}\n\n{notes}")
    screen.Console(width=None if sys.stdout.isatty() else 150).print(text)


def page(results: Mapping[str, Result]) -> str:
    parts = [f"<!-- Made by {COMMAND} from results/*.json: do not edit. -->", "# What packed rows cost and save"]
    for part, found in ((part, results[part]) for part in PARTS if part in results):
        on = f"{found['device']}, {found['threads']} thread{'s' * (found['threads'] > 1)}, Python {found['python']}"
        on = found.get("on", f"{on}, torch {found['torch']}, Transformers {found['transformers']}")
        parts += [f"## {part}", f"{found['what']}\n\n    {found['command']}"]
        parts += [f"{found['date']}, {commits.named(found)}, {on}.", of_results(found["rows"]), found["notes"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def quotes(results: Mapping[str, Result]) -> list[tuple[str, str]]:
    # Each file comes with a sentence there that quotes results, with the results' numbers.
    times = {row["prompt, completions"]: row for row in results["sharing"]["rows"]}
    packed, padded = (
        [f"{times[of][f'{way} / shared']:.1f}" for of in ("512, 8", "2,048, 16")] for way in ("packed", "padded")
    )
    plans = results["packing"]["rows"]
    more = max(float(row["rows / fewest"]) for row in plans) - 1
    budgets = results["budget"]["rows"]
    apart = [max(float(row[name] or 0) for row in budgets) for name in ("losses", "weights")]
    share = " and ".join(row["share of it"] for row in results["training"]["rows"])
    # rows of the table of docs/packing.md: the passes and peaks of a trainer, padded and by budget
    of_budgets = []
    for trainer, (first, *others) in grouped((row["trainer"], row) for row in budgets).items():
        cells = " | ".join(f"{row['passes']}, {row['peak, MB']} MB" for row in others)
        of_budgets.append(f"| {trainer} | {first['peak, MB']} MB | {cells} |")
    return [
        ("README.md", f"On a CPU, training reaches {share} of the throughput"),
        (
            "docs/shared.md",
            f"a prompt of 512 tokens and 8 completions takes {packed[0]} times as long packed without sharing, and "
            f"{padded[0]} times as long padded; with a prompt of 2,048 tokens and 16 completions, {packed[1]} and "
            f"{padded[1]} times",
        ),
        (
            "docs/packing.md",
            f"A million lengths take at most {max(row['processor, s'] for row in plans):.2f} seconds of processor "
            f"time, and at most {more:.1%} more rows than the fewest that could hold them",
        ),
        (
            "docs/packing.md",
            f"losses are at most {apart[0]:.0e} and weights at most {apart[1]:.0e} from padded training",
        ),
        *(("docs/packing.md", line) for line in of_budgets),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a number is not the results'")
    parser.add_argument("--folder", type=Path, default=HERE, help="of BENCH.md and results/")
    given = parser.parse_args(arguments)
    files = sorted((given.folder / "results").glob("*.json"))
    results = {file.stem: found for file in files if not (found := read(file)).get("toy")}
    file, text = given.folder / "BENCH.md", page(results)
    if not given.check:
        file.write_bytes(text.encode())
        print(f"wrote {file.name}")
        return 0
    wrong = [] if file.exists() and file.read_text(encoding="utf-8") == text else [f"{file.name}: run {COMMAND}"]
    for name, sentence in quotes(results):
        if sentence not in " ".join((commits.ROOT / name).read_text(encoding="utf-8").split()):
            wrong.append(f"{name}: expected the sentence {sentence!r}")
    print("".join(f"{each}. It is not what the results say.\n" for each in wrong), end="", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
