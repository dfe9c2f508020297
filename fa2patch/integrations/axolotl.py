"""The plugin of axolotl: ``plugins: [fa2patch.integrations.axolotl.Plugin]`` in its configuration.

Read and run with axolotl 0.12.2 and 0.19.0. Both call ``post_model_load`` with the policy and with the reference model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axolotl.integrations.base import BasePlugin

from ..data.collators import DataCollatorWithFlattening
from . import patched, said_after_a_step

# Under these options axolotl makes other batches than token ids and labels, or has others that read them.
OWN_BATCHES = ("reward_model", "process_reward_model", "rl", "pretraining_dataset", "processor_type", "kd_trainer")


class Plugin(BasePlugin):  # type: ignore[misc]
    """Patches the models that axolotl loads: packed rows are isolated, and padded batches are computed packed."""

    # Training rows of sample_packing have no padding and carry their documents' lengths, unless the configuration
    # itself says pad_to_sequence_len: true. Evaluation keeps axolotl's batches, because Trainer weighs the losses of an
    # evaluation by the rows of its batches.

    def __init__(self) -> None:
        super().__init__()
        self._pads_rows = False

    def register(self, cfg: Any) -> None:
        # Later, axolotl sets pad_to_sequence_len for all packed rows.
        self._pads_rows = bool(cfg.get("pad_to_sequence_len"))

    def post_model_load(self, cfg: Any, model: Any) -> None:
        patched(model)  # with its adapters

    def get_collator_cls_and_kwargs(self, cfg: Any, is_eval: bool = False) -> tuple[type, dict[str, Any]] | None:
        other = self._pads_rows or int(cfg.get("context_parallel_size") or 1) > 1
        if is_eval or other or not cfg.get("sample_packing") or any(cfg.get(name) for name in OWN_BATCHES):
            return None  # axolotl chooses
        return MultipackCollator, {}

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        # Trainer divides the loss by the number of labels. Up to 5.9 it counts all of them, so first labels, which no
        # token predicts, are kept there, as in padded batches. A patched model does not learn them.
        said_after_a_step(trainer)
        if isinstance(trainer.data_collator, MultipackCollator):
            shifts = getattr(trainer, "_loss_shifts_labels", False)
            trainer.data_collator.flatten.separator_id = -100 if shifts else None


class MultipackCollator:
    """Makes one row, with the documents' lengths, of what axolotl's multipack sampler gives."""

    # axolotl makes every collator with a tokenizer and options for padding. No padding is made, so they are not used.
    def __init__(self, tokenizer: Any, **options: Any) -> None:
        self.flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True, separator_id=None)

    def __call__(self, features: Sequence[Any]) -> Mapping[str, Any]:
        # Each feature is a row, which is a list of documents, or else a document of one row.
        rows = [row if isinstance(row, list) else [row] for row in features]
        return self.flatten([_columns(document) for row in rows for document in row])


def _columns(document: Mapping[str, Any]) -> dict[str, Any]:
    # The position ids of a document are made again, and its `length` is the sampler's.
    return {name: document[name] for name in ("input_ids", "labels", "attention_mask") if name in document}
