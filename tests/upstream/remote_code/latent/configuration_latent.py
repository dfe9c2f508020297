from transformers import PretrainedConfig

OWN = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "max_position_embeddings": 64,
    "rope_theta": 100.0, "mscale": 1.2, "rms_norm_eps": 1e-6,
}  # fmt: skip


class LatentConfig(PretrainedConfig):
    model_type = "latent"
    _auto_class = "AutoConfig"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, tie_word_embeddings=False, **kwargs):
        for name, value in OWN.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
