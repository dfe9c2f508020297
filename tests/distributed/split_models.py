"""Tiny models that are split over processes by ``tp_plan="auto"``, and their parameters made whole."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from parts import Case

from compat_matrix import tiny_models

NEWER = int(transformers.__version__.split(".")[0]) >= 5


class Models:
    # The folder is one that all processes read.

    def __init__(self) -> None:
        folder = [tempfile.mkdtemp(prefix="fa2patch-")]
        dist.broadcast_object_list(folder)
        self.folder = Path(folder[0])
        self.plan: dict[str, str] | None = None  # None is the config's own

    def load(self, case: Case, split: bool) -> Any:
        name = "-".join([case.family, *(f"{key}={value}" for key, value in case.changes.items())])
        built = tiny_models.build(case.family, "eager", **case.changes)
        if dist.get_rank() == 0 and not (self.folder / name).exists():
            built.save_pretrained(self.folder / name)
        dist.barrier()
        options: dict[str, Any] = {"tp_plan": "auto"} if split else {}
        if split and self.plan:
            options["config"] = type(built.config).from_pretrained(self.folder / name)
            options["config"].base_model_tp_plan = self.plan
        if NEWER and tiny_models.is_mixture(case.family):
            options["experts_implementation"] = "eager"  # torch's grouped product has no double precision
        model = (
            type(built)
            .from_pretrained(self.folder / name, dtype=torch.float64, attn_implementation="eager", **options)
            .train()
        )
        if case.checkpointing and split:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model


def full(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    # Transformers 4 shards experts in plain tensors, along one dimension.
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    if tensor.shape != shape:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        along = next(at for at, (part, whole) in enumerate(zip(tensor.shape, shape)) if part != whole)
        tensor = torch.cat(parts, dim=along)
    return tensor


def sharded(model: Any, reference: Any) -> str:
    pairs = [*zip(model.parameters(), reference.parameters())]
    local = [one.to_local() if hasattr(one, "to_local") else one for one, _ in pairs]
    count = sum(one.shape != whole.shape for one, (_, whole) in zip(local, pairs))
    return f"{count} of {len(pairs)} parameters sharded"


def apart(model: Any, reference: Any, what: str) -> dict[str, float]:
    # ``what`` is ``grad`` or ``data``.
    found = {}
    for (name, one), (same, other) in zip(model.named_parameters(), reference.named_parameters()):
        assert name == same
        values, expected = getattr(one, what), getattr(other, what)
        if expected is None and values is None:
            continue
        whole = full(values, expected.shape)
        found[name] = float((whole - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    return found
