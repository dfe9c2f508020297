"""The public names of :mod:`fa2patch.data.preference`: preference training (DPO and its kin) on packed rows."""

from .data.preference import DataCollatorForPreferenceFlattening, per_document_logps, trainer_class

__all__ = ["DataCollatorForPreferenceFlattening", "per_document_logps", "trainer_class"]
