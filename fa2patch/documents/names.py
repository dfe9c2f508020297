"""Names and special values of a batch's arguments, the same in every version of Transformers.

Only :data:`KEYS`, the table of pictures, films and sound, knows what a key of a processor's output means. The collator
joins examples by it, a forward recognises pictures and sound by it, and the docs print it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

TOKENS = ("input_ids", "inputs_embeds")

# Keyword for the segment that each segment of ``cu_seq_lens_*`` continues.
PARENTS = "segment_parents"

# Keywords of Transformers' DataCollatorWithFlattening (``return_flash_attn_kwargs``, ``return_seq_idx``), and ours.
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", PARENTS)

# The arguments of an encoder-decoder's forward that belong to its targets have this prefix.
OF_TARGETS = "decoder_"

# Keyword for [batch, length]: 0 in the padding of ``pad_to_multiple_of``, else 1. It is no ``attention_mask``, because
# Transformers takes a row with a mask for one document. A mask would also be a second source of boundaries: more would
# be read from the device, and a graph of torch.compile would break.
REAL = "real_tokens"

# ``shift_labels`` are already shifted to where they are predicted.
LABELS = ("labels", "shift_labels")

# The tokens to predict, where ``labels`` count what the loss is divided by: documents or tokens.
LOSS_LABELS = "loss_labels"

LOSS_WEIGHTS = "loss_weights"  # the weight of each of LOSS_LABELS in the loss

# Both select the tokens whose logits are computed: a number of last tokens, or an index of a row.
FEWER_LOGITS = ("logits_to_keep", "num_logits_to_keep")

IGNORED_LABEL = -100  # the default of ``ignore_index`` of torch.nn.CrossEntropyLoss

# Argument of Transformers' loss functions (4.46 on) with the label that has no loss, if it is another one.
IGNORE_INDEX = "ignore_index"

# The label in ``labels`` of a weighted loss, which count. It is no token, so a loss that uses it fails.
COUNTED_LABEL = 2**31 - 1

# Each argument with picture sizes, and the argument with the pictures.
GRIDS = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}

PICTURE, FILM, SOUND = "picture", "film", "sound"

# How the entries of several examples become those of one row.
JOINS = {
    "patches": "end to end; the grid says how many patches a picture has",
    "each": "end to end, one entry for each picture, film or sound; entries of all examples have one shape",
    "padded": "as each, and filled with zeros to the largest entry; the model cuts or masks what was filled",
    "in row": "the example's entries [1, n, ...] become the row's entries, filled with zeros to the largest entry",
    "example": "end to end, one entry for each example that has it",
    "same": "passed on; it must be the same in all examples",
    "positions": "passed to get_rope_index and not returned",
    "drop": "not returned",
}

# The value of Key.apart for a mask of which a single 0 changes how the model computes all pictures.
ZEROS = "zeros"


class Key(NamedTuple):
    """One key of a processor's output."""

    name: str
    of: str  # PICTURE, FILM or SOUND
    join: str  # a key of JOINS
    meaning: str  # its shape and what its numbers are
    beside: str = ""  # another key: this row of the table holds only if the example has that key too
    optional: bool = False  # processors leave the key out where it would hold only ones
    apart: str = ""  # a key whose presence in a forward changes what the model computes from this one


