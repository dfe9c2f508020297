"""A model in the style of RWKV's remote code: instead of attention, it carries a decaying sum along the row."""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_time_mixing import TimeMixingConfig


class TimeMix(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.time_decay = nn.Parameter(torch.ones(width))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden):
        weight = self.key(hidden).clamp(max=8).exp()
        weighted = weight * self.value(hidden)
        decay = torch.exp(-self.time_decay.exp())
        above = below = torch.zeros_like(hidden[:, 0])
        told = []
        for step in range(hidden.shape[1]):
            above, below = above * decay + weighted[:, step], below * decay + weight[:, step]
            told.append(above / below)
        return self.output(self.receptance(hidden).sigmoid() * torch.stack(told, dim=1))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln1, self.att = nn.LayerNorm(config.hidden_size), TimeMix(config)

    def forward(self, hidden):
        return hidden + self.att(self.ln1(hidden))


class TimeMixingPreTrainedModel(PreTrainedModel):
    config_class = TimeMixingConfig
    base_model_prefix = "rwkv"

    def _init_weights(self, module):
        return


class TimeMixingModel(TimeMixingPreTrainedModel):
    _auto_class = "AutoModel"

    def __init__(self, config):
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for block in self.blocks:
            hidden = block(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class TimeMixingForCausalLM(TimeMixingPreTrainedModel):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.rwkv = TimeMixingModel(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.rwkv.embeddings

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        return CausalLMOutputWithPast(logits=self.head(self.rwkv(input_ids, inputs_embeds=inputs_embeds)[0]))
