from transformers import PretrainedConfig


class CoreAttentionConfig(PretrainedConfig):
    model_type = "core_attention"
    _auto_class = "AutoConfig"

    def __init__(self, padded_vocab_size=128, hidden_size=32, num_layers=2, num_attention_heads=4, **kwargs):
        self.padded_vocab_size = self.vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.num_layers = self.num_hidden_layers = num_layers
        self.num_attention_heads = num_attention_heads
        super().__init__(**{"tie_word_embeddings": False, **kwargs})
