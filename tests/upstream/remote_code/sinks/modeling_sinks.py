"""A model like remote code of 2025 (MiMo, Ling, Kimi) for Transformers 4.48 on: attention looks its function up.

It has sinks, a sliding window in every other layer, rotary positions on half of a head, normed queries and keys, and a
mixture of experts with a shared one. Only this file's eager function reads ``config.attn_logit_cap``; it is passed to
no attention function.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from .configuration_sinks import SinksConfig


class SinksRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)


class SinksRotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dim, self.base = int(config.head_dim * config.partial_rotary_factor), config.rope_theta

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq = 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
        freqs = position_ids[..., None].float() * inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(x, cos, sin):
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([rotated * cos + rotate_half(rotated) * sin, passed], dim=-1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, sinks, dropout=0.0, **kwargs):
    key, value = (x.repeat_interleave(module.num_key_value_groups, dim=1) for x in (key, value))
    attn_weights = query @ key.transpose(2, 3) * scaling
    if module.config.attn_logit_cap is not None:
        attn_weights = module.config.attn_logit_cap * torch.tanh(attn_weights / module.config.attn_logit_cap)
    attn_weights = attn_weights + attention_mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    attn_weights = torch.cat([attn_weights, sinks], dim=-1).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = F.dropout(attn_weights[..., :-1], p=dropout, training=module.training)
    return (attn_weights @ value).transpose(1, 2).contiguous(), attn_weights


class SinksAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal, self.scaling = config, layer_idx, True, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.sliding_window = config.sliding_window if config.sliding_window_pattern[layer_idx] else None
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = SinksRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = SinksRMSNorm(config.head_dim, config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **kwargs):
        hidden_shape = (*hidden_states.shape[:-1], -1, self.config.head_dim)
        query_states = self.q_norm(self.q_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        key_states = self.k_norm(self.k_proj(hidden_states).view(hidden_shape)).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        query_states, key_states = (apply_rotary_pos_emb(x, *position_embeddings) for x in (query_states, key_states))
        attention_interface = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        states = query_states, key_states, value_states, attention_mask
        options = {"dropout": 0.0, "sliding_window": self.sliding_window, "sinks": self.sinks, **kwargs}
        attn_output, attn_weights = attention_interface(self, *states, scaling=self.scaling, **options)
        return self.o_proj(attn_output.reshape(*hidden_states.shape[:-1], -1)), attn_weights


class SinksMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SinksSparseMoeBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList([SinksMLP(config) for _ in range(config.num_experts)])
        self.shared_experts = SinksMLP(config)

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, 1)
        scores, chosen = self.gate(tokens).sigmoid().topk(self.top_k, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        routed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            routed = routed.index_add(0, token, expert(tokens[token]) * scores[token, slot, None])
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class SinksDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = SinksAttention(config, layer_idx)
        self.mlp = SinksSparseMoeBlock(config)
        self.input_layernorm = SinksRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = SinksRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class SinksPreTrainedModel(PreTrainedModel):
    config_class = SinksConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SinksDecoderLayer"]
    _supports_flash_attn_2 = True
    _supports_flash_attn = True
    _supports_sdpa = False

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class SinksModel(SinksPreTrainedModel):
    _auto_class = "AutoModel"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([SinksDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = SinksRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = SinksRotaryEmbedding(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def _update_causal_mask(self, attention_mask, inputs_embeds, sliding_window):
        if self.config._attn_implementation == "flash_attention_2":
            return attention_mask
        positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        distance = positions[:, None] - positions
        visible = (distance >= 0)[None, None]
        if sliding_window is not None:
            visible = visible & (distance < sliding_window)
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :].bool()
        mask = torch.zeros(visible.shape, dtype=inputs_embeds.dtype, device=inputs_embeds.device)
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None, **kwargs
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        windows = {layer.self_attn.sliding_window for layer in self.layers}
        masks = {window: self._update_causal_mask(attention_mask, inputs_embeds, window) for window in windows}
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        hidden_states = inputs_embeds
        for decoder_layer in self.layers:
            mask = masks[decoder_layer.self_attn.sliding_window]
            given = {"position_embeddings": position_embeddings, "position_ids": position_ids, **kwargs}
            hidden_states = decoder_layer(hidden_states, attention_mask=mask, **given)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class SinksForCausalLM(SinksPreTrainedModel, GenerationMixin):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.model = SinksModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, labels=None, **kwargs
    ):
        given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **kwargs}
        outputs = self.model(input_ids, attention_mask, **given)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
