"""Tiny encoder-decoders, such as ``t5:pairs``, and pairs of a source and a target for them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fa2patch.upstream.find_models import takes_no_token_ids

from . import tiny_configs, tiny_models
from .tiny_configs import PAIRS, VOCABULARY, made, parameters

# The auto mappings with models that learn from labels, by what AutoModelForSeq2SeqLM takes first. A model type is an
# encoder-decoder if a class of these takes what its decoder reads.
MAPPINGS = (
    "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "VISION_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
    "VISUAL_QUESTION_ANSWERING", "TEXT_TO_WAVEFORM", "RNNT", "TDT",
)  # fmt: skip

_QUERIES = "finds objects in pictures: its decoder reads queries, not tokens"
_NUMBERS = "foretells series of numbers: its decoder reads no tokens"
_PART = "is a decoder, a part of the model type before the underscore"

# Their configs say is_encoder_decoder, and no class of MAPPINGS takes what a decoder reads.
WITHOUT_TARGETS = {
    **dict.fromkeys(["conditional_detr", "d_fine", "dab-detr", "deformable_detr", "deimv2", "detr"], _QUERIES),
    **dict.fromkeys(["grounding-dino", "mm-grounding-dino", "omdet-turbo", "rt_detr", "rt_detr_v2"], _QUERIES),
    **dict.fromkeys(["pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "table-transformer"], _QUERIES),
    **dict.fromkeys(["autoformer", "informer", "time_series_transformer"], _NUMBERS),
    **dict.fromkeys(["canary_decoder", "dia_decoder", "pp_formulanet_text"], _PART),
    "fastspeech2_conformer": "makes sound of text: its decoder reads no tokens",
    "nougat": "is vision-encoder-decoder by another name",
    "rag": "finds its sources itself, in an index",
}

# Sizes by the names of arguments that only encoder-decoders, and what reads their sounds and pictures, have
_SIZES: dict[str, Any] = {
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_num_hidden_layers", "decoder_num_hidden_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads", "num_encoder_attention_heads"], 4),
    **dict.fromkeys(["num_decoder_attention_heads", "encoder_num_attention_heads", "decoder_num_attention_heads"], 4),
    **dict.fromkeys(["encoder_num_key_value_heads", "decoder_num_key_value_heads", "cross_num_attention_heads"], 4),
    **dict.fromkeys(["cross_num_key_value_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "mlp_dim", "prompt_intermediate_size"], 48),
    **dict.fromkeys(["encoder_layerdrop", "decoder_layerdrop", "layerdrop", "mask_time_prob"], 0.0),
    **dict.fromkeys(["d_kv", "cross_head_dim", "num_mel_bins", "input_feat_per_channel", "codebook_dim"], 8),
    **dict.fromkeys(["src_vocab_size", "tgt_vocab_size", "encoder_vocab_size", "decoder_vocab_size"], VOCABULARY),
    **dict.fromkeys(["cross_hidden_size", "decoder_hidden_size", "conv_channels", "output_channels"], 32),
    **dict.fromkeys(["post_conv_in_channels", "post_conv_mid_channels", "post_conv_out_channels"], 32),
    **dict.fromkeys(["subsampling_conv_channels", "num_conv_pos_embeddings", "max_source_positions"], 16),
    **dict.fromkeys(["max_target_positions", "max_text_positions", "max_encoder_position_embeddings"], 128),
    "max_decoder_position_embeddings": 128, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "blank_token_id": VOCABULARY - 1, "num_conv_pos_embedding_groups": 4, "global_attn_indexes": [1],
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_filters": 4, "upsampling_ratios": [2, 2],
}  # fmt: skip


def names() -> list[str]:
    types: dict[str, None] = {}
    for mapping in MAPPINGS:
        types.update(dict.fromkeys(_classes(mapping)))
    return [f"{name}{PAIRS}" for name in types]


def _classes(mapping: str) -> dict[str, Any]:
    return dict(getattr(tiny_models._auto(), f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}))


@functools.cache
def model_class(architecture: str) -> Any:
    # It is a KeyError if the installed Transformers has no such encoder-decoder.
    transformers = importlib.import_module("transformers")
    for mapping in MAPPINGS:
        held = _classes(mapping).get(architecture[: -len(PAIRS)], ())
        for name in (held,) if isinstance(held, str) else held:
            cls = getattr(transformers, name, None)
            if cls is not None and {"decoder_input_ids", "labels"} <= {*inspect.signature(cls.forward).parameters}:
                return cls
    raise KeyError(architecture)


# The configs of the parts, for those that take any
_TEXT_AND_SOUND = {"text_encoder": "T5Config", "audio_encoder": "EncodecConfig"}
_SIDES = {
    "encoder-decoder": {"encoder": "BertConfig", "decoder": "BertConfig"},
    "vision-encoder-decoder": {"encoder": "ViTConfig", "decoder": "BertConfig"},
    "speech-encoder-decoder": {"encoder": "Wav2Vec2Config", "decoder": "BertConfig"},
    **dict.fromkeys(["blip-2", "instructblip", "instructblipvideo"], {"text_config": "T5Config"}),
    "musicgen": {**_TEXT_AND_SOUND, "decoder": "MusicgenDecoderConfig"},
    "musicgen_melody": {**_TEXT_AND_SOUND, "decoder": "MusicgenMelodyDecoderConfig"},
}

# What cannot be chosen by the name of an argument, by the model type of the whole or of a part
_OVERRIDES: dict[str, dict[str, Any]] = {
    "florence_vision": {
        "depths": [1], "patch_size": [7], "patch_stride": [7], "patch_padding": [0], "patch_prenorm": [False],
        "embed_dim": [32], "num_heads": [4], "num_groups": [4], "window_size": 4, "projection_dim": 32,
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moonshine_streaming_encoder": {"sliding_windows": [[16, 4], [16, 0]]},
    **dict.fromkeys(["t5gemma2_text", "t5gemma2_decoder"], {"query_pre_attn_scalar": 8, "sliding_window": 6}),
    "bigbird_pegasus": {"attention_type": "original_full"},  # block_sparse needs sources that are long
    "led": {"attention_window": 8},
    "t5_gemma_module": {"query_pre_attn_scalar": 8, "sliding_window": 6},
}  # fmt: skip


def config_of(architecture: str, **changes: Any) -> Any:
    cls = model_class(architecture).config_class
    settings = _settings(cls, architecture[: -len(PAIRS)])
    ends = [getattr(parameters(cls).get(name), "default", None) for name in ("decoder_start_token_id", "pad_token_id")]
    start = "pad_token_id" if ends[0] in (None, ends[1]) else "eos_token_id"  # T5 and Marian begin with padding
    if architecture.endswith(f"encoder-decoder{PAIRS}"):  # which takes padding at the start for hidden
        start = "bos_token_id"
    return made(cls, {**settings, "decoder_start_token_id": settings[start], **changes})


def _settings(cls: Any, kind: str) -> dict[str, Any]:
    known, small = parameters(cls), tiny_models._small(cls)
    vision = tiny_configs.VISION if {"image_size", "patch_size"} <= {*known} else {}
    sized = {**_SIZES, **vision}
    small |= {name: value for name, value in sized.items() if name in known and known[name].default is not False}
    parts = {name: {**_settings(of, of.model_type), "model_type": of.model_type} for name, of in _parts(cls, kind)}
    if kind.endswith("encoder-decoder"):  # of two models that know nothing of each other
        parts["decoder"] |= {"is_decoder": True, "add_cross_attention": True}
    return {**small, **parts, **_OVERRIDES.get(kind, {})}


def _parts(cls: Any, kind: str) -> Iterator[tuple[str, Any]]:
    transformers = importlib.import_module("transformers")
    told = {name: getattr(transformers, part) for name, part in _SIDES.get(kind, {}).items()}
    try:
        whole = vars(cls())
    except Exception:  # it is made of any two models
        whole = {}
    held = {name: type(part) for name, part in whole.items() if isinstance(part, transformers.PretrainedConfig)}
    yield from {**held, **told}.items()


@dataclass
class Pairs:
    """Sources, each with the arguments that say it to a model, and targets, int64 ``[1, length]``."""

    sources: list[dict[str, torch.Tensor]]
    targets: list[torch.Tensor]

    @property
    def of_tokens(self) -> bool:
        return "input_ids" in self.sources[0]

    def alone(self, at: int) -> dict[str, torch.Tensor]:
        return {**self.sources[at], "labels": self.targets[at]}

    def packed(self) -> dict[str, torch.Tensor]:
        # a row of sources and a row of targets; sounds and pictures stay a batch, one for each target
        batch = self._end_to_end(1 if self.of_tokens else 0)
        if self.of_tokens:
            batch["position_ids"] = counted([source["input_ids"] for source in self.sources])
        return {**batch, "labels": torch.cat(self.targets, 1), "decoder_position_ids": counted(self.targets)}

    def _end_to_end(self, along: int) -> dict[str, torch.Tensor]:
        return {name: torch.cat([source[name] for source in self.sources], along) for name in self.sources[0]}

    def padded(self, padding: int) -> dict[str, torch.Tensor]:
        labels = _right_padded(self.targets, -100)
        if not self.of_tokens:
            return {**self._end_to_end(0), "labels": labels}
        rows = [source["input_ids"] for source in self.sources]
        mask = _right_padded([torch.ones_like(row) for row in rows], 0)
        return {"input_ids": _right_padded(rows, padding), "attention_mask": mask, "labels": labels}


def counted(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(row.shape[1]) for row in rows])[None]


def _right_padded(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=value) for row in rows])


def pairs(architecture: str, sources: tuple[int, ...], targets: tuple[int, ...], seed: int = 0) -> Pairs:
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, VOCABULARY - 5, (1, length), generator=generator)

    name, shape = reads(architecture)
    made = [{name: _drawn(shape, generator) if shape else tokens(length)} for length in sources]
    return Pairs(made, [tokens(length) for length in targets])


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if shape == _SHAPES["flattened_patches"][0]:
        values[..., :2] = torch.arange(1.0, 1 + shape[1])[:, None]  # a patch begins with its row and its column
    return values


# What sounds and pictures may be to a model: the first that it computes is what it reads. A processor's sizes are not
# in the config.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "input_features": ((1, 8, 32), (1, 32, 8)),  # bands of a spectrum, and frames
    "input_values": ((1, 1600),),
    "pixel_values": ((1, 3, 28, 28),),
    "flattened_patches": ((1, 6, 2 + 3 * 16 * 16),),
}


@functools.cache
def reads(architecture: str) -> tuple[str, tuple[int, ...]]:
    """The argument with a source, and its shape; an empty one for tokens, which have any length."""
    model = tiny_models.build(architecture)
    if takes_no_token_ids(model.get_encoder()):
        takes = inspect.signature(type(model).forward).parameters
        for name in [name for name in _SHAPES if name in takes or name == "pixel_values"]:
            for shape in _SHAPES[name]:
                with contextlib.suppress(Exception):
                    model(**{name: _drawn(shape, torch.Generator())}, labels=torch.full((1, 3), 5))
                    return name, shape
    return "input_ids", ()
