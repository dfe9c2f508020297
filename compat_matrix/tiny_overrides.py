"""Settings of tiny models that cannot be chosen by the name of a config's argument."""

from __future__ import annotations

from typing import Any

# ESM scales embeddings by the number of these tokens; rows.documents draws some.
MASK_TOKEN = 42

# Latent attention has as many key heads as query heads.
LATENT = {"num_key_value_heads": 4, "head_dim": 8}

# the text and vision models inside vision-language models that accept any
SIDES = {
    "llava": ("llama", "clip_vision_model"),
    "llava_next": ("mistral", "clip_vision_model"),
    "pixtral": ("mistral", "pixtral"),
    "mistral3": ("mistral", "pixtral"),
    "internvl": ("qwen2", "internvl_vision"),
}

# rotary embeddings of frames, height and width
MROPE = {
    **dict.fromkeys(["vision_start_token_id", "vision_end_token_id"], 93),
    "image_token_id": 94,
    "video_token_id": 95,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}

# Some versions do not have these arguments. Configs there would keep them as attributes without effect.
RENAMED = (
    "activation_sparsity_pattern", "full_attn_idxs", "layers_block_type", "layer_types", "rope_parameters",
    "use_mamba_kernels",
)  # fmt: skip

OVERRIDES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["mistral", "mixtral", "phi3", "starcoder2"], {"sliding_window": None}),
    "granite": {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None},
    },
    "falcon": {"new_decoder_architecture": True, "alibi": False, "bias": False, "parallel_attn": True},
    "olmo": {"clip_qkv": 8.0},
    "phi": {"partial_rotary_factor": 0.5},
    **dict.fromkeys(["qwen2", "qwen2_moe"], {"use_sliding_window": False}),
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    **dict.fromkeys(["axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"], LATENT),
    **dict.fromkeys(["kimi_linear", "longcat_flash", "minicpm3", "sarvam_mla", "youtu"], LATENT),
    **dict.fromkeys(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"], MROPE),
    **dict.fromkeys(
        ["gemma3n_text", "gemma4_text", "gemma4_unified_text"],
        {
            "activation_sparsity_pattern": [0.5, 0.0] * 2, "num_kv_shared_layers": 2, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    **dict.fromkeys(["falcon_mamba", "mamba"], {"state_size": 8, "time_step_rank": 4}),
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "xlstm": {
        "hidden_size": 64,  # its states are rounded up to 64
        "qk_dim_factor": 1.0, "num_blocks": 2, "num_heads": 2, "chunk_size": 16, "autocast_kernel_dtype": "float32",
        "sequence_kernel": "native_sequence__native", "chunkwise_kernel": "chunkwise--native_autograd",
        "step_kernel": "native",
    },
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"use_mamba_kernels": False, "attn_layer_offset": 1, "attn_layer_period": 2},
    **dict.fromkeys(["xmod", "xmod:masked"], {"default_language": "en_XX"}),
    "deberta:masked": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2:masked": {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "norm_rel_ebd": "layer_norm",
    },
    "mpnet:masked": {"pad_token_id": 1},
    "distilbert:masked": {"dim": 32, "hidden_dim": 48},
    "esmc:masked": {"num_key_value_heads": 4},
    "esm:masked": {"token_dropout": True, "mask_token_id": MASK_TOKEN, "position_embedding_type": "rotary"},
    "modernbert:masked": {
        "num_hidden_layers": 2, "global_attn_every_n_layers": 2, "local_attention": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "chunk_size": 8},
    "nemotron_h": {"ssm_state_size": 8, "chunk_size": 8},
    "minimax": {"block_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {
        "use_mamba_kernels": False, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "num_hidden_layers": 4,
    },
    "gpt_neox": {"rotary_pct": 0.5},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": dict.fromkeys(["sliding_attention", "full_attention"], MROPE["rope_parameters"]),
    },
    "zaya": {"num_experts_per_tok": 1},
    "llama4": {"attention_chunk_size": 6, "floor_scale": 4, "no_rope_layers": [1, 0], "layer_types": None},
    "ministral3": {
        "rope_parameters": {
            **dict.fromkeys(["beta_slow", "mscale", "mscale_all_dim"], 1.0), "rope_type": "yarn", "rope_theta": 1e4,
            "factor": 32.0, "beta_fast": 32.0, "max_position_embeddings": 128, "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dory": {
        "num_hidden_layers": 3,
        **dict.fromkeys(["n_input_layers", "n_recurrent_layers", "n_output_layers"], 1),
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "initializer_range": 1.0,  # the model divides its scales by it, and scale_up draws them around 1
    },
    "inkling2_loop_text": {
        "num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        **dict.fromkeys(["n_layers_per_attn_res_block", "loop_layer_index_start"], 1), "loop_layer_index_end": 2,
        **dict.fromkeys(["swa_head_dim", "d_rel", "loop_gate_rank"], 8), "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "sliding_window_size": 6, "rel_extent": 16, "unpadded_vocab_size": 97,
    },
}  # fmt: skip
