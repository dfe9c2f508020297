"""Transformers' own modeling tests for a few architectures, plain or patched: run by ``compat_matrix.upstream_tests``.

They are those of ``tests/test_modeling_common.py`` in Transformers' source distribution, which has no tests of single
architectures. So what they need of an architecture comes from :mod:`compat_matrix.tiny_models`, and that of an
encoder-decoder from here.
"""

from __future__ import annotations

import copy
import os
import unittest
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import fa2patch
from compat_matrix import tiny_configs, tiny_models
from compat_matrix.upstream_tests import PATCHED
from tests import test_modeling_common as common  # type: ignore[import-not-found]

FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "gemma2", "phi3", "granite", "stablelm", "starcoder2", "olmo",
    "bert:masked", "lfm2",
)  # fmt: skip

ENCODER_DECODERS = ("t5", "bart", "mbart", "marian", "pegasus", "whisper")
HEARS = ("whisper",)

_HEADS = ("", "FOR_CAUSAL_LM_", "FOR_MASKED_LM_", "FOR_SEQUENCE_CLASSIFICATION_", "FOR_TOKEN_CLASSIFICATION_")
_HEADS_OF_TWO = ("", "FOR_SEQ_TO_SEQ_CAUSAL_LM_", "FOR_SPEECH_SEQ_2_SEQ_")

_SIZES = {
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim", "d_ff"], 48),
    **dict.fromkeys(["d_kv", "num_mel_bins", "relative_attention_num_buckets"], 8),
    **dict.fromkeys(["max_target_positions", "max_position_embeddings"], 128),
    "max_source_positions": 16,
    "decoder_start_token_id": 0,
    **dict.fromkeys(["begin_suppress_tokens", "forced_eos_token_id"]),
}

counted = {"patched": 0, "refused": 0}


class Tester:
    # The common tests ask this of an architecture's tester.

    is_training, batch_size, seq_length = True, 3, 7

    def __init__(self, family: str) -> None:
        self.config = tiny_models.config_of(family)
        self.hidden_size, self.num_hidden_layers = self.config.hidden_size, self.config.num_hidden_layers
        self.num_attention_heads = self.config.num_attention_heads

    def get_config(self) -> Any:
        return copy.deepcopy(self.config)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ids = torch.randint(3, self.config.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TesterOfTwo(Tester):
    # An architecture with an encoder and a decoder

    def __init__(self, family: str) -> None:
        cls = CONFIG_MAPPING[family]
        small = {name: value for name, value in tiny_models._small(cls).items() if name != "tie_word_embeddings"}
        sizes = {name: value for name, value in _SIZES.items() if name in tiny_configs.parameters(cls)}
        self.config, self.hears = cls(**{**small, **sizes}), family in HEARS
        self.hidden_size, self.num_attention_heads, self.num_hidden_layers = 32, 4, 2
        self.encoder_seq_length = 16 if self.hears else self.seq_length  # a sound's two frames are a position
        self.decoder_seq_length = self.key_length = self.seq_length

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config, given = super().prepare_config_and_inputs_for_common()
        if self.hears:
            given = {"input_features": torch.randn(self.batch_size, 8, 32)}
        ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        return config, {**given, "decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}


def patched_first(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    # Only an outermost model is patched, at its first call.
    if "_tried" not in vars(model) and not _inside:
        vars(model)["_tried"] = True
        try:
            fa2patch.apply(model)
            counted["patched"] += 1
        except fa2patch.Fa2PatchError:
            counted["refused"] += 1
    _inside.append(model)
    try:
        return torch.nn.Module.__call__(model, *args, **kwargs)
    finally:
        _inside.pop()


_inside: list[PreTrainedModel] = []

if os.environ.get(PATCHED):
    PreTrainedModel.__call__ = patched_first


def _tests_of(family: str) -> type:
    two = family in ENCODER_DECODERS

    def set_up(self: Any) -> None:
        torch.manual_seed(0)
        self.model_tester = (TesterOfTwo if two else Tester)(family)

    config = CONFIG_MAPPING[family] if two else tiny_models.config_class(family)
    heads = _HEADS_OF_TWO if two else _HEADS
    found = (getattr(modeling_auto, f"MODEL_{head}MAPPING").get(config, None) for head in heads)
    classes = tuple(dict.fromkeys(cls for cls in found if isinstance(cls, type)))
    return type(f"Test_{family.replace(':', '_')}", (common.ModelTesterMixin, unittest.TestCase), {
        "all_model_classes": classes, "setUp": set_up, "pipeline_model_mapping": {}, "is_encoder_decoder": two,
    })  # fmt: skip


_present = (*filter(tiny_models.is_present, FAMILIES), *ENCODER_DECODERS)
globals().update({cls.__name__: cls for cls in map(_tests_of, _present)})


def test_what_was_patched(record_testsuite_property: Any) -> None:
    for name, count in counted.items():
        record_testsuite_property(name, count)
