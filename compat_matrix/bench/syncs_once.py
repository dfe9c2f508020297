"""Count reads and derivations in one forward, with this environment's Transformers.

Models are loaded with ``flash_attention_2``, in bfloat16 and train mode, with labels; the row holds five documents.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from typing import Any

import torch

from ..check import stand_in
from .counting import Count, counted, watched

DOCUMENTS = (7, 5, 1, 9, 6)
WAYS = ("upstream", "upstream, lengths", "fa2patch", "fa2patch, lengths")


def forward(architecture: str, layers: int, way: str, checkpointed: bool = False) -> dict[str, Any]:
    """Return the counts of one forward, or ``refused`` if this version's forward does not take the collator's lengths.

    Args:
        way: one of ``WAYS``.
        checkpointed: enable gradient checkpointing and count the backward too, which computes every layer again.
    """
    import fa2patch

    from .. import tiny_models

    changes = tiny_models.with_layers(architecture, layers)
    model = tiny_models.build(architecture, "flash_attention_2", torch.bfloat16, **changes).train()
    batch = row("lengths" in way)
    if way.startswith("fa2patch"):
        fa2patch.apply(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(**row(False), use_cache=False)  # some checks are made only once per model
    try:
        with counted() as count:
            loss = model(**batch, use_cache=False).loss
            if checkpointed:
                loss.backward()
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        return {"refused": str(error).partition(" ")[2]}
    return _as_json(count)


def row(lengths: bool) -> dict[str, Any]:
    """Return the collator's batch of the documents, with or without their lengths."""
    import fa2patch

    from ..check import rows

    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=lengths)
    return collate([{"input_ids": ids.tolist()} for ids in rows.documents(*DOCUMENTS)])


def _as_json(count: Count) -> dict[str, Any]:
    return {**vars(count), "where": dict(sorted(count.where.items()))}


def main(arguments: list[str] | None = None) -> None:
    """Count all architectures, layer counts and variants, and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.syncs_once", description=__doc__)
    parser.add_argument("--architectures", nargs="+", default=["llama"])
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4])
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stand_in.flash_attn_varlen_func = watched(stand_in.flash_attn_varlen_func)
    stand_in.install()
    from . import about

    counts = {
        architecture: {way: {str(n): forward(architecture, n, way) for n in given.layers} for way in WAYS}
        for architecture in given.architectures
    }
    first, most = given.architectures[0], max(given.layers)
    checkpointed = {way: forward(first, most, way, checkpointed=True) for way in WAYS}
    versions = {key: about.header("")[key] for key in ("python", "torch", "transformers")}
    found = {"architecture": first, "layers": most, "ways": checkpointed}
    print(json.dumps({**versions, "counts": counts, "checkpointed": found}))


if __name__ == "__main__":
    main()
