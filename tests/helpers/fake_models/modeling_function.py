"""Attention as in 4.43 to 4.47: a class for each implementation; the flash class calls a function of this module.

The model has learned positions and a sliding window. The function is not defined, as upstream where flash-attn is
missing.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class FakeFunctionConfig(PretrainedConfig):
    model_type = "fake-function"

    def __init__(self, attn_impl="eager", sliding_window=None, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 97, 32, 2, 4
        self.attn_impl, self.sliding_window = attn_impl, sliding_window


class FakeAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, width = config, True, config.hidden_size
        self.norm, self.qkv_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)

    def heads(self, hidden_states):
        return self.qkv_proj(self.norm(hidden_states)).unflatten(-1, (3, self.config.num_attention_heads, -1)).unbind(2)

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, key, value = (states.transpose(1, 2) for states in self.heads(hidden_states))
        logits = query @ key.transpose(2, 3) * key.shape[-1] ** -0.5 + attention_mask
        return hidden_states + (logits.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class FakeSdpaAttention(FakeAttention):
    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, key, value = (states.transpose(1, 2) for states in self.heads(hidden_states))
        output = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=attention_mask is None)
        return hidden_states + output.transpose(1, 2).flatten(2)


class FakeFlashAttention2(FakeAttention):
    # The call of the module's ``_flash_attention_forward`` is the seam.

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, key, value = self.heads(hidden_states)
        options = {"sliding_window": self.config.sliding_window, "is_causal": self.is_causal}
        length = query.shape[1]
        output = _flash_attention_forward(query, key, value, attention_mask, length, **options)  # noqa: F821
        return hidden_states + output.flatten(2)


FAKE_ATTENTION_CLASSES = {"eager": FakeAttention, "sdpa": FakeSdpaAttention, "flash_attention_2": FakeFlashAttention2}


class FakeFunctionModel(PreTrainedModel):
    config_class, base_model_prefix = FakeFunctionConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(64, config.hidden_size)
        attention = FAKE_ATTENTION_CLASSES[config.attn_impl]
        self.layers = nn.ModuleList(attention(config) for _ in range(config.num_hidden_layers))
        self.checkpointing = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        position_ids = torch.arange(hidden_states.shape[1])[None] if position_ids is None else position_ids
        mask = self._update_causal_mask(attention_mask, hidden_states)
        hidden_states = hidden_states + self.embed_positions(position_ids)
        for layer in self.layers:
            if self.checkpointing is None:
                hidden_states = layer(hidden_states, attention_mask=mask, position_ids=position_ids)
            else:
                hidden_states = checkpoint(layer, hidden_states, mask, position_ids, **self.checkpointing)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def _update_causal_mask(self, attention_mask, inputs_embeds):
        if self.config.attn_impl == "flash_attention_2":
            return attention_mask
        if self.config.attn_impl == "sdpa" and attention_mask is None and self.config.sliding_window is None:
            return None
        length, least = inputs_embeds.shape[1], torch.finfo(inputs_embeds.dtype).min
        visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if self.config.sliding_window is not None:
            visible = visible.triu(1 - self.config.sliding_window)
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :].bool()
        return torch.zeros(visible.shape, dtype=inputs_embeds.dtype).masked_fill(~visible, least)


class FakeFunctionForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = FakeFunctionConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = FakeFunctionModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        output = self.model(input_ids, attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state))
