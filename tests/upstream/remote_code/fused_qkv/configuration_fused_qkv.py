from transformers.configuration_utils import PretrainedConfig

OWN = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 100.0, "rope_scaling": None,
    "rms_norm_eps": 1e-6, "alibi": False,
}  # fmt: skip


class FusedQkvConfig(PretrainedConfig):
    model_type = "fused_qkv"
    _auto_class = "AutoConfig"

    def __init__(self, attn_implementation="eager", tie_word_embeddings=False, **kwargs):
        for name, value in OWN.items():
            setattr(self, name, kwargs.pop(name, value))
        self.attn_implementation = attn_implementation or "eager"
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
