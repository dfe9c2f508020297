"""Attention as in 4.36 to 4.42: a class for each implementation; the flash class calls a method of its own at the end.

The model has rotary positions from a table in each layer, grouped key heads and a sliding window.
``_flash_supports_window_size`` and ``flash_attn_func`` are not defined, as upstream where flash-attn is missing.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class FakeMethodConfig(PretrainedConfig):
    model_type = "fake-method"

    def __init__(self, attn_impl="eager", sliding_window=None, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = 97, 32, 2
        self.num_attention_heads, self.num_key_value_heads = 4, 2
        self.attn_impl, self.sliding_window = attn_impl, sliding_window


class FakeRotary(nn.Module):
    # Returns a table of angles [seq_len, 4].

    def forward(self, x, seq_len):
        return torch.arange(seq_len)[:, None] / 10.0 ** torch.arange(4)


def rotate(states, angles):
    even, odd = states.chunk(2, dim=-1)
    return torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], dim=-1)


def heads(layer, hidden_states, position_ids):
    states = layer.qkv_proj(layer.norm(hidden_states)).unflatten(-1, (8, -1)).transpose(1, 2)
    query, key, value = states.split([4, 2, 2], dim=1)
    angles = layer.rotary_emb(value, seq_len=value.shape[2])[position_ids][:, None]
    return rotate(query, angles), rotate(key, angles), value


class FakeAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal, self.rotary_emb = config, True, FakeRotary()
        self.norm, self.qkv_proj = nn.LayerNorm(config.hidden_size), nn.Linear(config.hidden_size, 64, bias=False)

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, *others = heads(self, hidden_states, position_ids)
        key, value = (states.repeat_interleave(2, dim=1) for states in others)
        logits = query @ key.transpose(2, 3) * key.shape[-1] ** -0.5 + attention_mask
        return hidden_states + (logits.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class FakeSdpaAttention(FakeAttention):
    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, *others = heads(self, hidden_states, position_ids)
        key, value = (states.repeat_interleave(2, dim=1) for states in others)
        output = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=attention_mask is None)
        return hidden_states + output.transpose(1, 2).flatten(2)


class FakeFlashAttention2(FakeAttention):
    # The call of its method ``_flash_attention_forward`` is the seam.

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        query, key, value = (states.transpose(1, 2) for states in heads(self, hidden_states, position_ids))
        windows = _flash_supports_window_size and self.config.sliding_window is not None  # noqa: F821
        options = {"dropout": 0.0, "use_sliding_windows": windows}
        output = self._flash_attention_forward(query, key, value, attention_mask, query.shape[1], **options)
        return hidden_states + output.flatten(2)

    def _flash_attention_forward(self, query, key, value, attention_mask, query_length, dropout, use_sliding_windows):
        window = self.config.sliding_window if use_sliding_windows else None
        return flash_attn_func(query, key, value, attention_mask, window)  # noqa: F821


FAKE_ATTENTION_CLASSES = {"eager": FakeAttention, "sdpa": FakeSdpaAttention, "flash_attention_2": FakeFlashAttention2}


def _prepare_4d_causal_attention_mask(attention_mask, input_shape, inputs_embeds, sliding_window):
    visible = torch.ones(input_shape[1], input_shape[1], dtype=torch.bool).tril()[None, None]
    if sliding_window is not None:
        visible = visible.triu(1 - sliding_window)
    if attention_mask is not None:
        visible = visible & attention_mask[:, None, None, :].bool()
    least = torch.finfo(inputs_embeds.dtype).min
    return torch.zeros(visible.shape, dtype=inputs_embeds.dtype).masked_fill(~visible, least)


class FakeMethodModel(PreTrainedModel):
    config_class, base_model_prefix = FakeMethodConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        attention = FAKE_ATTENTION_CLASSES[config.attn_impl]
        self.layers = nn.ModuleList(attention(config) for _ in range(config.num_hidden_layers))
        self.checkpointing = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        shape = hidden_states.shape[:2]
        position_ids = torch.arange(shape[1])[None] if position_ids is None else position_ids
        if self.config.attn_impl == "flash_attention_2":
            mask = attention_mask if attention_mask is not None and 0 in attention_mask else None
        else:
            window = self.config.sliding_window
            mask = _prepare_4d_causal_attention_mask(attention_mask, shape, hidden_states, window)
        for layer in self.layers:
            if self.checkpointing is None:
                hidden_states = layer(hidden_states, mask, position_ids)
            else:
                hidden_states = checkpoint(layer, hidden_states, mask, position_ids, **self.checkpointing)
        return BaseModelOutput(last_hidden_state=hidden_states)


class FakeMethodForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = FakeMethodConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = FakeMethodModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        output = self.model(input_ids, attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds)
        return CausalLMOutput(logits=self.lm_head(output.last_hidden_state))
