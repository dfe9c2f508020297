"""Makes the tables of docs/long_rows.md from the formulas of :mod:`compat_matrix.long_rows`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import long_rows
from ..long_rows import DECODERS, Decoder
from .markdown import table

ROWS = {"16k": 2**14, "64k": 2**16, "256k": 2**18, "1M": 2**20}
"""Tokens of a row."""

PROCESSES = (2, 4, 8, 16, 32)
GPUS = (8, 32)
BUDGET = 64 * 2**30
"""Bytes of a GPU of 80 GiB that the counted tensors may take. A fifth is left for what is not counted."""


def costs() -> str:
    """The table of bytes for an 8B model, by length of a row and number of processes."""
    head = ["row", "processes", "tokens of a process", "a layer sends", "a step sends", "activations"]
    return "\n".join(table([*head, "with checkpointing", "logits"], _costs(DECODERS["8B"])))


def _costs(model: Decoder) -> Iterator[list[str]]:
    for name in ("64k", "256k", "1M"):
        for processes in PROCESSES:
            tokens = ROWS[name] // processes
            sent = long_rows.bytes_sent_by_a_layer(tokens, processes, model.heads, model.key_heads, model.head_dim)
            found = [
                sent,
                long_rows.bytes_sent_by_a_step(model, tokens, processes),
                long_rows.bytes_of_activations(model, tokens, checkpointing=False),
                long_rows.bytes_of_activations(model, tokens),
                long_rows.bytes_of_logits(model, tokens),
            ]
            yield [name, str(processes), f"{tokens:,}", *map(size, found)]


def engines() -> str:
    """The table of what fits, by length of a row, size of the model and number of GPUs."""
    return "\n".join(table(["row", "model", *(f"{count} GPUs" for count in GPUS)], _engines()))


def _engines() -> Iterator[list[str]]:
    for name, tokens in ROWS.items():
        for model, decoder in DECODERS.items():
            yield [name, model, *(engine(decoder, tokens, count) for count in GPUS)]


def engine(model: Decoder, tokens: int, gpus: int) -> str:
    """The first of the ways to train with rows of ``tokens`` that fits; ways with fewer processes come first."""
    left = BUDGET - long_rows.bytes_of_states(model, gpus)
    if left < 0:
        return "weights and optimizer do not fit"
    for processes in (1, *PROCESSES):
        if processes > gpus or model.heads % processes:
            continue
        own = tokens / processes
        kept = long_rows.bytes_of_activations(model, own)
        ways = {
            "": long_rows.bytes_of_activations(model, own, checkpointing=False) + long_rows.bytes_of_logits(model, own),
            "checkpointing": kept + long_rows.bytes_of_logits(model, own),
            "checkpointing, loss in chunks": kept,
        }
        for way, needed in ways.items():
            if needed <= left:
                ulysses = f"Ulysses over {processes}" if processes > 1 else ""
                return ", ".join(filter(None, ["ZeRO-3", ulysses, way]))
    return "does not fit"


def size(number: float) -> str:
    """Bytes as a number of MiB or GiB with two digits or more."""
    value, unit = (number / 2**30, "GiB") if number >= 2**30 else (number / 2**20, "MiB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
