"""Builds tiny models of every architecture.

Weights are scaled up, because the products of small default weights hide leaks. Sizes are chosen by the names of the
config's arguments (``tiny_configs``), so that the new models of a release need no code. ``tiny_overrides`` holds the
settings that cannot be chosen by name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from fa2patch.upstream.transformers_names import ATTENTION_FUNCTIONS

from . import tiny_copies
from .tiny_configs import MEDIA, PAIRS, SETTINGS, VISION, VOCABULARY, made, parameters
from .tiny_overrides import OVERRIDES, RENAMED, SIDES
from .user_models import models

# For each of these families, what finds its class and what makes its config. Importing tiny_media fills it.
WITH_MEDIA: dict[str, tuple[Callable[[str], Any], Callable[..., Any]]] = {}

# The project began with these families.
SEEDS = (
    "llama", "mistral", "mixtral", "granite", "dbrx", "falcon", "gemma", "olmo", "phi", "phi3", "qwen2", "qwen2_moe",
    "stablelm", "starcoder2",
)  # fmt: skip

# Their text side is checked. "pixtral" is Llava around a Pixtral tower.
TEXT_SIDES = (
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "llava_next", "mistral3", "llama4",
    "internvl", "pixtral",
)  # fmt: skip

# Without attention, they claim no flash attention.
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")

# They are checked in float64, because up to a thousandth of a float32 gradient is rounding, packed or not. xLSTM
# exponentiates sums of gates. Gemma 4's tower adds up small gradients of the places of patches. Jamba normalises what
# its mixers make of a token: float32 logits of its own padded batch differ by 1e-5 from those of documents alone.
IN_DOUBLE_PRECISION = ("gemma4:picture", "jamba", "xlstm")

# They claim no flash attention and have a cell, so that a change of what is refused is seen. Inkling 2's layers also
# attend over earlier residual blocks, which are no tokens of the row.
REFUSED = ("inkling2_loop_text",)

# "bert:masked" is BERT as an encoder with its masked-LM head; "bert" is BERT as a decoder.
MASKED = ":masked"

ENCODERS = tuple(
    f"{name}{MASKED}"
    for name in (
        "albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
        "ernie", "esm", "esmc", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "mpnet", "nomic_bert", "roberta",
        "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    )
)  # fmt: skip

# They count positions from the padding id + 1 by default, so documents alone get explicit position ids.
NOT_FROM_ZERO = (
    "camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip

# Transformers lists them as causal LMs. Each has the reason why it is not checked.
OUT_OF_SCOPE = {
    **dict.fromkeys(["musicgen", "musicgen_melody", "moshi", "moss_transcribe_diarize"], "makes or hears sound"),
    **dict.fromkeys(["gemma4_assistant", "gemma4_unified_assistant"], "drafts from another model's keys and values"),
    **dict.fromkeys(["gemma3n", "gemma4", "gemma4_unified"], "vision-language; its text side is there as ..._text"),
    **dict.fromkeys(
        ["emu3", "fuyu", "got_ocr2", "mllama", "phi4_multimodal"], "vision-language, of no make that is checked"
    ),
    "trocr": "reads pictures of text",
    "gpt-sw3": "is gpt2 by another name",
    "code_llama": "is llama by another name",
}

# They are scaled up more than the rest, so that rounding to bfloat16 does not route a token to another expert.
ROUTERS = (".gate.weight", "router.layer.weight", "router.weight")


def architectures() -> list[str]:
    names = {*_auto().MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_SIDES, *WITHOUT_ATTENTION, *ENCODERS, *WITH_MEDIA}
    names |= {*_pairs().names()}
    return [*filter(is_present, SEEDS), *sorted(filter(is_present, names - {*SEEDS, *OUT_OF_SCOPE}))]


def first_position(model: Any) -> int:
    return model.config.pad_token_id + 1 if model.config.model_type in NOT_FROM_ZERO else 0


def is_encoder(architecture: str) -> bool:
    # An encoder has no next token, no generate() and no cache.
    return architecture.endswith(MASKED)


def has_media(architecture: str) -> bool:
    return architecture.endswith(MEDIA)


def has_pairs(architecture: str) -> bool:
    return architecture.endswith(PAIRS)


def _pairs() -> Any:
    return importlib.import_module(".tiny_pairs", __package__)  # which imports this module


def _auto() -> Any:
    return importlib.import_module("transformers.models.auto.modeling_auto")


@functools.cache
def is_present(architecture: str) -> bool:
    # An architecture must claim flash attention and must not be an encoder-decoder. A user's config.json,
    # WITHOUT_ATTENTION, REFUSED and ENCODERS need not claim flash attention.
    try:
        cls = model_class(architecture)
    except (KeyError, ImportError, AttributeError):
        return False
    except RuntimeError as error:  # 4.48's ModernBERT imports more of flash-attn than the stand-in has
        if "Failed to import" in str(error):
            return False
        raise
    if has_pairs(architecture):
        return True
    need_not_claim = architecture in (*WITHOUT_ATTENTION, *REFUSED, *ENCODERS) or has_media(architecture)
    if models.is_file(architecture) or need_not_claim:
        return not _is_encoder_decoder(cls)
    modeling = sys.modules[cls.__module__]
    # since 5.24 Gemma 3 claims flash attention for its text alone: pictures need their mask
    asked = cls.__mro__ if architecture in TEXT_SIDES else [cls]
    flags = ("_supports_flash_attn_2", "_supports_flash_attn")
    claims = any(getattr(each, name, False) for each in asked for name in flags)
    classes = [name for name in vars(modeling) if name.endswith("FlashAttention2") and "Vision" not in name]
    return bool(claims or classes) and not _is_encoder_decoder(cls)


def _is_encoder_decoder(cls: Any) -> bool:
    return is_of_two_stacks(cls.config_class)


def is_of_two_stacks(config_class: Any) -> bool:
    parameter = parameters(config_class).get("is_encoder_decoder")
    return bool(parameter and parameter.default is True) or getattr(config_class, "is_encoder_decoder", False)


def model_class(architecture: str) -> Any:
    # It is a KeyError or an AttributeError if the installed Transformers does not have the class.
    if has_media(architecture):
        return WITH_MEDIA[architecture][0](architecture)
    if has_pairs(architecture):
        return _pairs().model_class(architecture)
    architecture = models.kind(architecture)
    transformers = importlib.import_module("transformers")
    if architecture in TEXT_SIDES:
        names = {}
        for mapping in ("MODEL_FOR_VISION_2_SEQ_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
            names.update(getattr(_auto(), mapping, {}))
        around_pixtral = architecture == "pixtral" and "pixtral" in _auto().CONFIG_MAPPING_NAMES
        name = names["llava" if around_pixtral else architecture]
    elif architecture.endswith(MASKED):
        name = _auto().MODEL_FOR_MASKED_LM_MAPPING_NAMES[architecture[: -len(MASKED)]]
    else:
        name = _auto().MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def config_of(architecture: str, **changes: Any) -> Any:
    # architecture: a model type, or the path of a config.json. changes: for the language model's part of the config
    if has_media(architecture):
        return WITH_MEDIA[architecture][1](architecture, **changes)
    if has_pairs(architecture):
        return _pairs().config_of(architecture, **changes)
    cls = config_class(architecture)
    if models.is_file(architecture):
        return models.config_of(architecture, cls, **changes)
    if architecture in TEXT_SIDES:
        return _around_text(architecture, cls, changes)
    return made(cls, {**_small(cls), **_overrides(architecture, cls), **changes})


def text_config_of(architecture: str) -> Any:
    config = config_of(architecture)
    return getattr(config, "text_config", config)


def config_class(architecture: str) -> Any:
    return model_class(architecture).config_class


def _small(cls: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {name: SETTINGS[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    noise = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "jitter_noise")
    for name, parameter in parameters(cls).items():
        if name in SETTINGS and parameter.default is not False:
            settings[name] = SETTINGS[name]
        elif name.endswith(noise) and parameter.default is not None:
            settings[name] = 0.0
    kinds = _kinds_of_layers(cls)
    if len(kinds) > 1:  # of a pattern, such as five sliding layers and a full one, one layer of each kind
        settings.update(layer_types=list(kinds), num_hidden_layers=len(kinds))
    return settings


@functools.cache
def _kinds_of_layers(cls: Any) -> tuple[str, ...]:
    if "layer_types" in parameters(cls):
        with contextlib.suppress(Exception):
            return tuple(dict.fromkeys(cls().layer_types))
    return ()


def _overrides(architecture: str, cls: Any) -> dict[str, Any]:
    overrides = copy.deepcopy(OVERRIDES.get(architecture, {}))
    for name in {*RENAMED} - {*parameters(cls)}:
        overrides.pop(name, None)
    if architecture == "mistral" and hasattr(modeling(architecture), "_make_sliding_window_causal_mask"):
        overrides["sliding_window"] = 4096  # 4.34's Mistral cannot be without a window
    return overrides


def _around_text(architecture: str, cls: Any, changes: dict[str, Any]) -> Any:
    kinds = importlib.import_module("transformers").CONFIG_MAPPING
    text_kind, vision_kind = SIDES.get(architecture, (None, None))
    text = copy.deepcopy(OVERRIDES.get(architecture, {}))
    sides: dict[str, Any] = {"vision_config": _vision(kinds, vision_kind, cls)}
    known = parameters(cls)
    if "text_config" not in known:  # qwen2_vl up to 4.51 is flat
        return made(cls, {**_small(cls), **text, **sides, **changes})
    text_class = kinds[text_kind] if text_kind else type(cls().text_config)
    text = {name: value for name, value in text.items() if name in parameters(text_class)}
    if hasattr(getattr(modeling(architecture), "Llama4TextModel", None), "create_chunked_attention_mask"):
        text["attention_chunk_size"] = 4096  # 4.51's and 4.52's chunks need a cache, which needs bfloat16
    text = {**_small(text_class), **text, **changes}
    sides["text_config"] = {"model_type": text_class.model_type, **text}
    if text_kind:
        sides["text_config"] = made(text_class, text)
    tokens = {name: value for name, value in OVERRIDES.get(architecture, {}).items() if name.endswith("_token_id")}
    if tokens and "vocab_size" not in known:
        tokens["vocab_size"] = VOCABULARY  # checkpoints have it at the top level too, and 4.54 reads it there
    return made(cls, {**_small(cls), **tokens, **sides})


def _vision(kinds: Any, kind: str | None, cls: Any) -> Any:
    vision_class = kinds[kind] if kind else type(cls().vision_config)
    settings = {name: value for name, value in VISION.items() if name in parameters(vision_class)}
    return vision_class(**settings) if kind else settings


def with_layers(architecture: str, layers: int) -> dict[str, Any]:
    # The kinds of layers repeat in order. Nothing is changed if the config names its number of layers otherwise.
    config = text_config_of(architecture)
    names = [name for name in ("num_hidden_layers", "n_layers", "n_layer", "num_layers") if name in vars(config)]
    if not names:
        return {}
    changes: dict[str, Any] = {names[0]: layers}
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        kinds = vars(config).get(name)
        if isinstance(kinds, (list, tuple)) and kinds:
            changes[name] = [kinds[index % len(kinds)] for index in range(layers)]
    if vars(config).get("num_kv_shared_layers"):  # Gemma 4 of 5.24 refuses layers that share what no layer makes
        changes["num_kv_shared_layers"] = 0
    if "attention_types" in vars(config):
        changes["attention_types"] = [[["global", "local"], layers // 2]]
    return changes


@functools.cache
def is_mixture(architecture: str) -> bool:
    # Experts multiply as many tokens as are routed to them, so rounding varies.
    return has_experts(build(architecture))


def has_experts(model: Any) -> bool:
    return any(re.search(r"expert|moe|router", name, re.IGNORECASE) for name, _ in model.named_modules())


def modeling(architecture: str) -> Any:
    return sys.modules[model_class(architecture).__module__]


def build(architecture: str, implementation: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    # The weights are the same for every implementation.
    wanted = (architecture, implementation, f"{sorted(changes.items())} {torch.get_default_dtype()}")
    if wanted not in _made_before:
        if len(_made_before) >= 64:
            _made_before.clear()
        model = unfilled(architecture, implementation, **changes)
        scale_up(model)
        try:
            _made_before[wanted] = tiny_copies.of(model)
        except RuntimeError:  # torch's older weight norm (MusicGen up to 4.48) can be neither pickled nor copied
            return model if dtype == torch.float32 else model.to(dtype)
    model = _made_before[wanted]()
    model = model if dtype == torch.float32 else model.to(dtype)
    if dtype == torch.float64 and getattr(model, "_can_set_experts_implementation", bool)():
        model.set_experts_implementation("eager")  # torch's grouped_mm takes no float64
    return model


# These functions copy models, because making one takes ten times as long.
_made_before: dict[tuple[str, str, str], Callable[[], Any]] = {}


LARGEST = 5_000_000  # parameters of a tiny model

# the architectures whose size was checked: without changes of the config, and with the first changes
_checked: set[tuple[str, bool]] = set()


def unfilled(architecture: str, implementation: str, **changes: Any) -> Any:
    # The weights are those that Transformers gives the model.
    if architecture == "mistral" and implementation == "flash_attention_2":
        newer = ("MISTRAL_ATTENTION_CLASSES", *ATTENTION_FUNCTIONS)
        if not any(hasattr(modeling(architecture), name) for name in newer):
            changes = {"sliding_window": 4096, **changes}  # the flash Mistral of 4.34 and 4.35 fails without a window
    config = config_of(architecture, **changes)
    cls = model_class(architecture)
    if implementation == "flash_attention_2":
        config._flash_attn_2_enabled = True  # 4.34 and 4.35
    elif hasattr(config, "_flash_attn_2_enabled"):
        config._flash_attn_2_enabled = False
    if (architecture, not changes) not in _checked:
        _check_size(cls, config)
        _checked.add((architecture, not changes))
    return _load(cls, config, implementation).float().eval()


def _check_size(cls: Any, config: Any) -> None:
    # This is found before the model takes any memory.
    base = importlib.import_module("transformers").PreTrainedModel
    try:  # torch computes random weights on the meta device in Python, as slowly as those of a model of millions
        with torch.device("meta"), mock.patch.object(base, "init_weights", lambda model: None):
            size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    except Exception:  # not every model can be made on the meta device
        return
    if size > LARGEST:
        raise ValueError(
            f"{cls.__name__}'s tiny config is not tiny: {size} parameters. It needs a row of tiny_overrides.py"
        )


def _load(cls: Any, config: Any, implementation: str) -> Any:
    if not hasattr(cls, "_from_config"):
        return cls(config)
    try:
        return cls._from_config(config, attn_implementation=implementation)
    except TypeError:  # 4.34 and 4.35
        return cls._from_config(config)
    except ValueError as error:  # 4.36 does not load a flash model in float32
        if "only supports torch.float16" not in str(error):
            raise
        model = cls._from_config(config, attn_implementation=implementation, torch_dtype=torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "cos_cached"):
                module.max_seq_len_cached = 0  # makes it compute its tables again, which were made in bfloat16
        return model


def scale_up(model: Any, seed: int = 0) -> None:
    # The weights are so large that every token affects every later one.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed" in name:
                parameter.copy_(noise)
            elif name.endswith(ROUTERS):
                parameter.copy_(noise * 8 * parameter.shape[-1] ** -0.5)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)
            elif "bias" in name:
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(1.0 + 0.3 * noise)
