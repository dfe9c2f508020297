"""A model in the style of ChatGLM and Qwen 1: a separate module computes attention, and there is no other kind."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_core_attention import CoreAttentionConfig


class CoreAttention(nn.Module):
    def forward(self, query_layer, key_layer, value_layer, attention_mask):
        heads = (x.transpose(1, 2) for x in (query_layer, key_layer, value_layer))
        context = F.scaled_dot_product_attention(*heads, attention_mask, is_causal=attention_mask is None)
        return context.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.core_attention = CoreAttention()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask, position_ids):
        query, key, value = self.query_key_value(hidden_states).unflatten(-1, (3, self.heads, -1)).unbind(2)
        frequencies = 100.0 ** -torch.arange(0.0, 1.0, 2 / query.shape[-1])
        angles = position_ids[..., None, None] * frequencies
        query, key = (self.rotate(x, angles) for x in (query, key))
        return self.dense(self.core_attention(query, key, value, attention_mask))

    @staticmethod
    def rotate(x, angles):
        even, odd = x.chunk(2, dim=-1)
        return torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], dim=-1)


class GLMBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size)
        self.self_attention = SelfAttention(config)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask, position_ids):
        hidden_states = hidden_states + self.self_attention(
            self.input_layernorm(hidden_states), attention_mask, position_ids
        )
        return hidden_states + self.mlp(hidden_states).relu()


class GLMTransformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([GLMBlock(config) for _ in range(config.num_layers)])

    def forward(self, hidden_states, attention_mask, position_ids):
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, position_ids)
        return hidden_states


class CoreAttentionPreTrainedModel(PreTrainedModel):
    config_class = CoreAttentionConfig
    base_model_prefix = "transformer"

    def _init_weights(self, module):
        return


class CoreAttentionModel(CoreAttentionPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.encoder = GLMTransformer(config)
        self.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_masks(self, attention_mask, inputs_embeds):
        length = inputs_embeds.shape[1]
        return torch.ones(length, length, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        inputs_embeds = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1])[None]
        if attention_mask is not None:
            attention_mask = self.get_masks(attention_mask, inputs_embeds)
        return BaseModelOutputWithPast(last_hidden_state=self.encoder(inputs_embeds, attention_mask, position_ids))


class CoreAttentionForCausalLM(CoreAttentionPreTrainedModel):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.transformer = CoreAttentionModel(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.transformer.embedding

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        output = self.transformer(input_ids, position_ids, attention_mask, inputs_embeds=inputs_embeds)
        return CausalLMOutputWithPast(logits=self.transformer.output_layer(output[0]))
