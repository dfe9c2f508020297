"""Gives a user's config tiny sizes. ``tiny_configs.SETTINGS`` says which arguments are sizes; structure stays."""

from __future__ import annotations

from typing import Any

from .. import tiny_configs

# The user's values of these are kept; layers cuts the number of layers.
KEPT = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "sliding_window_pattern", "first_k_dense_replace",
    "decoder_sparse_step", "moe_layer_interval", "tie_word_embeddings",
}  # fmt: skip

# Upper limits for counts that are structure: one expert per token stays one, and no shared expert stays none.
AT_MOST = {
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k"], 2),
    **dict.fromkeys(["top_k_experts", "n_group", "num_expert_group", "mamba_n_groups", "mamba_ngroups", "n_groups"], 2),
    **dict.fromkeys(["topk_group", "n_shared_experts", "moe_num_shared_experts"], 1),
}

HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# A config class computes these sizes for the tiny models, but a config.json states them as numbers.
ALSO = {
    "qk_head_dim": 16, "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 32, "linear_head_dim": 8,
    "linear_num_heads": 4, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip

# The tokens that a mixer computes at a time, each with arguments that only such a mixer has. At most as many stay as
# mamba_chunk_size has in tiny_configs.SETTINGS, so that documents of the points have several chunks.
CHUNKS = {"chunk_size": ("mamba_d_state", "ssm_state_size", "state_size"), "block_size": ("linear_attn_alpha_factor",)}

KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads", "kv_n_heads")
# Values by the ending of a name: no dropout, no GPU kernels, and Mamba layers twice as wide as the model.
ENDINGS = {
    ("dropout", "pdrop", "dropout_rate", "dropout_prob", "layerdrop", "jitter_noise", "jitter_eps"): 0.0,
    ("mamba_expand",): 2,
    ("use_mamba_kernels",): False,
}

# The original length of a tiny rope scaling. It is longer than any row of the points.
LIMIT = 64


def defaults(cls: Any) -> dict[str, Any]:
    # Those without a default have None.
    named = {name: each for name, each in tiny_configs.parameters(cls).items() if name != "self"}
    return {
        name: None if each.default is each.empty else each.default
        for name, each in named.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


def cut(cls: Any, settings: dict[str, Any]) -> dict[str, Any]:
    everything = {**defaults(cls), **settings}
    changes = _numbers(everything)
    for name, value in settings.items():
        if isinstance(value, dict) and value and all(str(key).isdigit() for key in value):
            changes[name] = {key: of_dict(part) for key, part in value.items() if isinstance(part, dict)}
    changes.update(_rope(everything, changes))
    return changes


def of_dict(settings: dict[str, Any]) -> dict[str, Any]:
    # This is for a nested config without a class, such as DBRX's attn_config.
    return {**settings, **_numbers(settings)}


def _numbers(settings: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "head_dim" or name in KEY_VALUE_HEADS:
            changes[name] = 8 if name == "head_dim" else _key_value_heads(settings, value)
        if name.endswith("_token_id") and name in tiny_configs.SETTINGS and "vocab_size" in settings:
            changes[name] = tiny_configs.SETTINGS[name]
        if value is None or value is False or name in KEPT:
            continue
        if name in AT_MOST:
            changes[name] = min(value, AT_MOST[name])
        elif name in ALSO and (name != "mamba_headdim" or "n_mamba_heads" in settings):
            changes[name] = ALSO[name]
        elif any(argument in settings for argument in CHUNKS.get(name, ())):
            changes[name] = min(value, tiny_configs.SETTINGS["mamba_chunk_size"])
        elif name not in changes and name in tiny_configs.SETTINGS and isinstance(value, (int, list)):
            changes[name] = tiny_configs.SETTINGS[name]
        for endings, ending_value in ENDINGS.items():
            if name.endswith(endings) and isinstance(value, (int, float)):
                changes[name] = ending_value
    return changes


def _key_value_heads(settings: dict[str, Any], value: Any) -> int:
    # It is 4, 1 or 2, if the user's model has as many as heads, one, or another number.
    heads = next((settings[name] for name in HEADS if isinstance(settings.get(name), int)), None)
    return 4 if value in (None, heads) else 1 if value == 1 else 2


def _rope(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    # The lists with one number per pair of head dimensions get shorter, and the length from which scaling starts.
    found: dict[str, Any] = {}
    head = changes.get("qk_rope_head_dim") or changes.get("head_dim") or 8
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name)
        if not isinstance(value, dict):
            continue
        pairs = int(head * (value.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0)) // 2
        by_kind = value and all(isinstance(part, dict) for part in value.values())
        found[name] = {k: _one_rope(v, pairs) for k, v in value.items()} if by_kind else _one_rope(value, pairs)
    if isinstance(settings.get("original_max_position_embeddings"), int):
        found["original_max_position_embeddings"] = LIMIT
    return found


def _one_rope(scaling: dict[str, Any], pairs: int) -> dict[str, Any]:
    tiny = dict(scaling)
    for name in ("short_factor", "long_factor"):
        if isinstance(scaling.get(name), list):
            tiny[name] = scaling[name][:pairs]
    if isinstance(scaling.get("mrope_section"), list):
        tiny["mrope_section"] = [1, 1, pairs - 2]
    if isinstance(scaling.get("original_max_position_embeddings"), int):
        tiny["original_max_position_embeddings"] = LIMIT
    return tiny
