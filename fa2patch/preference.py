"""Public names for preference training (DPO and related methods) on packed rows."""

from .data.pairs import DataCollatorForPreferenceFlattening, per_document_logps

__all__ = ["DataCollatorForPreferenceFlattening", "per_document_logps"]
