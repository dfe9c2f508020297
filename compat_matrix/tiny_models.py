"""Tiny models of every family, with weights scaled up: default tiny weights hide leaks (products of small numbers)."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch

VOCABULARY = 97

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "resid_pdrop": 0.0,
        "emb_pdrop": 0.0,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None},
    },
    "falcon": {
        "ffn_hidden_size": 48,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "alibi": False,
        "bias": False,
        "parallel_attn": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gemma": {"head_dim": 8},
    "olmo": {"clip_qkv": 8.0},
    "phi": {"partial_rotary_factor": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    },
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
}

MIXTURES = ("mixtral", "dbrx", "qwen2_moe")
"""Families whose experts multiply as many tokens at a time as were routed to them: another shape, another rounding."""

ROUTERS = (".gate.weight", "router.layer.weight", "router.weight")
"""Scaled up more than the rest, so that rounding to bfloat16 does not send a token to another expert."""

_OWN_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def config_of(family: str, **changes: Any) -> Any:
    """A tiny config of the family, in the installed Transformers."""
    transformers = importlib.import_module("transformers")
    settings = {**_COMMON, **copy.deepcopy(FAMILIES[family]), **changes}
    if family == "dbrx":
        settings = {
            name: value for name, value in settings.items() if name not in (*_OWN_NAMES, "max_position_embeddings")
        }
    if family == "falcon":
        settings = {
            name: value for name, value in settings.items() if name not in ("intermediate_size", "num_key_value_heads")
        }
    if (
        family == "mistral"
        and settings["sliding_window"] is None
        and hasattr(_modeling(family), "_make_sliding_window_causal_mask")
    ):
        settings["sliding_window"] = 4096  # 4.34 does not know a Mistral without a window
    try:
        return transformers.CONFIG_MAPPING[family](**settings)
    except Exception as error:  # 5.4's OlmoConfig takes this flag only as a number
        if "'tie_word_embeddings' expected int" not in str(error):
            raise
        return transformers.CONFIG_MAPPING[family](**{**settings, "tie_word_embeddings": 0})


def _needs_a_window(modeling: Any) -> bool:
    """4.34's and 4.35's flash Mistral fails where the window is None."""
    return not (hasattr(modeling, "MISTRAL_ATTENTION_CLASSES") or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"))


def _modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def is_present(family: str) -> bool:
    """Whether the installed Transformers has this family with flash attention."""
    transformers = importlib.import_module("transformers")
    if family not in transformers.CONFIG_MAPPING:
        return False
    cls = model_class(family)
    return any(
        getattr(cls, name, False) for name in ("_supports_flash_attn_2", "_supports_flash_attn")
    ) or "FlashAttention2" in " ".join(vars(importlib.import_module(cls.__module__)))


def model_class(family: str) -> Any:
    """The family's causal LM class."""
    transformers = importlib.import_module("transformers")
    mapping = importlib.import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping[transformers.CONFIG_MAPPING[family]]


def build(family: str, implementation: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of the family with the same weights whatever the implementation; in eval mode."""
    if family == "mistral" and implementation == "flash_attention_2" and _needs_a_window(_modeling(family)):
        changes.setdefault("sliding_window", 4096)
    config = config_of(family, **changes)
    cls = model_class(family)
    if implementation == "flash_attention_2":
        config._flash_attn_2_enabled = True  # 4.34 and 4.35
    elif hasattr(config, "_flash_attn_2_enabled"):
        config._flash_attn_2_enabled = False
    model = _load(cls, config, implementation).float()
    scale_up(model)
    return model.to(dtype).eval()


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
                module.max_seq_len_cached = 0  # its tables were made in bfloat16: make them again
        return model


def scale_up(model: Any, seed: int = 0) -> None:
    """Random weights so large that every token matters to every later one."""
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
