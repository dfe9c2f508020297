"""A kernel against the reference in one case: outputs and gradients, for every feature, layout, size and dtype."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fa2patch import kernels
from fa2patch.kernels import Options
from fa2patch.kernels.reference import Reference

from .kernel_cases import Spans, brute_force, documents, largest_errors, states, with_gradients

HEADS = 4
LENGTHS = (1, 200, 77, 130)
PARENTS = (-1, -1, 1, 1)
# Spans of LENGTHS: a whole document, two side by side, and one at a document's beginning and at its end.
SPANS = ((0, 1), (21, 40), (40, 59), (201, 231), (398, 408))

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window 1": {"window": 1},
    "window": {"window": 37},
    "window as long as a document": {"window": 200},
    "window longer than all": {"window": 1000},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True},
    "window and sinks": {"window": 37, "sinks": True},
    "window and softcap": {"window": 37, "softcap": 5.0},
}
LAYOUTS = ("causal", "both ways", "tree", "spans")
DIMS = {"head dim 60": (60, 60), "head dim 128": (128, 128), "MLA": (192, 128), "head dim 256": (256, 256),
        "head dim 512": (512, 512)}  # fmt: skip
NAMES = ("output", "dq", "dk", "dv", "dsinks")
# The error that is allowed in addition to twice the plain formula's, else 1e-3: float32 may be computed in TF32.
SLACK = {torch.float32: 5e-3}


@dataclass(frozen=True)
class Case:
    feature: str = "plain"  # of FEATURES
    layout: str = "causal"  # of LAYOUTS; "tree" and "spans" need four documents
    groups: int = 1  # query heads for each key head
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = LENGTHS

    @property
    def parents(self) -> tuple[int, ...] | None:
        return PARENTS if self.layout == "tree" else None

    @property
    def spans(self) -> Spans | None:
        return SPANS if self.layout == "spans" else None

    def options(self, device: str) -> Options:
        given = dict(FEATURES[self.feature])
        if given.get("sinks"):
            sinks = torch.tensor([0.5, -1.0, 2.0, 4.0], device=device, dtype=self.dtype)
            given["sinks"] = sinks.requires_grad_()
        if given.get("alibi_slopes"):
            given["alibi_slopes"] = torch.tensor([0.5, 0.1, 1.0, 0.0], device=device)
        return Options(causal=self.layout != "both ways", **given)


@dataclass(frozen=True)
class Error:
    found: float  # the largest absolute error of a tensor
    allowed: float
    largest: float  # the tensor's largest true value

    @property
    def ok(self) -> bool:
        # NaN is not allowed.
        return self.found <= self.allowed

    @property
    def relative(self) -> float:
        # Some true gradients are zero, so the error is divided by 1 at least.
        return self.found / max(self.largest, 1.0)


def refusal(kernel: kernels.Kernel, case: Case, device: str) -> str:
    q, k, v = states((2,), case.dtype, case.groups, case.dim, case.value_dim, device, HEADS)
    asked = kernels.asked_by(q, k, v, case.options(device), case.layout == "tree", case.layout == "spans")
    able, reason = kernel.supports(asked)
    return "" if able else reason


def compared(kernel: kernels.Kernel, case: Case, device: str) -> dict[str, Error]:
    # As in flash-attn's own tests, an error may be twice the plain formula's in the same dtype, plus a slack. Errors
    # are distances from the reference in float32. The reference in half precision is too strict a measure: it computes
    # windows and softcap in float32 inside, so it rounds less than a flash kernel, which rounds its weights.
    options = case.options(device)
    q, k, v = states(case.lengths, case.dtype, case.groups, case.dim, case.value_dim, device, HEADS)
    given = [q, k, v, *([options.sinks] if options.sinks is not None else [])]
    whole = [tensor.detach().float().requires_grad_() for tensor in given]
    exact = replace(options, sinks=whole[3] if len(whole) > 3 else None)
    boundaries = documents(case.lengths, device, case.parents, case.spans)
    truth = with_gradients(lambda: Reference()(whole[0], whole[1], whole[2], boundaries, exact), whole)
    rounded = with_gradients(lambda: brute_force(q, k, v, case.lengths, options, case.parents, case.spans), given)
    found = with_gradients(lambda: kernel(q, k, v, boundaries, options), given)
    if found[0].dtype != case.dtype:
        raise AssertionError(f"expected an output of {case.dtype}, found {found[0].dtype}")
    slack = SLACK.get(case.dtype, 1e-3)
    errors = zip(NAMES, largest_errors(found, truth), largest_errors(rounded, truth), truth)
    return {name: Error(off, 2 * plain + slack, float(true.detach().abs().max())) for name, off, plain, true in errors}


def cases() -> dict[str, Case]:
    # The cases vary one thing at a time, so that a kernel goes through them within a minute.
    short = tuple(1 + place % 16 for place in range(240))
    found = {f"{feature}, causal": Case(feature) for feature in FEATURES}
    found.update({f"plain, {layout}": Case(layout=layout) for layout in LAYOUTS})
    found.update({f"{feature}, tree": Case(feature, "tree") for feature in ("window", "softcap", "sinks", "alibi")})
    found.update({f"{feature}, spans": Case(feature, "spans") for feature in ("softcap", "sinks")})
    found.update({f"{HEADS} query heads, {HEADS // groups} key heads": Case(groups=groups) for groups in (2, 4)})
    found.update({name: Case(dim=dim, value_dim=value) for name, (dim, value) in DIMS.items()})
    for dtype, feature in itertools.product((torch.float16, torch.float32), ("plain", "window", "softcap", "sinks")):
        found[f"{feature}, {str(dtype)[6:]}"] = Case(feature, dtype=dtype)
    for feature in ("plain", "window", "sinks"):
        found[f"{feature}, {len(short)} short documents"] = Case(feature, groups=2, lengths=short)
    return found
