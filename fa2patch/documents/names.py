"""Names and special values of a batch's arguments, the same in every version of Transformers."""

from __future__ import annotations

TOKENS = ("input_ids", "inputs_embeds")
"""Arguments that hold the tokens of a batch."""

PARENTS = "segment_parents"
"""Keyword for the segment that each segment of ``cu_seq_lens_*`` continues."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", PARENTS)
"""Keywords of Transformers' DataCollatorWithFlattening (``return_flash_attn_kwargs``, ``return_seq_idx``), and ours."""

REAL = "real_tokens"
"""Keyword for the row's real tokens, ``[batch, length]``: 0 in the padding of ``pad_to_multiple_of``, else 1.

It is no ``attention_mask``, because Transformers' own code takes a row with a mask for one document, and because a mask
is a source of boundaries: with two sources, more is read from the device, and a graph of torch.compile breaks.
"""

LABELS = ("labels", "shift_labels")
"""Arguments that hold the tokens to predict. ``shift_labels`` are already shifted to where they are predicted."""

LOSS_LABELS = "loss_labels"
"""Argument with the tokens to predict, where ``labels`` count documents (``loss_weights="document"``)."""

LOSS_WEIGHTS = "loss_weights"
"""Argument with the weight of each of ``loss_labels`` in the loss."""

FEWER_LOGITS = ("logits_to_keep", "num_logits_to_keep")
"""Arguments that select the tokens whose logits are computed: a number of last tokens, or an index of a row."""

IGNORED_LABEL = -100
"""The label of a token without a loss (``ignore_index`` of ``torch.nn.CrossEntropyLoss``)."""

IGNORE_INDEX = "ignore_index"
"""Argument of Transformers' loss functions (4.46 on) with the label that has no loss, if it is another one."""

COUNTED_LABEL = 2**31 - 1
"""The one label of a document in ``labels`` that count documents. It is no token, so a loss that uses it fails."""

GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
"""Maps each argument with picture sizes to the argument with the pictures."""
