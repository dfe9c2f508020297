"""Public names for preference training (DPO and related methods) on packed rows."""

from .data.preference import DataCollatorForPreferenceFlattening, per_document_logps
from .data.trainers import trainer_class

__all__ = ["DataCollatorForPreferenceFlattening", "per_document_logps", "trainer_class"]
