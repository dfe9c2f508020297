from transformers.configuration_utils import PretrainedConfig

OWN = {
    "vocab_size": 128, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "partial_rotary_factor": 0.5, "num_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 3, "sliding_window_pattern": [1, 0], "attn_logit_cap": None, "max_position_embeddings": 64,
    "rope_theta": 100.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


class SinksConfig(PretrainedConfig):
    model_type = "sinks"
    _auto_class = "AutoConfig"

    def __init__(self, tie_word_embeddings=False, **kwargs):
        for name, value in OWN.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
