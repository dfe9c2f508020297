"""What ``fa2patch doctor`` finds: the installed packages, how packed rows work with them alone and patched, and advice.

A tiny Llama is built and verified, both unpatched and patched. Facts about other architectures in this version come
from the evidence of the compat matrix (``upstream.json``).
"""

from __future__ import annotations

import importlib
import json
import platform
from collections.abc import Iterator
from importlib import metadata, resources
from typing import Any, NamedTuple, Union

import torch

from .. import evidence, kernels
from .._types import Call, Model
from ..errors import Fa2PatchError
from ..patch.applying import apply
from ..proof.inputs import example
from ..proof.result import Verification
from ..proof.verify import verify
from ..upstream import inspecting
from ..upstream.find_models import transformers_model
from .output import in_one_line

Found = Union[Verification, str]
"""A verification, or the error that kept it from being made, as text."""

_WHY = (
    "Loaded as {}, this model looks for documents in position_ids only if the forward makes no cache. It makes one "
    "unless it is called with use_cache=False, because config.use_cache is True."
)
"""Why a model isolates documents without a cache only, with its attention implementation."""

PACKAGES = (
    "transformers", "wrapt", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "accelerate", "peft", "trl",
)  # fmt: skip
_MODULES = {
    "transformers": "transformers",
    "flash-attn": "flash_attn",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute",
    "kernels": "kernels",
}
"""Modules imported to test a package: one built for another torch is installed, but does not import."""


class Defect(NamedTuple):
    """A defect of Transformers that concerns packed rows, as ``doctor`` says it."""

    first: tuple[int, int]  # the first and the last minor that has it
    last: tuple[int, int] | None  # None: no version was seen to mend it
    what: str

    def is_in(self, version: tuple[int, int]) -> bool:
        """Whether a minor version has it, as far as is known."""
        return self.first <= version and (self.last is None or version <= self.last)


DEFECTS = (
    Defect((4, 34), (4, 43), "position_ids are used for rotary positions only: every packed row leaks."),
    Defect((4, 44), (4, 53), "ids that never decrease are taken for one document: [0, 0, 1, ...] leaks."),
    Defect((4, 53), (4, 53), "packing is looked for only where the batch is one row: two packed rows leak."),
    Defect((4, 55), None, "packing is looked for only where the batch is one row: two packed rows leak."),
    Defect((4, 54), (4, 54), "a dense batch of two rows of T tokens without position_ids gets cu_seqlens [0, T]."),
    Defect((4, 34), (4, 55), "the flash route's sliding window is one token wider than eager attention's."),
    Defect((4, 42), (4, 43), "Gemma 2's flash attention has no sliding window."),
    Defect((4, 34), (4, 39), "GPT-BigCode's flash attention divides its scale by the layer's number."),
    Defect((4, 54), (4, 54), "GPT-BigCode inverts the scale of its attention."),
    Defect((4, 52), (4, 57), "GraniteMoE's attention drops position_ids: packed rows leak, and did not up to 4.51."),
)
"""Defects that were read in Transformers' sources and observed in the compat matrix."""


