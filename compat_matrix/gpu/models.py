"""Whether kernels and tiny models are right on this device, in bfloat16, at points of the matrix."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map_only

import fa2patch
from fa2patch import kernels
from fa2patch.kernels.trial import FAILS

from .. import tiny_media, tiny_models  # noqa: F401  # the first adds models of pictures and sound
from ..check import points, rows
from ..check.cell import AloneFails, Cell, NotApplicable
from ..check.found import side
from ..check.kernels import cases, compared, refusal
from ..tiny_configs import parameters

Found = dict[str, Any]

# near float32 and unmoved by another document, with finite gradients; verified, forward and backward
POINTS = ("half_precision", "nothing_crosses")
TIMES = 14  # documents of up to 126 tokens go beyond a kernel's blocks

# flash-attn is built for heads of 64 dimensions.
BIG = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "intermediate_size"], 256),
    **dict.fromkeys(["max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len"], 512),
    "head_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_ssm": 512,
}


def big(architecture: str) -> dict[str, Any]:
    known = parameters(tiny_models.text_config_of(architecture).__class__)
    return {name: value for name, value in BIG.items() if name in known}


# Their code makes tensors as it does for users.
LIBRARIES = ("transformers", "fa2patch", "peft", "accelerate", "trl")


class _MadeThere(TorchFunctionMode):
    """What checks and tests make, or compute with what is there, is on the device. A CPU draws the numbers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while (caller := frame.f_globals.get("__name__", "")).startswith("torch"):
            frame = frame.f_back
        if caller.startswith(LIBRARIES):
            return func(*args, **(kwargs or {}))
        given = args, kwargs or {}
        devices = {each.device.type for each in tree_leaves(given) if isinstance(each, torch.Tensor)}
        if len(devices) > 1 and not func.__name__.endswith("_"):  # a tensor that is changed in place is no copy
            given = tree_map_only(torch.Tensor, lambda each: each.to(self.device), given)
        found = func(*given[0], **given[1])
        made = func in _device_constructors() and given[1].get("device") is None
        return found.to(self.device) if made else found


@contextlib.contextmanager
def on(device: str) -> Iterator[None]:
    build = tiny_models.build

    def built(*given: Any, **changes: Any) -> Any:
        return build(*given, **changes).to(device)

    with _MadeThere(device), mock.patch.object(tiny_models, "build", built):
        yield


def cell(device: str, architecture: str, kernel: str, *implementations: str) -> Found:
    """Check the points, loaded with the first of the implementations that Transformers has here."""
    apply, patches = fa2patch.apply, list[Any]()

    def applied(model: Any, **options: Any) -> Any:
        patch = apply(model, **{"kernel": kernel, **options})
        patches.extend(patch.stacks or [patch])
        return patch

    with on(device), mock.patch.object(fa2patch, "apply", applied):
        one, refused = _made(architecture, implementations)
        found = {} if one is None else {name: _held(one, name) for name in POINTS}
    computed = sorted({str(layer.kernel) for patch in patches for layer in patch.layers} - {"None"})
    row = {"architecture": architecture, "loaded as": one.implementation if one else "", "kernels": ", ".join(computed)}
    row["right"] = f"{sum(state == 'ok' for state, _ in found.values())} of {len(POINTS)}"
    wrong, other = ({n: why for n, (state, why) in found.items() if state == what} for what in ("wrong", "refused"))
    return {"row": row, "wrong": wrong, "refused": {**refused, **other}}


def _made(architecture: str, implementations: tuple[str, ...]) -> tuple[Cell | None, dict[str, str]]:
    # The cell has the larger sizes and documents, unless the model cannot be made with them, or compute one document.
    why = {}
    for implementation, larger in itertools.product(implementations, (True, False)):
        given: dict[str, Any] = {"sizes": big(architecture), "times": TIMES} if larger else {}
        one = Cell(architecture, implementation, in_bfloat16=True, **given)
        try:
            model = one.model()
            fa2patch.apply(model).revert()
            _alone(one, model)
            return one, {}
        except NEVER as error:
            return None, {"apply": f"{type(error).__name__}: {error.message}"[:300]}
        except Exception as error:  # Transformers has other errors in other releases
            why[implementation] = f"Transformers alone: {type(error).__name__}: {error}"[:300]
    return None, why


NEVER = (fa2patch.errors.UnsupportedModel, fa2patch.errors.LayerNotPatchable)


def _alone(one: Cell, model: Any) -> None:
    other = side(one.family)
    failure = other.failure_alone(one) if other else ""
    if failure:
        raise RuntimeError(failure)
    if not other:
        rows.alone(model, rows.documents(*one.lengths(5, 9)))  # xLSTM computes a few tokens in bfloat16, and no more


def _held(one: Cell, name: str) -> tuple[str, str]:
    torch.manual_seed(0)
    try:
        (side(one.family) or points).POINTS[name](one)
        return "ok", ""
    except (AloneFails, NotApplicable, *NEVER) as error:
        return "refused", f"{type(error).__name__}: {error}"[:300]
    except fa2patch.errors.KernelUnavailable as error:
        wrong = isinstance(error, fa2patch.errors.KernelWrong) and FAILS not in error.message
        return "wrong" if wrong else "refused", error.message[:300]
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"[:300]


# --- kernels --------------------------------------------------------------------------------------------------


def present(device: str) -> list[str]:
    """The kernels that can run here, best first; the reference only where no other can."""
    able = [kernel for kernel in kernels.ORDER if kernel.available()[0]]
    names = [kernel.name for kernel in able if kernel.DEVICES is None or device in kernel.DEVICES]
    return [name for name in names if name != "reference"] or names


def against_reference(device: str, name: str) -> Found:
    kernel, wrong, refused, worst = kernels.named(name), {}, {}, 0.0
    ran = {label: case for label, case in cases().items() if not refusal(kernel, case, device)}
    for label, case in ran.items():
        torch.manual_seed(0)
        try:
            errors = compared(kernel, case, device)
        except Exception as error:  # kernels raise errors of many types
            synchronize(device)  # which raises again if the device computes nothing more: that is no refusal
            refused[label] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        worst = max([worst, *(error.relative for error in errors.values())])
        off = {of: f"{error.relative:.1e}" for of, error in errors.items() if not error.ok}
        if off:
            wrong[label] = f"relative errors {off}"
    right = len(ran) - len(wrong) - len(refused)
    row = {"kernel": name, "right": f"{right} of {len(ran)}", "refused by the build": len(refused)}
    return {"row": {**row, "largest relative error": f"{worst:.1e}"}, "wrong": wrong, "refused": refused}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
