"""Padding-free training for Hugging Face causal LMs: ``fa2patch.apply(model)``."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import packing as packing
    from . import preference as preference
    from .callbacks.lightning import LightningCallback as LightningCallback
    from .callbacks.trainer import TrainerCallback as TrainerCallback
    from .data.collators import DataCollatorWithFlattening as DataCollatorWithFlattening
    from .data.completion_only import DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM
    from .data.multimodal import DataCollatorForMultimodalFlattening as DataCollatorForMultimodalFlattening
    from .data.seq2seq import DataCollatorForSeq2Seq as DataCollatorForSeq2Seq
    from .documents.boundaries import Boundaries as Boundaries
    from .documents.find import boundaries as boundaries
    from .errors import Fa2PatchError as Fa2PatchError
    from .patch.applying import apply as apply
    from .patch.applying import revert as revert
    from .patch.applying import status as status
    from .patch.state import Patch as Patch
    from .proof.result import Verification as Verification
    from .proof.verify import verify as verify
    from .trainers.packed_trainer import packed_trainer as packed_trainer
    from .upstream.architectures import Architecture as Architecture
    from .upstream.architectures import architectures as architectures
    from .upstream.architectures import register as register
else:
    _PLACES = {
        "Architecture": "upstream.architectures",
        "Boundaries": "documents.boundaries",
        "DataCollatorForCompletionOnlyLM": "data.completion_only",
        "DataCollatorForMultimodalFlattening": "data.multimodal",
        "DataCollatorForSeq2Seq": "data.seq2seq",
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
    __all__ = [*_PLACES, "packing", "preference"]

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
