from transformers.configuration_utils import PretrainedConfig


class SinksConfig(PretrainedConfig):
    model_type = "sinks"
    _auto_class = "AutoConfig"

    def __init__(
        self,
        vocab_size=128,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        partial_rotary_factor=0.5,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        sliding_window_pattern=(1, 0),
        attn_logit_cap=None,
        max_position_embeddings=64,
        rope_theta=100.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.partial_rotary_factor = partial_rotary_factor
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.sliding_window = sliding_window
        self.sliding_window_pattern = list(sliding_window_pattern)
        self.attn_logit_cap = attn_logit_cap
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
