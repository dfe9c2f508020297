"""A model in the style of InternLM2's first releases (Transformers 4.36 to 4.42): the flash class calls its own method.

It has one ``wqkv`` for queries, keys and values, laid out by key head, a rotary table in each layer, and its own names
for everything. ``config.alibi`` adds a bias to the mask, which code outside this file cannot see.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_fused_qkv import FusedQkvConfig

try:
    from flash_attn import flash_attn_func, flash_attn_varlen_func
    from flash_attn.bert_padding import index_first_axis, pad_input
except ImportError:
    pass


class FusedQkvRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.eps)).to(hidden_states.dtype)


class FusedQkvRotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings, base):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.max_seq_len_cached = 0

    def _base(self, seq_len):
        return self.base

    def _set_cos_sin_cache(self, seq_len, device, dtype):
        inv_freq = 1.0 / self._base(seq_len) ** (torch.arange(0, self.dim, 2, device=device).float() / self.dim)
        freqs = torch.outer(torch.arange(seq_len, device=device).float(), inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.max_seq_len_cached, self.cos_cached, self.sin_cached = seq_len, emb.cos().to(dtype), emb.sin().to(dtype)

    def forward(self, x, seq_len=None):
        if seq_len > self.max_seq_len_cached:
            self._set_cos_sin_cache(seq_len, x.device, x.dtype)
        return self.cos_cached[:seq_len], self.sin_cached[:seq_len]


class FusedQkvDynamicNTKScalingRotaryEmbedding(FusedQkvRotaryEmbedding):
    def _base(self, seq_len):
        stretched = max(2.0 * seq_len / self.max_position_embeddings - 1.0, 1.0)
        return self.base * stretched ** (self.dim / (self.dim - 2))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, position_ids):
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class FusedQkvAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.is_causal = config, True
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        width = (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        self.wqkv = nn.Linear(config.hidden_size, width, bias=False)
        self.wo = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        scaling = config.rope_scaling or {}
        dynamic = "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
        rotary = FusedQkvDynamicNTKScalingRotaryEmbedding if dynamic else FusedQkvRotaryEmbedding
        self.rotary_emb = rotary(self.head_dim, config.max_position_embeddings, config.rope_theta)

    def _heads(self, hidden_states, position_ids):
        qkv = self.wqkv(hidden_states).unflatten(-1, (-1, self.num_key_value_groups + 2, self.head_dim))
        query_states = qkv[..., : self.num_key_value_groups, :].flatten(2, 3).transpose(1, 2)
        key_states, value_states = qkv[..., -2, :].transpose(1, 2), qkv[..., -1, :].transpose(1, 2)
        cos, sin = self.rotary_emb(value_states, seq_len=key_states.shape[-2])
        return (*apply_rotary_pos_emb(query_states, key_states, cos, sin, position_ids), value_states)

    def forward(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
        query_states, key_states, value_states = self._heads(hidden_states, position_ids)
        key_states = key_states.repeat_interleave(self.num_key_value_groups, dim=1)
        value_states = value_states.repeat_interleave(self.num_key_value_groups, dim=1)
        attn_weights = query_states @ key_states.transpose(2, 3) * self.head_dim**-0.5 + attention_mask
        attn_weights = attn_weights.softmax(dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = self.wo((attn_weights @ value_states).transpose(1, 2).flatten(2))
        return attn_output, None


class FusedQkvFlashAttention2(FusedQkvAttention):
    def forward(self, hidden_states, attention_mask=None, position_ids=None, **kwargs):
        bsz, q_len, _ = hidden_states.size()
        states = self._heads(hidden_states, position_ids)
        query_states, key_states, value_states = (x.transpose(1, 2) for x in states)
        attn_output = self._flash_attention_forward(query_states, key_states, value_states, attention_mask, q_len)
        return self.wo(attn_output.reshape(bsz, q_len, -1).contiguous()), None

    def _flash_attention_forward(
        self, query_states, key_states, value_states, attention_mask, query_length, dropout=0.0, softmax_scale=None
    ):
        causal = self.is_causal and query_length != 1
        if attention_mask is None:
            return flash_attn_func(query_states, key_states, value_states, dropout, softmax_scale, causal)
        batch_size = query_states.shape[0]
        lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
        indices = attention_mask.flatten().nonzero().flatten()
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = lengths.max().item()
        states = [index_first_axis(x.flatten(0, 1), indices) for x in (query_states, key_states, value_states)]
        ends = (cu_seqlens, cu_seqlens, longest, longest)
        return pad_input(
            flash_attn_varlen_func(*states, *ends, dropout, softmax_scale, causal), indices, batch_size, query_length
        )


FUSED_QKV_ATTENTION_CLASSES = {"eager": FusedQkvAttention, "flash_attention_2": FusedQkvFlashAttention2}


class FusedQkvMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class FusedQkvDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = FUSED_QKV_ATTENTION_CLASSES[config.attn_implementation](config)
        self.feed_forward = FusedQkvMLP(config)
        self.attention_norm = FusedQkvRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = FusedQkvRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        states = self.attention_norm(hidden_states)
        attended, _ = self.attention(states, attention_mask=attention_mask, position_ids=position_ids)
        hidden_states = hidden_states + attended
        return hidden_states + self.feed_forward(self.ffn_norm(hidden_states))


class FusedQkvPreTrainedModel(PreTrainedModel):
    config_class = FusedQkvConfig
    base_model_prefix = "model"
    _no_split_modules = ["FusedQkvDecoderLayer"]

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class FusedQkvModel(FusedQkvPreTrainedModel):
    _auto_class = "AutoModel"

    def __init__(self, config):
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([FusedQkvDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = FusedQkvRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.tok_embeddings

    def _prepare_decoder_attention_mask(self, attention_mask, input_shape, inputs_embeds):
        positions = torch.arange(input_shape[1], device=inputs_embeds.device)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & attention_mask[:, None, None, :].bool()
        least = torch.finfo(inputs_embeds.dtype).min
        mask = torch.zeros(visible.shape, dtype=inputs_embeds.dtype).masked_fill(~visible, least)
        return mask - 0.5 * distance if self.config.alibi else mask

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None):
        inputs_embeds = self.tok_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch_size, seq_length = inputs_embeds.shape[:2]
        if position_ids is None:
            position_ids = torch.arange(seq_length, device=inputs_embeds.device).unsqueeze(0)
        if self.config.attn_implementation == "flash_attention_2":
            attention_mask = attention_mask if (attention_mask is not None and 0 in attention_mask) else None
        else:
            if attention_mask is None:
                attention_mask = torch.ones((batch_size, seq_length), dtype=torch.bool, device=inputs_embeds.device)
            shape = (batch_size, seq_length)
            attention_mask = self._prepare_decoder_attention_mask(attention_mask, shape, inputs_embeds)
        hidden_states = inputs_embeds
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask, position_ids)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class FusedQkvForCausalLM(FusedQkvPreTrainedModel):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.model = FusedQkvModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.tok_embeddings

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
    ):
        outputs = self.model(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds)
        logits = self.output(outputs[0]).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
