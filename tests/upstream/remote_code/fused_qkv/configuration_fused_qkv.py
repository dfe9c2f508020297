from transformers.configuration_utils import PretrainedConfig


class FusedQkvConfig(PretrainedConfig):
    model_type = "fused_qkv"
    _auto_class = "AutoConfig"

    def __init__(
        self,
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rope_theta=100.0,
        rope_scaling=None,
        rms_norm_eps=1e-6,
        alibi=False,
        attn_implementation="eager",
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        self.rms_norm_eps = rms_norm_eps
        self.alibi = alibi
        self.attn_implementation = attn_implementation or "eager"
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
