"""The names by which fa2patch looks up what Transformers defines: modules, dictionaries, functions, methods, classes.

A release that renames one of them adds its name to the tuple here. ``python -m compat_matrix.follow`` says which name
is gone. The names of arguments are in ``documents/names.py``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any, Callable

# Modules. ``fa2patch run`` names two of them once more, in a file that imports nothing (run/startup).
MODELING = ("transformers.modeling_utils",)
MASKING = ("transformers.masking_utils",)  # 4.53 on
FLASH = ("transformers.modeling_flash_attention_utils",)
LOSSES = ("transformers.loss.loss_utils",)
TRAINERS = ("transformers.trainer",)
COLLATORS = ("transformers.data.data_collator",)
WITHOUT_INITIALIZATION = ("transformers.initialization", *MODELING)  # the first one from 5.0 on
MODEL_TYPES = ("transformers.models.auto.configuration_auto",)
MODEL_CLASSES = ("transformers.models.auto.modeling_auto",)
EACH_MODEL = "transformers.models."  # the folder with a package for each model type

# The class of all models, and that of trainers
PRETRAINED, TRAINER = "PreTrainedModel", "Trainer"

# Dictionaries of functions, by ``attn_implementation``: of attention, and of functions that make masks
ATTENTION_FUNCTIONS = ("ALL_ATTENTION_FUNCTIONS",)
MASK_FUNCTIONS = ("ALL_MASK_ATTENTION_FUNCTIONS",)

# Functions of attention, in a modeling module
EAGER = "eager_attention_forward"  # 4.48 on
CALLS_FLASH = "_flash_attention_forward"

# ModernBERT's method (4.48 to 5.0), which returns a mask for global and one for local layers
TWO_MASKS = "_update_attention_mask"

# What makes a decoder's inputs of labels: functions of a modeling module, and a model's methods (Pix2Struct's second)
SHIFTS = ("shift_tokens_right",)
SHIFTS_ITSELF = ("prepare_decoder_input_ids_from_labels", "_shift_right")

# The arguments by which a decoder gets an encoder's states and the mask of their padding
ENCODED, ENCODED_MASK = "encoder_hidden_states", "encoder_attention_mask"

# The method of a layer that looks up a bias for each distance, and the flag of layers with such a table (T5's kin)
COMPUTES_BIAS, HAS_BIAS = "compute_bias", "has_relative_attention_bias"
BIAS = "position_bias"  # the argument by which it hands its bias to the layers behind it

# Methods of a model that make 4-D masks
MASK_METHODS = (
    "_update_causal_mask",  # 4.38 to 4.52
    "_prepare_decoder_attention_mask",  # 4.34
    "_prepare_attn_mask",  # Falcon in 4.34
    "_update_linear_attn_mask",
    "_update_mamba_mask",
    "get_extended_attention_mask",  # of encoders, up to 4.57: a causal mask if they are decoders
    TWO_MASKS,
)
# Functions that make them: `_prepare_4d_*` from 4.35 on; `create_*_mask` from 4.53 on, which look up a function in
# MASK_FUNCTIONS
MASK_MAKERS = re.compile(r"create_\w*masks?(_mapping|_for_generate|_for_vision_model)?|_prepare_4d_\w+")
CONVERTER, UNMASK = "AttentionMaskConverter", "_unmask_unattended"  # 4.38 to 4.52 use it as well on a GPU

# The method that counts position ids on several axes for pictures
COUNTS_AXES = "get_rope_index"

# The variable for the result of pooling in the forwards of classifiers
POOLED_LOGITS = "pooled_logits"


def loaded(names: tuple[str, ...]) -> Any:
    # the module, if it is imported
    return next(filter(None, map(sys.modules.get, names)), None)


def imported(names: tuple[str, ...]) -> Any:
    # the first of these modules that this release has
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return importlib.import_module(names[-1])


def dictionary_in(modules: tuple[str, ...], names: tuple[str, ...]) -> Mapping[Any, Callable[..., Any]]:
    # It is empty in a release that has none, and before the module is imported.
    held = getattr(loaded(modules), "__dict__", {})
    for name in names:
        if name in held:
            found: Mapping[Any, Callable[..., Any]] = held[name]
            return found
    return {}
