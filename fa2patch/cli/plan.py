"""``fa2patch plan``: what padding, packing and a budget of tokens would cost on a dataset, from its lengths alone."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..packing import ATTENTION_COST, PackedBatchSampler, Plan, example_costs, imbalance, plan
from ..packing.strategies import Ints
from .options import as_json_option
from .output import Shown, Table, escaped, in_one_line, new_console, print_found

# bars of the histogram, the most characters of one, and those before and behind it
BINS, BAR, BESIDE_BAR = 10, 40, 36
# Below this share of padding, packing brings little. Unsloth measured its padded code with compiled blocks 5 to 17 %
# faster than its packed code where steps wait for the host, so padding has to cost more than that.
LITTLE = 0.1


@dataclass(frozen=True)
class Batching:
    """What one way of making batches takes in an epoch."""

    name: str
    steps: int  # of the optimizer
    passes: float  # forwards and backwards of each rank in a step, on average
    tokens: int  # that are computed, padding included
    padding: float  # the share of padding in them
    largest: int  # tokens of the largest forward of a rank, padding included, which memory grows with
    cost: float  # tokens and attention (packing.example_costs), with that of padded batches as 1
    imbalance: float  # the costliest rank of a step over the mean, averaged over steps


@click.command("plan")
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--max-tokens", type=click.IntRange(1), required=True, help="The budget: tokens of a pass, or of a row.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Examples of a rank's mini-batch."
)
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Processes that train together.")
@click.option("--tokenizer", metavar="NAME", help="A tokenizer's folder or name, where DATASET holds texts.")
@as_json_option
def plan_command(
    dataset: Path, max_tokens: int, batch_size: int, ranks: int, tokenizer: str | None, as_json: bool
) -> None:
    """Compare padding, packing and a budget of tokens on the lengths of DATASET, before anything is trained.

    DATASET is a .jsonl file (input_ids, or with --tokenizer text, or prompt and completion), a .json, .txt or .npy file
    of lengths, or a folder that datasets has saved. Exits with 2 if it cannot be read, or if an example is longer than
    the budget.
    """
    lengths = _lengths(dataset, tokenizer)
    longer = np.flatnonzero(lengths > max_tokens)
    if len(longer):
        raise click.BadParameter(
            f"looked for a budget that holds each example, found {len(longer)} of {len(lengths)} that are longer: the "
            f"longest has {lengths.max()} tokens. Raise it, or truncate the dataset.",
            param_hint="--max-tokens",
        )
    filled = plan(lengths, max_tokens)
    ways = compared(filled, batch_size, ranks)
    found = {"examples": len(lengths), "tokens": int(lengths.sum()), "ways": [asdict(way) for way in ways]}
    print_found(found, as_json, _shown(filled, ways, ranks))


def _shown(filled: Plan, ways: list[Batching], ranks: int) -> Shown:
    lengths, widest = filled.lengths, min(BAR, new_console().width - BESIDE_BAR)  # no bars where it is narrow
    yield f"{len(lengths):,} examples, {lengths.sum():,} tokens, {lengths.mean():.0f} in each on average"
    edges = np.unique(np.linspace(lengths.min(), lengths.max() + 1, BINS + 1).astype(np.int64))
    counts, _ = np.histogram(lengths, edges)
    for start, stop, count in zip(edges, edges[1:], counts):
        yield f"{start:>8,} to {stop - 1:>8,} tokens {'█' * int(np.ceil(widest * count / counts.max()))} {count:,}"
    rows = []
    for way in ways:
        tokens = (f"{way.tokens:,}", f"{way.padding:.0%}", f"{way.largest:,}")
        last = [f"{way.imbalance:.2f}"] * (ranks > 1)
        rows.append((way.name, f"{way.steps:,}", f"{way.passes:.1f}", *tokens, f"{way.cost:.2f}", *last))
    last = ["imbalance"] * (ranks > 1)
    yield Table(("batches", "steps", "passes", "tokens", "padding", "largest pass", "cost", *last), rows)
    padded, _, cut, _ = ways
    if padded.padding < LITTLE:
        yield (
            f"Padding is {padded.padding:.0%} of the padded batches: packing saves little here. Train padded, or group "
            "examples of similar lengths."
        )
        return
    yield (
        f"Packing leaves {1 - cut.cost:.0%} of the work away, with the same steps and the same loss; passes keep each "
        f"forward at {cut.largest:,} tokens instead of {padded.largest:,}. A tiny "
        "model (2 layers of 64) gets no faster: its steps take what starting their operators takes."
    )
    yield f"Rows filled to the budget are another training: {escaped(filled)}"


def compared(filled: Plan, batch_size: int, ranks: int) -> list[Batching]:
    # The ways are padded and packed mini-batches, mini-batches in passes, and filled rows.
    lengths, max_tokens = filled.lengths, filled.max_tokens
    batches = plan(lengths, None, "mini_batches", batch_size=batch_size)
    padded = _way("padded mini-batches", [np.full(len(row), lengths[row].max()) for row in batches], lengths, ranks)
    whole = _way("mini-batches, packed", [lengths[row] for row in batches], lengths, ranks)
    sampler = PackedBatchSampler(lengths, max_tokens, ranks, "all", strategy="mini_batches", batch_size=batch_size)
    cut = replace(
        whole,
        name="mini-batches, in passes",
        passes=float(np.mean(sampler.passes)),
        largest=min(max_tokens, whole.largest),
        imbalance=imbalance(sampler.costs()),
    )
    rows = _way("rows filled to the budget", [lengths[row] for row in filled], lengths, ranks)
    return [replace(way, cost=way.cost / padded.cost) for way in (padded, whole, cut, rows)]


def _way(name: str, rows: list[Ints], lengths: Ints, ranks: int) -> Batching:
    # `rows` has the lengths with padding of the documents of each row, or batch, of one rank.
    costs = np.array([example_costs(each, ATTENTION_COST).sum() for each in rows])
    tokens = [int(each.sum()) for each in rows]
    full = costs[: len(rows) // ranks * ranks].reshape(-1, ranks)
    padding = 1 - float(lengths.sum()) / sum(tokens)
    return Batching(
        name, -(-len(rows) // ranks), 1.0, sum(tokens), padding, max(tokens), float(costs.sum()), imbalance(full)
    )


# --- lengths ---------------------------------------------------------------------------------------------------------


def _lengths(path: Path, tokenizer: str | None) -> Ints:
    try:
        found = np.array(_read(path, tokenizer), np.int64)
    except click.UsageError:
        raise
    except Exception as error:
        raise click.BadParameter(f"{path.name} cannot be read: {in_one_line(error)}", param_hint="DATASET") from None
    if found.ndim != 1 or not len(found) or found.min() < 1:
        raise click.BadParameter(
            f"looked for one length of at least 1 for each example, found an array {list(found.shape)}"
            f"{f' with {found.min()}' if found.size else ''}. Leave empty examples out.",
            param_hint="DATASET",
        )
    return found


def _read(path: Path, tokenizer: str | None) -> Any:
    rows: Any
    if path.is_dir():
        rows = importlib.import_module("datasets").load_from_disk(path)
    elif path.suffix == ".npy":
        return np.load(path)
    else:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return json.loads(text) if path.suffix == ".json" else [int(word) for word in text.split()]
        rows = (json.loads(line) for line in text.splitlines() if line.strip())
    loaded = None
    if tokenizer is not None:
        loaded = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tokenizer)
    return [_length(row, loaded) for row in rows]


def _length(row: dict[str, Any], tokenizer: Any) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    texts = [row[name] for name in ("text", "prompt", "completion") if isinstance(row.get(name), str)]
    if texts and tokenizer is not None:
        return len(tokenizer("".join(texts))["input_ids"])
    need = "--tokenizer NAME, because it holds texts" if texts else "input_ids, text, or prompt and completion"
    raise click.BadParameter(f"an example has {', '.join(row)}; looked for {need}.", param_hint="DATASET")
