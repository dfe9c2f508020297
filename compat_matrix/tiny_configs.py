"""The sizes of tiny configs, by the names of their arguments, for the matrix's models and for a user's own."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

VOCABULARY = 97

# Names with these endings have media in their rows (tiny_media). "llava" is the text side of "llava:picture".
MEDIA = (":picture", ":sound")

# "t5:pairs" is T5 as an encoder-decoder, with a source in one row and its target in another (tiny_pairs).
PAIRS = ":pairs"

SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        ["vocab_size", "vocab_size_per_layer_input", "text_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"],
        VOCABULARY,
    ),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim", "embedding_size"], 32),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff", "mlp_hidden_size"], 48),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "global_head_dim", "kv_channels", "qk_nope_head_dim", "qk_rope_head_dim"], 8),
    **dict.fromkeys(["v_head_dim", "hidden_size_per_layer_input", "rope_head_dim"], 8),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 128),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k"], 2),
    **dict.fromkeys(["top_k_experts"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"], 24),
    **dict.fromkeys(["expert_ffn_hidden_size", "expert_intermediate_size", "intermediate_size_mlp"], 24),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["n_groups", "mamba_n_groups", "mamba_ngroups"], 1),
    **dict.fromkeys(
        ["n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "moe_num_shared_experts"], 1
    ),
    **dict.fromkeys(["decoder_sparse_step", "moe_layer_interval"], 1),
    **dict.fromkeys(["mamba_d_head", "mamba_headdim", "mamba_head_dim"], 16),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "mamba_dt_rank"], 4),
    **dict.fromkeys(["linear_num_value_heads", "linear_num_heads"], 4),
    **dict.fromkeys(["mamba_d_state", "mamba_chunk_size"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 8),
    **dict.fromkeys(["n_mamba_heads", "linear_num_key_heads", "sliding_window_pattern"], 2),
    "mamba_d_ssm": 64,
    "lru_width": 32,
    "rotary_dim": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

VISION = {
    "hidden_size": 32, "embed_dim": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_heads": 4,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "out_hidden_size": 32, "vision_output_dim": 32,
    "projector_input_dim": 32, "projector_output_dim": 32, "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}  # fmt: skip


@functools.cache
def parameters(cls: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(getattr(cls, "__mro__", ())):
        if "__init__" in vars(base) and base is not object:
            found.update(inspect.signature(base.__init__).parameters)
    return found


def made(cls: Any, settings: dict[str, Any]) -> Any:
    for _ in range(8):
        try:
            return cls(**settings)
        except Exception as error:  # some config classes of 5.4 take some flags as integers only
            flag = re.search(r"Field '(\w+)' expected int, got bool \(value: (\w+)\)", str(error))
            if flag is None:
                raise
            settings = {**settings, flag[1]: int(flag[2] == "True")}
    return cls(**settings)
