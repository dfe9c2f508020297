"""Check models in bfloat16 with the real kernels on this machine's GPU, in this environment; one JSON per kernel."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any, Callable

import torch

import fa2patch
from fa2patch import kernels

from .. import commits, tiny_models
from ..results import FORMAT
from .cell import AloneFails, Cell, assert_unmoved
from .compare import assert_as_near
from .found import header, timed
from .rows import alone, documents, pack
from .upstream import alone_computes

LENGTHS = (50, 130, 1, 77)
# flash-attn is built for heads of 64 dimensions.
BIG = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "intermediate_size"], 256),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "max_seq_len"], 512),
    "head_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check.gpu", description=__doc__)
    parser.add_argument("--families", nargs="+", metavar="F", default=list(tiny_models.SEEDS), help="architectures")
    parser.add_argument("--kernels", nargs="+", metavar="K", help="default: all that can run here")
    parser.add_argument("--device", default="cuda", help="cpu: only to see that it runs")
    parser.add_argument("--evidence", type=Path, required=True, help="folder that the JSON goes to")
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("looked for a CUDA device, found none: run this where torch.cuda.is_available()")
    given.evidence.mkdir(parents=True, exist_ok=True)
    bad = {}
    for kernel in given.kernels or present_kernels(given.device):
        found = evidence(given.families, given.device, kernel)
        (given.evidence / f"{found['name']}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        worse = {name: cell for name, cell in found["architectures"].items() if _is_bad(cell)}
        print(f"{kernel}: {len(found['architectures'])} architectures on {found['device']}, {len(worse)} not ok")
        for name, cell in worse.items():
            print(f"{name}: {json.dumps(cell)}")
        bad.update(worse)
    return 1 if bad else 0


def present_kernels(device: str) -> list[str]:
    able = (kernel for kernel in kernels.ORDER if kernel.available()[0])
    return [kernel.name for kernel in able if kernel.DEVICES is None or device in kernel.DEVICES]


def evidence(architectures: list[str], device: str, kernel: str) -> dict[str, Any]:
    has_flash_attn = importlib.util.find_spec("flash_attn") is not None
    implementations = ("sdpa", "flash_attention_2") if has_flash_attn else ("sdpa",)
    code, cells = commits.of_code(), {}
    for name in filter(tiny_models.is_present, architectures):
        cells[name] = timed(functools.partial(_cell, name, implementations, device, kernel))
        cells[name]["made"].update(code)
    flash = metadata.version("flash_attn") if has_flash_attn else None
    name = torch.cuda.get_device_name() if device == "cuda" else device
    about = header(flash, name, kernel, list(POINTS), [])
    return {"format": FORMAT, "name": f"{about['transformers']}-{kernel}", **about, "architectures": cells}


def _cell(architecture: str, implementations: tuple[str, ...], device: str, kernel: str) -> dict[str, Any]:
    changes = big(architecture)
    cell: dict[str, Any] = {"fa2patch": {}, "seam": []}
    for implementation in (*implementations, "eager"):
        if implementation == "eager" and cell["seam"]:
            continue  # it is for models that have no other
        counts: dict[str, Any] = {"ok": 0, "n/a": {}, "fail": {}}
        cell["fa2patch"][implementation] = counts
        try:
            model = tiny_models.build(architecture, implementation, torch.bfloat16, **changes).to(device)
        except Exception as error:  # Transformers has other errors in other releases
            if implementation == "eager":
                return {"error": f"{type(error).__name__}: {error}"[:400]}
            counts["n/a"]["all"] = f"Transformers: {error}"[:400]
            continue
        try:
            patch = fa2patch.apply(model, kernel=kernel)
        except fa2patch.errors.UnsupportedModel as error:
            return {"refused": f"{type(error).__name__}: {error.message}"}
        except Exception as error:
            return {"error": f"{implementation}: {type(error).__name__}: {error}"[:400]}
        cell["seam"] = sorted({*cell["seam"], *(layer.seam for layer in patch.layers)})
        patch.revert()
        for name, point in POINTS.items():
            try:
                point(architecture, model, kernel)
                counts["ok"] += 1
            except AloneFails as error:
                counts["n/a"][name] = str(error)[:400]
            except fa2patch.errors.KernelUnavailable as error:
                wrong = isinstance(error, fa2patch.errors.KernelWrong)
                counts["fail" if wrong else "n/a"][name] = error.message[:400]
            except Exception as error:
                counts["fail"][name] = f"{type(error).__name__}: {error}"[:400]
    return cell


def big(architecture: str) -> dict[str, Any]:
    # With these sizes, flash-attn computes a tiny model.
    known = tiny_models.parameters(tiny_models.config_class(architecture))
    return {name: value for name, value in BIG.items() if name in known}


def _is_bad(cell: dict[str, Any]) -> bool:
    return "error" in cell or any(counts["fail"] for counts in cell.get("fa2patch", {}).values())


def _on(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(model.device) for name, tensor in batch.items()}


@torch.no_grad()
def near_float32(architecture: str, model: Any, kernel: str) -> None:
    docs = [doc.to(model.device) for doc in documents(*LENGTHS)]
    exact = alone(Cell(architecture, "eager").reference(**big(architecture)).to(model.device), docs)
    with alone_computes():
        single = alone(model, docs)
    with fa2patch.apply(model, kernel=kernel):
        found = model(**_on(model, pack(docs))).logits[0]
    assert_as_near(found, exact, single)


@torch.no_grad()
def nothing_forward(architecture: str, model: Any, kernel: str) -> None:
    """Another first document leaves the others' logits bit for bit the same; a mixture may differ by rounding."""
    docs = documents(*LENGTHS)
    other = [documents(LENGTHS[0], seed=7)[0], *docs[1:]]
    with fa2patch.apply(model, kernel=kernel):
        before, after = (model(**_on(model, pack(rows))).logits[0, LENGTHS[0] :] for rows in (docs, other))
    assert_unmoved(Cell(architecture, "sdpa"), after, before)


def nothing_backward(architecture: str, model: Any, kernel: str) -> None:
    """The gradient of one document's logits to the other documents is exactly zero."""
    batch = _on(model, pack(documents(*LENGTHS)))
    embeddings = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    first, second = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    with fa2patch.apply(model, kernel=kernel):
        logits = model(inputs_embeds=embeddings, **batch).logits[0, first:second]
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), embeddings)
    if gradient[0, :first].any() or gradient[0, second:].any() or not gradient[0, first:second].any():
        raise AssertionError("a gradient reaches another document, or none the document itself")


POINTS: dict[str, Callable[[str, Any, str], None]] = {
    point.__name__: point for point in (near_float32, nothing_forward, nothing_backward)
}


if __name__ == "__main__":
    sys.exit(main())
