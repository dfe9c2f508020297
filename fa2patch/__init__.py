"""Padding-free training for Hugging Face causal LMs: ``fa2patch.apply(model)``."""

from . import packing
from .architectures import Architecture, architectures, register
from .boundaries import Boundaries, boundaries
from .collators import DataCollatorWithFlattening
from .completion_only import DataCollatorForCompletionOnlyLM
from .errors import Fa2PatchError
from .multimodal import DataCollatorForMultimodalFlattening
from .patching import Patch, apply, revert, status
from .verify import Verification, verify

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