KEYS = (
    Key("pixel_values", PICTURE, "patches", "[patches, numbers] (Qwen-VL, GLM-V)", beside="image_grid_thw"),
    Key("pixel_values", PICTURE, "padded", "[pictures, patches, numbers] (LFM2-VL)", beside="spatial_shapes"),
    Key("pixel_values", PICTURE, "padded", "[pictures, crops, channels, height, width] (LLaVA-Next, LLaVA-OneVision) "
        "or [pictures, channels, height, width] (Pixtral, Mistral 3)", beside="image_sizes"),
    Key("pixel_values", PICTURE, "in row", "[1, pictures, channels, height, width] (Idefics 2 and 3, SmolVLM)",
        beside="pixel_attention_mask"),
    Key("pixel_values", PICTURE, "each", "[pictures, channels, height, width] (LLaVA, InternVL, Llama 4, Gemma 3) or "
        "[pictures, patches, numbers] (Gemma 4)"),
    Key("image_grid_thw", PICTURE, "each", "[pictures, 3]: frames, height and width in patches"),
    Key("image_position_ids", PICTURE, "each",
        "[pictures, patches, 2]: the column and row of each patch, -1 where patches are filled in (Gemma 4)"),
    Key("spatial_shapes", PICTURE, "each", "[pictures, 2]: height and width in patches"),
    Key("image_sizes", PICTURE, "each", "[pictures, 2]: height and width in pixels"),
    Key("batch_num_images", PICTURE, "example", "[1]: the number of the example's pictures"),
    Key("pixel_attention_mask", PICTURE, "padded", "[pictures, patches]: 0 where patches are filled in",
        beside="spatial_shapes"),
    Key("pixel_attention_mask", PICTURE, "in row", "[1, pictures, height, width]: 0 where pixels are filled in"),
    Key("pixel_mask", PICTURE, "each", "[pictures, height, width]: 0 where pixels are filled in (Aria)"),
    Key("image_pixel_values", PICTURE, "padded", "[pictures, crops, channels, height, width] (Phi-4-multimodal)"),
    Key("image_attention_mask", PICTURE, "padded", "[pictures, crops, height, width]: 0 where patches are filled in",
        apart=ZEROS),
    Key("input_image_embeds", PICTURE, "padded", "as image_pixel_values (Phi-4-multimodal's own code)"),
    Key("pixel_values_videos", FILM, "patches", "[patches, numbers] (Qwen-VL)", beside="video_grid_thw"),
    Key("pixel_values_videos", FILM, "each", "[films, frames, channels, height, width] (LLaVA-OneVision)"),
    Key("video_grid_thw", FILM, "each", "[films, 3]: frames, height and width in patches"),
    Key("second_per_grid_ts", FILM, "positions", "[films]: seconds between grids"),
    Key("video_second_per_grid", FILM, "positions", "[films]: seconds between grids (Qwen2.5-Omni)"),
    Key("use_audio_in_video", FILM, "positions", "whether sound belongs to the film (Qwen2.5-Omni)"),
    Key("input_features", SOUND, "padded", "[sounds, bands, frames] (Qwen2-Audio, Qwen2.5-Omni)",
        beside="feature_attention_mask"),
    Key("input_features", SOUND, "each", "[sounds, bands, frames] or [sounds, frames, bands] (Voxtral, Gemma 3n)"),
    Key("feature_attention_mask", SOUND, "padded", "[sounds, frames]: 0 where frames are filled in"),
    Key("input_features_mask", SOUND, "each", "[sounds, frames]: 0 where frames are filled in"),
    Key("audio_input_features", SOUND, "each", "[sounds, frames, bands] (Phi-4-multimodal, whose encoder sees what is "
        "filled in)", apart="image_pixel_values"),
    Key("audio_embed_sizes", SOUND, "each", "[sounds]: the number of placeholders of each sound"),
    Key("audio_attention_mask", SOUND, "each", "[sounds, frames]: 0 where frames are filled in", optional=True),
    Key("input_audio_embeds", SOUND, "each", "as audio_input_features (Phi-4-multimodal's own code)"),
    Key("input_mode", PICTURE, "same", "the kind of input (Phi-4-multimodal's own code)"),
)  # fmt: skip

# Where a config has the token ids at whose places pictures, films and sound are put.
PLACEHOLDERS = {
    PICTURE: ("image_token_id", "image_token_index"),
    FILM: ("video_token_id", "video_token_index"),
    SOUND: ("audio_token_id", "audio_token_index"),
}

# Arguments of a forward that hold or describe pictures, films or sound.
MEDIA = tuple(dict.fromkeys(key.name for key in KEYS if key.join not in ("positions", "drop", "same")))


class MediaRow(dict[str, Any]):
    """A packed row that also knows which pictures, films and sounds are whose, for :func:`fa2patch.verify`."""

    def __init__(self, batch: Mapping[str, Any], parts: Mapping[str, tuple[int, Sequence[int]]] | None = None) -> None:
        super().__init__(batch)
        # For each key: the dimension along which documents follow one another, and each document's number of entries.
        self.parts = dict(parts or {})

    def of(self, document: int) -> dict[str, Any]:
        found = {}
        for name, (dim, sizes) in self.parts.items():
            if document < len(sizes) and sizes[document]:
                found[name] = self[name].narrow(dim, sum(sizes[:document]), sizes[document])
        return found


def stated(ends: Any, longest: int | None) -> dict[str, Any]:
    # Where documents end, int32 ``[documents + 1]``, and the longest length, for queries and keys alike.
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def media_key(name: str, there: Container[str]) -> Key | None:
    return next((key for key in KEYS if key.name == name and (not key.beside or key.beside in there)), None)
