"""Part ``mixers``: a packed row of a hybrid model against its documents run one by one, forward and backward.

The mixers run in pure torch, as without their fast kernels: the part measures how fa2patch runs them by document.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from rich.progress import Progress

import fa2patch

from .. import tiny_models
from ..check.rows import documents, pack
from . import timing

FAMILIES = ("qwen3_next", "bamba", "jamba", "mamba2", "lfm2", "falcon_h1", "minimax", "recurrent_gemma", "rwkv")
LENGTHS = {"16 x 64": (64,) * 16, "1 to 256": (256, 1, 128, 30, 200, 90, 7, 60, 33, 150, 69)}
"""Document lengths of rows with about a thousand tokens, by their name in the table."""

QUICK = {"3 short": (9, 1, 7)}
SIZES = {"max_position_embeddings": 512}


def measure(progress: Progress, quick: bool = False, repeats: int = 9) -> Any:
    """Measure all families and return the result of the part."""
    rows = []
    families = FAMILIES[:2] if quick else FAMILIES
    task = progress.add_task("mixers", total=len(families))
    for family in families:
        for name, lengths in (QUICK if quick else LENGTHS).items():
            rows.append({"family": family, "documents": name, **compared(family, lengths, 1 if quick else repeats)})
        progress.update(task, advance=1)
    return {"rows": rows, "repeats": repeats}


def compared(
    family: str,
    lengths: tuple[int, ...],
    repeats: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: dict[str, int] = SIZES,
) -> dict[str, Any]:
    """Return the least time of ``repeats`` rounds in milliseconds, and the median ratios of the packed time to
    the others, and the kernels that computed the layers.

    Args:
        sizes: changes to the tiny model's config; those that the config does not know are left out.
    """
    known = tiny_models.parameters(tiny_models.config_class(family))
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if name in known}
    patched, alone = (tiny_models.build(family, dtype=dtype, **changes).train().to(device) for _ in range(2))
    patch = fa2patch.apply(patched)
    docs = [doc.to(device) for doc in documents(*lengths)]
    row = {name: tensor.to(device) for name, tensor in pack(documents(*lengths)).items()}

    def losses() -> list[Any]:
        return [alone(input_ids=doc[None], use_cache=False).logits.square().sum() for doc in docs]

    def a_backward_each() -> None:
        for doc in docs:
            alone(input_ids=doc[None], use_cache=False).logits.square().sum().backward()

    taken = timing.rounds(
        {
            "packed": lambda: patched(**row, use_cache=False).logits.square().sum().backward(),
            "one_by_one": lambda: sum(losses()).backward(),
            "a_backward_each": a_backward_each,
        },
        repeats,
        warm_up=1,
        device=device,
    )
    found: dict[str, Any] = {f"{name}_ms": round(1e3 * min(seconds), 2) for name, seconds in taken.items()}
    for name in ("one_by_one", "a_backward_each"):
        ratios = [packed / single for packed, single in zip(taken["packed"], taken[name])]
        found[f"by_{name}"] = round(statistics.median(ratios), 3)
    return {**found, "kernels": sorted({str(layer.kernel) for layer in patch.layers})}
