"""Collator that packs examples with pictures, films and sound, as processors return them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..documents.names import GRIDS, IGNORED_LABEL, MediaRow
from ..upstream import inspecting
from .collators import DataCollatorWithFlattening
from .columns import Columns, present, require_same_keys, with_tokens
from .multimodal_model import TYPES, Placeholders, RopeIndex, path_of
from .processor_outputs import join_media, read_output, require_alike, require_joins, require_the_same_keys


class DataCollatorForMultimodalFlattening:
    """Concatenate the examples of a mini-batch, with their pictures, films and sound, into one row without padding.

    A table of the keys that processors return says how the entries of examples become those of a row. In models with
    position ids on several axes (mRoPE) the model's own ``get_rope_index`` is called for each document.

    Args:
        model: The model to be trained, wrapped or not, or its config, from which a model without weights is built.
            The collator keeps the config and no weights, so it can be sent to the workers of a DataLoader.
        pad_to_multiple_of: Pad the row to a multiple of this many tokens, or by a rule, as
            :class:`DataCollatorWithFlattening` does. The padding is a document of its own: its
            labels are -100, and its position ids count up from 0.
        pad_token_id: ``input_ids`` of the padding.
        return_seq_idx: Return ``seq_idx``, the document number of every token.
        loss_masks: See :class:`DataCollatorWithFlattening`.
        keys: What a key means that the table does not have: ``"token"`` (one number per token), ``"each"`` (one entry
            for each picture, end to end), ``"padded"`` (the same, filled with zeros to the largest), ``"in row"``
            (``[1, n, ...]``), ``"example"`` (one entry for each example), ``"same"``, ``"positions"`` (for
            ``get_rope_index`` only) or ``"drop"``.

    Attributes:
        empty: See :class:`DataCollatorWithFlattening`.

    Raises:
        CollatorError: The model takes neither pictures nor sound, its forward makes rows longer in this version of
            Transformers, or an option is invalid.
    """

    def __init__(
        self,
        model: Any,
        *,
        pad_to_multiple_of: int | str | None = None,
        pad_token_id: int = 0,
        return_seq_idx: bool = False,
        loss_masks: Sequence[str] = (),
        keys: Mapping[str, str] | None = None,
    ) -> None:
        require_joins(keys or {})
        path = path_of(model)
        self._rope, self._placeholders, self._joins = RopeIndex(path), Placeholders(path), dict(keys or {})
        self._grids = [name for name in GRIDS if any(inspecting.takes(inner.forward, name) for inner in path)]
        self.empty = 0
        self._flatten = DataCollatorWithFlattening(
            return_flash_attn_kwargs=True,
            return_seq_idx=return_seq_idx,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=pad_token_id,
            loss_masks=loss_masks,
        )

    def __call__(self, features: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenate the examples into one packed row of T tokens.

        Args:
            features: Examples as the processor returns them, one document each, as lists, arrays or tensors. Pictures,
                films and sound may be in some, all or none of them.

                - ``input_ids`` and all other columns with one number per token (``attention_mask``, ``labels``,
                  ``mm_token_type_ids``, ...): ``[n]`` or ``[1, n]``. Tokens whose mask is 0 are dropped.
                - ``labels``: Default to ``input_ids``, with -100 at the placeholders of pictures and sound.
                - ``pixel_values``, ``image_grid_thw``, ``image_sizes``, ``input_features``, ...: see the table of keys.

        Returns:
            ``input_ids`` and ``labels``: int64 ``[1, T]``; the first label of every document is -100.
            ``position_ids``: int64 ``[1, T]``; for models with several axes ``[4, 1, T]`` (text, time, height, width)
            if the installed version's model takes four, else ``[3, 1, T]``. The text axis counts up in each document.
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``: int32 ``[documents + 1]``. ``max_length_q`` and ``max_length_k``:
            int. Pictures, films and sound: in the order of the examples, as the table says. ``mm_token_type_ids``, if
            the model takes them, and all other columns: ``[1, T]``. The dict also knows which pictures are whose, for
            :func:`fa2patch.verify`.

        Raises:
            CollatorError: In the cases of :class:`DataCollatorWithFlattening`; and if an example has
                ``position_ids``, ``seq_lengths`` or ``rope_deltas``, pictures and what describes them do not match,
                the number of placeholders in ``input_ids`` is not that of the pictures and sound (for example after
                truncation), entries do not go into one row, a key is not in the table and has not one number per token,
                or ``mm_token_type_ids`` are missing and ``get_rope_index`` takes them.
        """
        examples = [read_output(*each, self._joins, self._grids) for each in enumerate(present(features))]
        self._placeholders.check(examples)
        require_the_same_keys(examples)
        require_alike(examples)
        kept = with_tokens([len(example.columns["input_ids"]) for example in examples]) if examples else []
        axes = [self._rope.positions(at, examples[at]) for at in kept] if self._rope.several_axes else []
        self._complete([example.columns for example in examples])
        self.empty += len(examples) - len(kept)
        examples = [examples[at] for at in kept]
        columns = [example.columns for example in examples]
        batch = self._flatten(columns)
        if axes:
            text, found = batch["position_ids"][None], torch.cat(axes, dim=-1)  # [1, 1, T], [3, 1, T without padding]
            three = torch.cat([found, text[..., found.shape[-1] :].expand(3, -1, -1)], dim=-1)
            batch["position_ids"] = torch.cat([text, three]) if self._rope.text_axis else three
        media, parts = join_media(examples)
        return MediaRow({**batch, **media}, parts)

    def _complete(self, examples: Sequence[Columns]) -> None:
        # Token types may be in some examples only, and some forwards take none.
        if not self._rope.takes_types:
            for columns in examples:
                columns.pop(TYPES, None)
        elif any(TYPES in columns for columns in examples):
            for columns in examples:  # All tokens of a document without pictures are text.
                columns.setdefault(TYPES, np.zeros_like(columns["input_ids"]))
        require_same_keys([{name: 0 for name in columns if name != "labels"} for columns in examples])
        for columns in examples:
            ids = columns["input_ids"]
            columns.setdefault("labels", np.where(self._placeholders.at(ids), IGNORED_LABEL, ids))
