"""Names and values that a batch's arguments have in every version of Transformers. Each is written here only."""

from __future__ import annotations

TOKENS = ("input_ids", "inputs_embeds")
"""Arguments that hold the tokens of a batch."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords of Transformers' DataCollatorWithFlattening (``return_flash_attn_kwargs``, ``return_seq_idx``)."""

LABELS = ("labels", "shift_labels")
"""Arguments that hold the tokens to predict. ``shift_labels`` holds each where it is predicted."""

IGNORED_LABEL = -100
"""The label of a token that no loss is computed for (``ignore_index`` of ``torch.nn.CrossEntropyLoss``)."""

CACHES = ("past_key_values", "past_key_value", "cache_params", "state")
"""Arguments that hold what is remembered of earlier tokens."""

GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}
"""Arguments with the sizes of pictures, and the arguments with the pictures that they belong to."""

PICTURES = (*GRIDS.values(), *GRIDS)
"""Arguments that come with pictures or videos."""
