from transformers import PretrainedConfig


class TimeMixingConfig(PretrainedConfig):
    model_type = "time_mixing"
    _auto_class = "AutoConfig"

    def __init__(self, vocab_size=128, hidden_size=32, num_hidden_layers=2, tie_word_embeddings=False, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
