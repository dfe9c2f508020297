"""Attention as in 4.48 and later: the layer looks a function up by ``config._attn_implementation``.

The model has rotary positions. It passes a softcap (like Gemma-2) and sinks (like GPT-OSS) to the function.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput


class FakeInterfaceConfig(PretrainedConfig):
    model_type = "fake-interface"

    def __init__(self, softcap=None, sinks=False, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 97, 32, 2, 4
        self.softcap, self.sinks = softcap, sinks


def additive(states, padding=None):
    visible = torch.ones(states.shape[-2], states.shape[-2], dtype=torch.bool).tril()[None, None]
    if padding is not None:
        visible = visible & padding[:, None, None, :].bool()
    return torch.zeros_like(visible, dtype=states.dtype).masked_fill(~visible, torch.finfo(states.dtype).min)


def create_causal_mask(config, inputs_embeds, attention_mask):
    if config._attn_implementation == "flash_attention_2":
        return attention_mask
    if config._attn_implementation == "sdpa" and attention_mask is None:
        return None
    return additive(inputs_embeds, attention_mask)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **kwargs):
    logits = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + attention_mask
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[:, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), weights


def sdpa_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    causal = attention_mask is None
    output = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling)
    return output.transpose(1, 2), None


def flash_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    return eager_attention_forward(module, query, key, value, additive(query, attention_mask), scaling, **kwargs)


class Registry(dict):
    def get_interface(self, name, default):
        return self[name] if name != "eager" else default


ALL_ATTENTION_FUNCTIONS = Registry(sdpa=sdpa_attention_forward, flash_attention_2=flash_attention_forward)


def rotate(states, angles):
    even, odd = states.chunk(2, dim=-1)
    return torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], dim=-1)


class FakeAttention(nn.Module):
    # The call of a function from the registry is the seam.

    said = {}  # further arguments that a layer passes in its call, such as ``is_causal``

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, width = config, layer_idx, config.hidden_size
        self.norm, self.qkv_proj = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.sinks else None

    def forward(self, hidden_states, attention_mask, angles):
        states = self.qkv_proj(self.norm(hidden_states)).unflatten(-1, (3, self.config.num_attention_heads, -1))
        query, key, value = states.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, angles), rotate(key, angles)
        implementation, attend = self.config._attn_implementation, eager_attention_forward
        if self.layer_idx == 0:  # as 5.x does it
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        elif implementation != "eager":  # as 4.48 does it
            attend = ALL_ATTENTION_FUNCTIONS[implementation]
        options = {"scaling": key.shape[-1] ** -0.5, "softcap": self.config.softcap, "s_aux": self.sinks, **self.said}
        return attend(self, query, key, value, attention_mask, **options)[0].flatten(2) + hidden_states


class FakeInterfaceModel(PreTrainedModel):
    _supports_flash_attn = _supports_flash_attn_2 = True
    config_class, base_model_prefix = FakeInterfaceConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FakeAttention(config, index) for index in range(config.num_hidden_layers))
        self.checkpointing = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        position_ids = torch.arange(hidden_states.shape[1])[None] if position_ids is None else position_ids
        angles = position_ids[:, None, :, None] / 10.0 ** torch.arange(4)
        mask = create_causal_mask(self.config, hidden_states, attention_mask)
        for layer in self.layers:
            if self.checkpointing is None:
                hidden_states = layer(hidden_states, mask, angles)
            else:
                hidden_states = checkpoint(layer, hidden_states, mask, angles, **self.checkpointing)
        return BaseModelOutput(last_hidden_state=hidden_states)


class FakeInterfaceForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = FakeInterfaceConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = FakeInterfaceModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids, attention_mask, **kwargs).last_hidden_state))