def diagnose() -> dict[str, Any]:
    """Everything that ``fa2patch doctor`` shows, as JSON-compatible data; ``ok``: the patched tiny Llama isolates."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "packages": {name: _package(name) for name in PACKAGES},
        "kernels": [
            {"name": kernel.name, "usable": able, "reason": reason}
            for kernel in kernels.ORDER
            for able, reason in [kernel.available()]
        ],
    }
    found |= _with_tiny_llama()
    known, installed = upstream(), found["packages"]["transformers"]["version"]
    found["known"] = known.get(evidence.minor_of(installed or ""))
    found["evidence_ends"] = list(known)[-1]
    version: Any = evidence.key(evidence.minor_of(installed)) if installed else None
    found["defects"] = [defect.what for defect in DEFECTS if version and defect.is_in(version)]
    found["ok"] = found["patched"]["state"] == "isolated"
    found["advice"] = list(_advice(found))
    return found


def _package(name: str) -> dict[str, Any]:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return {"version": None, "problem": "not installed"}
    try:
        if name in _MODULES:
            importlib.import_module(_MODULES[name])
    except Exception as error:
        return {"version": version, "problem": f"does not import: {in_one_line(error)}"}
    return {"version": version, "problem": None}


def tiny_llama() -> Model:
    """Build a Llama of two layers with large random weights; the small default weights hide leaks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        made: Any = LlamaForCausalLM
        model: Model = made(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(5)
    model.eval()
    return model


def _with_tiny_llama() -> dict[str, Any]:
    """Verify a tiny Llama on a row of four documents, unpatched and patched."""
    try:
        model = tiny_llama()
    except Exception as error:
        failed = {"state": "error", "reason": f"Transformers' Llama cannot be made: {in_one_line(error)}"}
        return {"seam": None, "alone": failed, "alone_without_cache": failed, "why": "", "patched": failed}
    batch = example(torch.device("cpu"), model)
    unpatched = verify_unpatched(model, batch)
    without = unpatched.by_default if unpatched.without_cache is None else unpatched.without_cache
    alone = {"alone": _state(unpatched.by_default), "alone_without_cache": _state(without), "why": unpatched.why}
    try:
        with apply(model) as patch:
            seam = " and ".join(sorted({layer.seam for layer in patch.layers}))
            return {"seam": seam, **alone, "patched": _state(verified(model, batch))}
    except Fa2PatchError as error:
        return {"seam": None, **alone, "patched": {"state": "refused", "reason": str(error)}}


class Unpatched(NamedTuple):
    """What an unpatched model does with a packed batch."""

    by_default: Found  # without use_cache in the batch, the config decides
    without_cache: Found | None  # with use_cache=False; None if that is how the batch is computed anyway
    why: str  # why the two differ; empty if they do not


def verify_unpatched(model: Model, batch: Call, max_documents: int | None = None) -> Unpatched:
    """Verify an unpatched model both with its default cache and without; only as the batch says if it has use_cache."""
    inner = transformers_model(model)
    by_default = verified(model, batch, max_documents)
    says_so = bool(getattr(inspecting.text_config(inner.config), "use_cache", False))
    if "use_cache" in batch or not says_so or not inspecting.takes(type(inner).forward, "use_cache"):
        return Unpatched(by_default, None, "")
    without = verified(model, {**batch, "use_cache": False}, max_documents)
    differ = is_isolated(without) and not is_isolated(by_default)
    implementation = getattr(inner.config, "_attn_implementation", None) or "it is"
    return Unpatched(by_default, without, _WHY.format(implementation) if differ else "")


def verified(model: Model, batch: Call, max_documents: int | None = None) -> Found:
    """The verification of a model on a batch, or the error that it raises, as text."""
    try:
        return verify(model, batch=batch, strict=False, max_documents=max_documents)
    except Exception as error:
        return as_text(error)


def as_text(error: Exception) -> str:
    """An error as text: the whole of fa2patch's own, one line of others."""
    return f"{type(error).__name__}: {error}" if isinstance(error, Fa2PatchError) else in_one_line(error)


def is_isolated(found: Found) -> bool:
    """Whether a finding is a verification that is ok."""
    return not isinstance(found, str) and found.ok


def _state(found: Found) -> dict[str, Any]:
    if isinstance(found, str):
        return {"state": "error", "reason": found}
    return {"state": "isolated" if found.ok else "leaks", "reason": found.reason}


def upstream() -> dict[str, Any]:
    """Read what Transformers alone does with packed rows, by minor, from the evidence of the compat matrix."""
    text = resources.files("fa2patch").joinpath("upstream.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _advice(found: dict[str, Any]) -> Iterator[str]:
    packages = found["packages"]
    if found["patched"]["state"] != "isolated":
        yield f"fa2patch does not work here: {found['patched'].get('reason')}"
    installed = packages["transformers"]["version"]
    if installed and found["known"] is None:
        yield (
            f"Transformers {installed} was not checked with fa2patch: the evidence ends with {found['evidence_ends']}. "
            "Only the tiny Llama above was tried here. Check your own model: `fa2patch verify MODEL`, or at all points "
            f"`fa2patch matrix --model MODEL --transformers {installed}`."
        )
    flash = [kernel for kernel in found["kernels"] if kernel["name"].startswith(("flash_attn", "torch_varlen"))]
    if found["gpus"] and not any(kernel["usable"] for kernel in flash):
        yield "A GPU without a flash kernel: see the reasons above. Upgrade torch to 2.4, or pip install flash-attn."
    if not found["gpus"]:
        yield "No GPU: packed rows run with the reference kernel, which is right and slow."
    problem = packages["flash-attn"]["problem"]
    if packages["flash-attn"]["version"] and problem:
        yield f"flash-attn is installed and {problem}. It was built for another torch or Python: reinstall it."
    if "leaks" in (found["alone"]["state"], found["alone_without_cache"]["state"]):
        yield "Call fa2patch.apply(model) before training on packed rows: Transformers alone leaks here."
