"""The families with pictures or sound, such as ``llava:picture``: how their tiny models and documents are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import tiny_pictures as pictures
from .tiny_pictures import Document, Draw

# token ids: the start of a picture, and the placeholders
START, PICTURE, FILM, SOUND = 93, 94, 95, 96

TOKENS = {
    **dict.fromkeys(["image_token_id", "image_token_index"], PICTURE),
    **dict.fromkeys(["video_token_id", "video_token_index"], FILM),
    **dict.fromkeys(["audio_token_id", "audio_token_index"], SOUND),
    **dict.fromkeys(["vision_start_token_id", "image_start_token_id", "audio_start_token_id"], START),
    **dict.fromkeys(["vision_end_token_id", "image_end_token_id", "audio_end_token_id"], 92),
    "video_start_token_id": 90,
    "video_end_token_id": 91,
}
_PINPOINTS = [[28, 56], [56, 28], [56, 56]]
_SIGLIP = {"num_hidden_layers": 2, "image_size": 28, "patch_size": 14, "vision_use_head": False}
_PATCHES = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 7}
_PHI = {"num_hidden_layers": 2, "image_size": 28, "patch_size": 7, "crop_size": 28, "feature_layer": -1}
_PHI_SOUND = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 1, "num_attention_heads": 4, "input_size": 80,
    "ext_pw_out_channel": 32, "nemo_conv_channels": 32, "depthwise_separable_out_channel": 32,
    "depthwise_seperable_out_channel": 32, "kernel_size": 3, "audio_token_id": SOUND,
}  # fmt: skip
_SOUND = {
    "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "d_model": 32,
    "max_source_positions": 8, "n_window": 4, "output_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    cls: str  # the model's class
    # makes one picture or sound: the number of its placeholders, and the processor's keys
    make: Callable[[Draw, int], tuple[int, Document]]
    of: int = PICTURE  # its placeholder
    # the model types of the parts, for configs that take any
    text: str = ""
    vision: str = ""
    # settings of the parts, by the name of the part's config; None leaves a part out
    towers: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    # What sees itself in both directions, according to token_type_ids: each of the "pictures", which have type 1, or
    # the "prefix", which has type 0 and no labels. It is empty if nothing does.
    both_ways: str = ""


# Their configs are those of tiny_models, which have a tower.
NO_CONFIG = ("qwen2_vl:picture", "qwen2_5_vl:picture", "qwen3_vl:picture", "qwen3_vl_moe:picture")

_LLAVA = {"image_seq_length": 4, "image_grid_pinpoints": _PINPOINTS}
_ANY_SIZE = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 1}
FAMILIES = {
    "qwen2_vl:picture": Family("Qwen2VLForConditionalGeneration", pictures.grid),
    "qwen2_5_vl:picture": Family("Qwen2_5_VLForConditionalGeneration", pictures.grid),
    "qwen3_vl:picture": Family("Qwen3VLForConditionalGeneration", pictures.grid),
    "qwen3_vl_moe:picture": Family("Qwen3VLMoeForConditionalGeneration", pictures.grid),
    "llava:picture": Family(
        "LlavaForConditionalGeneration", pictures.plain, text="llama", vision="clip_vision_model", config=_LLAVA
    ),
    "llava_next:picture": Family(
        "LlavaNextForConditionalGeneration", pictures.crops, text="mistral", vision="clip_vision_model", config=_LLAVA
    ),
    "llava_onevision:picture": Family(
        "LlavaOnevisionForConditionalGeneration", pictures.crops, text="qwen2", vision="siglip_vision_model",
        towers={"vision_config": _SIGLIP}, config=_LLAVA,
    ),
    "idefics2:picture": Family(
        "Idefics2ForConditionalGeneration", pictures.masked, text="mistral",
        towers={
            "vision_config": {"num_hidden_layers": 1, "image_size": 28, "patch_size": 7},
            "perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4,
                                 "resampler_head_dim": 8, "num_key_value_heads": 2, "hidden_size": 32},
        },
    ),
    "idefics3:picture": Family(
        "Idefics3ForConditionalGeneration", pictures.square, text="llama", towers={"vision_config": _PATCHES},
        config={"scale_factor": 2},
    ),
    "smolvlm:picture": Family(
        "SmolVLMForConditionalGeneration", pictures.square, text="llama",
        # 5.20 puts tokens into the row by as many as a patch has pixels in a row: 2 divides the 4 tokens of a picture
        towers={"vision_config": {**_PATCHES, "patch_size": 2}}, config={"scale_factor": 7},
    ),
    "pixtral:picture": Family(
        "LlavaForConditionalGeneration", pictures.any_size, text="mistral", vision="pixtral",
        towers={"vision_config": {"image_size": 56, "patch_size": 14}}, config=_ANY_SIZE,
    ),
    "mistral3:picture": Family(
        "Mistral3ForConditionalGeneration", pictures.any_size, text="mistral", vision="pixtral",
        towers={"vision_config": {"image_size": 56, "patch_size": 7}}, config={"spatial_merge_size": 2},
    ),
    "internvl:picture": Family(
        "InternVLForConditionalGeneration", pictures.plain, text="qwen2", vision="internvl_vision",
        towers={"vision_config": {"image_size": [28, 28], "patch_size": [7, 7], "num_hidden_layers": 1}},
        config={"image_seq_length": 4, "downsample_ratio": 0.5},
    ),
    "gemma3:picture": Family(
        "Gemma3ForConditionalGeneration", pictures.plain, towers={"vision_config": _SIGLIP},
        config={"mm_tokens_per_image": 4, "boi_token_index": START, "eoi_token_index": 92}, both_ways="pictures",
    ),
    "paligemma:picture": Family(
        "PaliGemmaForConditionalGeneration", pictures.plain, text="gemma", vision="siglip_vision_model",
        towers={"vision_config": _SIGLIP}, config={"projection_dim": 32, "hidden_size": 32, "vocab_size": 97},
        both_ways="prefix",
    ),
    "gemma4:picture": Family(
        "Gemma4ForConditionalGeneration", pictures.positioned, text="gemma4_text",
        towers={"audio_config": None, "vision_config": {
            "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64, "head_dim": 8,
            "num_key_value_heads": 4,
        }},
    ),
    "llama4:picture": Family(
        "Llama4ForConditionalGeneration", pictures.one_token, towers={"vision_config": {"intermediate_size": 128}}
    ),
    "phi4_multimodal:picture": Family(
        "Phi4MultimodalForCausalLM", pictures.phi, towers={"vision_config": _PHI, "audio_config": _PHI_SOUND},
    ),
    "phi4_multimodal:sound": Family(
        "Phi4MultimodalForCausalLM", pictures.phi_sound, SOUND,
        towers={"vision_config": _PHI, "audio_config": _PHI_SOUND},
    ),
    "qwen2_audio:sound": Family(
        "Qwen2AudioForConditionalGeneration", pictures.sound, SOUND, text="qwen2", towers={"audio_config": _SOUND},
    ),
    "qwen2_5_omni_thinker:sound": Family(
        "Qwen2_5OmniThinkerForConditionalGeneration", pictures.omni_sound, SOUND, towers={"audio_config": _SOUND},
        config=TOKENS,
    ),
}  # fmt: skip
