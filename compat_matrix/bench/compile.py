"""Part ``compile``: a compiled model on packed rows of many layouts: its graphs and its time.

The layouts differ in the number of documents, their lengths and the length of the row. The first pass over them
compiles. Later passes are timed against the same model without ``torch.compile``, in turns. Graphs are counted once
more with ``fullgraph=True``, under which ``torch.compile`` raises an error at the first break.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any, Callable

import torch
from rich.progress import Progress

import fa2patch

from . import timing
from .models import small_llama

WAYS = {"position_ids": {}, "lengths": {"return_flash_attn_kwargs": True}}
"""What a batch says about its documents, as options of the collator."""

LAYOUTS, LAYERS, HIDDEN = 30, 4, 128
ROW = (96, 512)
"""The least and the most tokens of a row."""


def measure(progress: Progress, quick: bool = False, repeats: int = 9) -> Any:
    """Measure both ways and return the result of the part.

    Args:
        repeats: the passes over all layouts that are timed, for the compiled and the eager model each.
    """
    layouts, repeats = (3, 2) if quick else (LAYOUTS, repeats)
    backend = "aot_eager" if quick else "inductor"
    task = progress.add_task("compile", total=2 * len(WAYS))
    rows = []
    for way, options in WAYS.items():
        rows_of_way = batches(layouts, options)
        found = {"way": way, **compared(rows_of_way, backend, repeats)}
        progress.update(task, advance=1)
        rows.append({**found, "whole_graphs": whole(rows_of_way)})
        progress.update(task, advance=1)
    model = {"layers": LAYERS, "hidden": HIDDEN, "backend": backend}
    return {
        "layouts": layouts,
        **model,
        "repeats": repeats,
        "rows": rows,
        "sizes": sizes(batches(layouts, WAYS["lengths"])),
    }


def batches(count: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return packed rows with labels. Their layouts are random, with the same seed every time."""
    draw = random.Random(0)
    collate = fa2patch.DataCollatorWithFlattening(**options)
    made = []
    for _ in range(count):
        left, examples = draw.randint(*ROW), []
        while left > 0:
            length = min(left, draw.randint(2, 128))
            examples.append({"input_ids": [draw.randrange(3, 500) for _ in range(length)]})
            left -= length
        made.append(collate(examples))
    return made


def patched() -> Any:
    """Return a patched Llama in train mode. Its weights are the same every time."""
    model = small_llama(LAYERS, HIDDEN)
    fa2patch.apply(model, kernel="reference")
    return model


class Counting:
    """A backend of ``torch.compile`` that counts the graphs it is given and compiles them with another backend."""

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self.backend = torch._dynamo.lookup_backend(backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.backend(graph, inputs)


def compared(rows: list[dict[str, Any]], backend: str, repeats: int) -> dict[str, Any]:
    """Return the graphs without ``fullgraph``, the seconds of the first pass, and the times of later passes."""
    torch._dynamo.reset()
    counting, eager = Counting(backend), patched()
    compiled = torch.compile(patched(), backend=counting)
    started = time.perf_counter()
    steps(compiled, rows)
    first = time.perf_counter() - started
    rivals = {"compiled": lambda: steps(compiled, rows), "eager": lambda: steps(eager, rows)}
    taken = timing.rounds(rivals, repeats, warm_up=1)
    ratios = [ours / others for ours, others in zip(taken["compiled"], taken["eager"])]
    return {
        "graphs": counting.graphs,
        "first_pass_seconds": round(first, 1),
        **{f"{name}_ms": round(1e3 * statistics.median(seconds) / len(rows), 2) for name, seconds in taken.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def whole(rows: list[dict[str, Any]]) -> int | str:
    """Return the graphs under ``fullgraph=True``, or the class of the error at the first layout that breaks them."""
    torch._dynamo.reset()
    counting = Counting("aot_eager")
    try:
        steps(torch.compile(patched(), backend=counting, fullgraph=True), rows)
    except Exception as error:
        return type(error).__name__
    return counting.graphs


def sizes(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many different sizes the rows have. ``mode="reduce-overhead"`` records a CUDA graph for each.

    Inductor keeps a recording for every combination of the graph's whole numbers (torch/_inductor/compile_fx.py,
    ``cudagraphify_impl``): here the tokens, the documents and ``max_seqlen``. Rounding is up to a power of two.
    """
    numbers = [(row["input_ids"].numel(), row["cu_seq_lens_q"].numel() - 1, row["max_length_q"]) for row in rows]
    rounded = [tuple(1 << (number - 1).bit_length() for number in row) for row in numbers]
    return {
        "as_they_are": len(set(numbers)),
        "documents_and_max_seqlen_rounded": len({(one[0], *other[1:]) for one, other in zip(numbers, rounded)}),
        "tokens_rounded_too": len(set(rounded)),
    }


def steps(model: Callable[..., Any], rows: list[dict[str, Any]]) -> None:
    """Run forward and backward of every row."""
    for row in rows:
        model(**row).loss.backward()
