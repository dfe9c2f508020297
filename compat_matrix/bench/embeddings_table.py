"""The table of part ``embeddings``."""

from __future__ import annotations

from .table import Found, Table


def tables(found: Found) -> list[Table]:
    """Tokens and times of encode and of a training step, padded and patched."""
    rows = []
    for run in found["rows"]:
        ways = [run[name] for name in ("padded", "patched")]
        saved = 1 - ways[1]["tokens"] / ways[0]["tokens"]
        rows.append(
            [
                f"{run['texts']}, {run['what']}",
                *(f"{way['tokens']:,}" for way in ways),
                f"{saved:.0%}",
                *(f"{way['median_ms']:,.0f}" for way in ways),
                f"{run['padded_by_patched']:.2f}",
            ]
        )
    head = ["texts", "padded: tokens", "patched: tokens", "saved", "padded, ms", "patched, ms", "padded / patched"]
    notes = (
        f"sentence-transformers {found['sentence_transformers']} with a BERT of {found['layers']} layers, hidden size "
        f"{found['hidden']}, {found['dtype']}, sdpa; medians of {found['repeats']} rounds, taken in turns. `encode` "
        f"gets {found['texts']} texts in batches of {found['batch']}, which it sorts by length itself. A training step "
        f"is forward and backward of MultipleNegativesRankingLoss on {found['pairs']} pairs in random order. Lengths "
        "are lognormal: sentences have 24 tokens on average, passages 140. Ratios are medians over the rounds."
    )
    return [Table("Embeddings of texts", head, rows, notes)]
