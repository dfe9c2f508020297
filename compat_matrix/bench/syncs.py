"""Count reads and derivations in one forward, with this environment's Transformers: the rows of part ``syncs``.

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
from ..check.reads import Count, counted, watched

DOCUMENTS = (7, 5, 1, 9, 6)
WAYS = ("upstream", "upstream, lengths", "fa2patch", "fa2patch, lengths")


def forward(architecture: str, layers: int, way: str, checkpointed: bool = False) -> Count | None:
    # It is None if this version's forward does not take the collator's lengths. With checkpointing the backward counts
    # too, which computes every layer again.
    import fa2patch  # after the stand-in for flash-attn

    from .. import tiny_models

    changes = tiny_models.with_layers(architecture, layers)
    model = tiny_models.build(architecture, "flash_attention_2", torch.bfloat16, **changes).train()
    if way.startswith("fa2patch"):
        fa2patch.apply(model)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(**row(False), use_cache=False)  # some checks are made only once per model
    try:
        with counted() as count:
            loss = model(**row("lengths" in way), use_cache=False).loss
            if checkpointed:
                loss.backward()
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        return None
    return count


def row(lengths: bool) -> dict[str, Any]:
    from ..check import rows
    from .workloads import packed

    return packed([ids.tolist() for ids in rows.documents(*DOCUMENTS)], lengths)


def of(architecture: str, way: str, layers: tuple[int, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": architecture, "way": way}
    for number in layers:
        last = forward(architecture, number, way)
        row[f"{number} layers"] = "refused" if last is None else last.reads + last.arguments
    step = forward(architecture, layers[-1], way, checkpointed=True)
    if last is not None and step is not None:
        row.update({"at the kernel's call": last.arguments, "derivations": last.derived})
        row.update({"a step with checkpointing": step.reads + step.arguments, "its derivations": step.derived})
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.syncs", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: one model of few layers")
    quick = parser.parse_args(arguments).quick
    models, layers = (("llama",), (2, 4)) if quick else (("llama", "mistral", "qwen2"), (2, 4, 8, 16, 32))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stand_in.flash_attn_varlen_func = watched(stand_in.flash_attn_varlen_func)
    stand_in.install()
    rows = [of(model, way, layers) for model in models for way in WAYS]
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
