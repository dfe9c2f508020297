"""Padding-free training for Hugging Face causal LMs: ``fa2patch.apply(model)``."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Architecture",
    "Boundaries",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForMultimodalFlattening",
    "DataCollatorWithFlattening",
    "Fa2PatchError",
    "LightningCallback",
    "Patch",
    "TrainerCallback",
    "Verification",
    "apply",
    "architectures",
    "boundaries",
    "packed_trainer",
    "packing",
    "preference",
    "register",
    "revert",
    "status",
    "verify",
]

if TYPE_CHECKING:
    from . import packing, preference
    from .callbacks.lightning import LightningCallback
    from .callbacks.trainer import TrainerCallback
    from .data.collators import DataCollatorWithFlattening
    from .data.completion_only import DataCollatorForCompletionOnlyLM
    from .data.multimodal import DataCollatorForMultimodalFlattening
    from .documents.boundaries import Boundaries
    from .documents.find import boundaries
    from .errors import Fa2PatchError
    from .patch.applying import apply, revert, status
    from .patch.state import Patch
    from .proof.result import Verification
    from .proof.verify import verify
    from .trainers.packed_trainer import packed_trainer
    from .upstream.architectures import Architecture, architectures, register
else:
    _PLACES = {
        "Architecture": "upstream.architectures",
        "Boundaries": "documents.boundaries",
        "DataCollatorForCompletionOnlyLM": "data.completion_only",
        "DataCollatorForMultimodalFlattening": "data.multimodal",
        "DataCollatorWithFlattening": "data.collators",
        "Fa2PatchError": "errors",
        "LightningCallback": "callbacks.lightning",
        "Patch": "patch.state",
        "TrainerCallback": "callbacks.trainer",
        "Verification": "proof.result",
        "apply": "patch.applying",
        "architectures": "upstream.architectures",
        "boundaries": "documents.find",
        "packed_trainer": "trainers.packed_trainer",
        "register": "upstream.architectures",
        "revert": "patch.applying",
        "status": "patch.applying",
        "verify": "proof.verify",
    }

    def __getattr__(name: str) -> Any:
        # Names are imported on first use. Torch takes seconds to import, and the command line's version and help need
        # none of it.
        if name in _PLACES:
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
            return globals()[name]
        if not name.startswith("__") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")  # a room, such as fa2patch.errors
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

    if "torch" in sys.modules:  # torch.export.load and graphs of torch's cache look for fa2patch's operators
        importlib.import_module(f"{__name__}.patch.applying")
