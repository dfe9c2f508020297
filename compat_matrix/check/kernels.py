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
SPANS = ((0, 1), (21, 40), (40, 59), (201, 231), (398, 408))
"""Spans of :data:`LENGTHS`: a whole document, two side by side, and one at a document's beginning and at its end."""

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
SLACK = {torch.float32: 5e-3}
"""Error allowed in addition to twice the plain formula's, where it is not 1e-3: float32 may be computed in TF32."""


@dataclass(frozen=True)
class Case:
    """One call of a kernel, with a name of :data:`FEATURES` and one of :data:`LAYOUTS`.

    ``tree`` and ``spans`` need four documents. There are ``groups`` query heads for each key head.
    """

    feature: str = "plain"
    layout: str = "causal"
    groups: int = 1
    dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    lengths: tuple[int, ...] = LENGTHS

    @property
    def parents(self) -> tuple[int, ...] | None:
        """The parents of the segments, if they are a tree."""
        return PARENTS if self.layout == "tree" else None

    @property
    def spans(self) -> Spans | None:
        """The spans of tokens that see each other, if there are some."""
        return SPANS if self.layout == "spans" else None

    def options(self, device: str) -> Options:
        """Return the kernel's options. Sinks require gradients."""
        given = dict(FEATURES[self.feature])
        if given.get("sinks"):
            sinks = torch.tensor([0.5, -1.0, 2.0, 4.0], device=device, dtype=self.dtype)
            given["sinks"] = sinks.requires_grad_()
        if given.get("alibi_slopes"):
            given["alibi_slopes"] = torch.tensor([0.5, 0.1, 1.0, 0.0], device=device)
        return Options(causal=self.layout != "both ways", **given)


@dataclass(frozen=True)
class Error:
    """The largest absolute error of a tensor, which may be :attr:`allowed`, and the tensor's largest true value."""

    found: float
    allowed: float
    largest: float

    @property
    def ok(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.found <= self.allowed

    @property
    def relative(self) -> float:
        """The error divided by the largest true value, or by 1 if that is less: some true gradients are zero."""
        return self.found / max(self.largest, 1.0)


def refusal(kernel: kernels.Kernel, case: Case, device: str) -> str:
    """Return why the kernel does not support the case; empty if it does."""
    q, k, v = states((2,), case.dtype, case.groups, case.dim, case.value_dim, device, HEADS)
    asked = kernels.asked_by(q, k, v, case.options(device), case.layout == "tree", case.layout == "spans")
    able, reason = kernel.supports(asked)
    return "" if able else reason


def compared(kernel: kernels.Kernel, case: Case, device: str) -> dict[str, Error]:
    """Return the errors of the output and of each gradient, by the names in :data:`NAMES`.

    As in flash-attn's own tests, an error may be twice the plain formula's in the same dtype, plus a slack. Errors are
    distances from the reference in float32. The reference in half precision is too strict a measure: it computes
    windows and softcap in float32 inside, so it rounds less than a flash kernel, which rounds its weights.
    """
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
    """Return cases by name that vary one thing at a time, so that a kernel goes through them within a minute."""
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
