"""Padding-free training for Hugging Face causal LMs: ``fa2patch.apply(model)``."""

from . import packing
from .data.collators import DataCollatorWithFlattening
from .data.completion_only import DataCollatorForCompletionOnlyLM
from .data.multimodal import DataCollatorForMultimodalFlattening
from .documents.boundaries import Boundaries
from .documents.recognition import boundaries
from .errors import Fa2PatchError
from .patch.applying import apply, revert, status
from .patch.state import Patch
from .proof.result import Verification
from .proof.verify import verify
from .upstream.architectures import Architecture, architectures, register

__version__ = "0.1.0"

__all__ = [
    "Architecture",
    "Boundaries",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForMultimodalFlattening",
    "DataCollatorWithFlattening",
    "Fa2PatchError",
    "Patch",
    "Verification",
    "apply",
    "architectures",
    "boundaries",
    "packing",
    "register",
    "revert",
    "status",
    "verify",
]
