"""What rows of stated shapes cost in padding, and how many graphs they need.

``python -m compat_matrix.bench.static_shapes`` counts the graphs of a tiny model for 30 layouts of documents, and gives
the padding of FLAN-like lengths in planned rows, mini-batches and passes of a budget. It takes about two minutes on one
core.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import fa2patch
from fa2patch.documents.row_shape import RowShape
from fa2patch.packing import deal, plan

from .. import tiny_models
from ..check.rows import documents
from .workloads import FLAN

# the tokens of a full row, and the most documents in it
LENGTH, MOST = 64, 8

# options of the collator, by the shapes that they make
KINDS: dict[str, dict[str, Any]] = {
    name: {"pad_to_multiple_of": to, "max_documents": MOST, "longest_document": longest}
    for name, to, longest in (
        ("one shape", LENGTH, LENGTH),
        ("powers of two", "power", LENGTH),
        ("eighths between powers", "eighth", LENGTH),
        ("longest document by powers", LENGTH, "power"),
    )
}

BUDGET, BATCH, CUT, COUNT = 4096, 8, 64, 20_000


def layouts(count: int) -> list[list[int]]:
    # The layouts fit a row of LENGTH tokens and fill at least half of it.
    drawn, made = random.Random(0), [[LENGTH // 4] * 2]
    while len(made) < count:
        number = drawn.randint(1, MOST)
        lengths = [drawn.randint(1, 2 * LENGTH // number) for _ in range(number)]
        if LENGTH // 2 <= sum(lengths) <= LENGTH:
            made.append(lengths)
    return made


def collated(lengths: Sequence[int], **options: Any) -> dict[str, Any]:
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True, **options)
    return dict(collate([{"input_ids": doc.tolist()} for doc in documents(*lengths)]), use_cache=False)


def graphs_of(options: dict[str, Any], rows: Iterable[Sequence[int]]) -> int:
    # Shapes and numbers are constants of a graph.
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph  # type: ignore[no-any-return]

    model = tiny_models.build("llama", "sdpa")
    fa2patch.apply(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=100):
        for lengths in rows:
            compiled(**collated(lengths, **options)).loss.backward()
    torch._dynamo.reset()
    return len(seen)


def padding_of(rows: Sequence[int], to: int | str | None, most: int = 0) -> tuple[float, int]:
    # The share of padding, and how many different lengths the padded rows have. With a budget of "most" tokens, no row
    # is padded beyond it.
    padded = [RowShape(to, max_tokens=most or None).length(tokens) for tokens in rows]
    return 1 - sum(rows) / sum(padded), len(set(padded))


def main() -> None:
    rows = layouts(30)
    print(f"{'30 layouts of up to ' + str(LENGTH) + ' tokens':44} graphs padding")
    for kind, options in KINDS.items():
        share, _ = padding_of([sum(row) for row in rows], options["pad_to_multiple_of"])
        print(f"{kind:44} {graphs_of(options, rows):6} {share:7.1%}")
    lengths = FLAN.draw(COUNT)
    planned = [sum(lengths[at] for at in row) for row in plan(lengths, BUDGET)]
    batches = [sum(lengths[at : at + BATCH]) for at in range(0, COUNT, BATCH)]
    cut = [deal(lengths[at : at + CUT], 1, BUDGET) for at in range(0, COUNT, CUT)]
    passes = [sum(lengths[at * CUT + one] for one in each) for at, step in enumerate(cut) for each in step.passes[0]]
    for name, tokens, budget in (
        (f"rows of at most {BUDGET:,} tokens", planned, 0),
        (f"mini-batches of {BATCH}", batches, 0),
        (f"mini-batches of {CUT} in passes of {BUDGET:,}", passes, BUDGET),
    ):
        print(f"\n{'FLAN-like, ' + name:44} lengths padding")
        for to in (None, 64, 256, "eighth", "power", budget or max(tokens)):
            share, different = padding_of(tokens, to, budget)
            print(f"{'pad_to_multiple_of=' + repr(to):44} {different:7} {share:7.1%}")


if __name__ == "__main__":
    main()
