"""A model in the style of DeepSeek-V2's remote code for Transformers 4.43 to 4.47: the flash class calls a function.

Keys and values are made from a small latent. A key has one rotary part that all heads share. Values are narrower than
keys, so the flash class pads them and cuts its output. The attention scores have their own scale.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .configuration_latent import LatentConfig

if find_spec("flash_attn") is not None:
    from transformers.modeling_flash_attention_utils import _flash_attention_forward


class LatentRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        variance = hidden_states.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(hidden_states.dtype)


class LatentRotaryEmbedding(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base, self.max_seq_len_cached = dim, base, None

    def forward(self, x, seq_len=None):
        if self.max_seq_len_cached is None or seq_len > self.max_seq_len_cached:
            inv_freq = 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
            freqs = torch.outer(torch.arange(seq_len, device=x.device).float(), inv_freq)
            self.max_seq_len_cached, self.emb = seq_len, torch.cat((freqs, freqs), dim=-1)
        return self.emb[:seq_len].cos().to(x.dtype), self.emb[:seq_len].sin().to(x.dtype)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(x, cos, sin, position_ids):
    # Pairs are side by side.
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return x * cos[position_ids].unsqueeze(1) + rotate_half(x) * sin[position_ids].unsqueeze(1)


class LatentAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.num_heads, self.v_head_dim = config.num_attention_heads, config.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, config.kv_lora_rank + self.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = LatentRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        width = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, width, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=False)
        self.rotary_emb = LatentRotaryEmbedding(self.qk_rope_head_dim, config.rope_theta)
        self.softmax_scale = self.q_head_dim**-0.5 * config.mscale**2

    def _heads(self, hidden_states, position_ids):
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        compressed, k_pe = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.config.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k_nope, value_states = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        cos, sin = self.rotary_emb(value_states, seq_len=value_states.shape[-2])
        q_pe = apply_rotary_pos_emb(q_pe, cos, sin, position_ids)
        k_pe = apply_rotary_pos_emb(k_pe.unsqueeze(1), cos, sin, position_ids).expand(-1, self.num_heads, -1, -1)
        return torch.cat([q_nope, q_pe], dim=-1), torch.cat([k_nope, k_pe], dim=-1), value_states

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        query_states, key_states, value_states = self._heads(hidden_states, position_ids)
        attn_weights = query_states @ key_states.transpose(2, 3) * self.softmax_scale + attention_mask
        attn_weights = attn_weights.softmax(dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = self.o_proj((attn_weights @ value_states).transpose(1, 2).flatten(2))
        return attn_output, None, past_key_value


class LatentFlashAttention2(LatentAttention):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._flash_attn_uses_top_left_mask = False

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        bsz, q_len, _ = hidden_states.size()
        query_states, key_states, value_states = self._heads(hidden_states, position_ids)
        if self.q_head_dim != self.v_head_dim:
            value_states = F.pad(value_states, [0, self.q_head_dim - self.v_head_dim])
        options = {"position_ids": position_ids, "dropout": 0.0, "softmax_scale": self.softmax_scale}
        options.update(use_top_left_mask=self._flash_attn_uses_top_left_mask, is_causal=self.is_causal)
        heads = (x.transpose(1, 2) for x in (query_states, key_states, value_states))
        window = getattr(self, "sliding_window", None)
        attn_output = _flash_attention_forward(*heads, attention_mask, q_len, sliding_window=window, **options)
        if self.q_head_dim != self.v_head_dim:
            attn_output = attn_output[:, :, :, : self.v_head_dim]
        return self.o_proj(attn_output.reshape(bsz, q_len, -1).contiguous()), None, past_key_value


ATTENTION_CLASSES = {"eager": LatentAttention, "flash_attention_2": LatentFlashAttention2}


class LatentMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LatentDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        implementation = getattr(config, "_attn_implementation", "eager")
        self.self_attn = ATTENTION_CLASSES[implementation](config, layer_idx)
        self.mlp = LatentMLP(config)
        self.input_layernorm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class LatentPreTrainedModel(PreTrainedModel):
    config_class = LatentConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LatentDecoderLayer"]
    _supports_flash_attn_2 = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


class LatentModel(LatentPreTrainedModel):
    _auto_class = "AutoModel"

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LatentDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LatentRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._use_flash_attention_2 = getattr(config, "_attn_implementation", "eager") == "flash_attention_2"
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def _update_causal_mask(self, attention_mask, inputs_embeds):
        if self._use_flash_attention_2:
            return attention_mask if (attention_mask is not None and 0 in attention_mask) else None
        length = inputs_embeds.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=inputs_embeds.device).tril()[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :].bool()
        mask = torch.zeros(visible.shape, dtype=inputs_embeds.dtype, device=inputs_embeds.device)
        return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None):
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device).unsqueeze(0)
        causal_mask = self._update_causal_mask(attention_mask, inputs_embeds)
        hidden_states = inputs_embeds
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, attention_mask=causal_mask, position_ids=position_ids)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


class LatentForCausalLM(LatentPreTrainedModel, GenerationMixin):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.model = LatentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

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
        logits = self.lm_head(outputs[0]).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)
