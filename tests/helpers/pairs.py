"""Tiny encoder-decoders with large random weights, and batches of pairs: a source and its target."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers

VOCABULARY = 70  # no table of positions has as many rows
SOURCES, TARGETS = (6, 2, 9, 4, 1), (5, 3, 7, 2, 4)

_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip
_OF_SOUND = {
    name: value for name, value in _BART.items() if name not in ("max_position_embeddings", "forced_eos_token_id")
}
_WHISPER = {
    **_OF_SOUND, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
    "begin_suppress_tokens": None, "suppress_tokens": None,
}  # fmt: skip
_GEMMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
    "query_pre_attn_scalar": 8, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1, "max_position_embeddings": 64,
}  # fmt: skip

# The class of the model, that of its config, and the config's values
FAMILIES = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
    "switch": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig",
               {**_T5, "num_experts": 2, "router_jitter_noise": 0.0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _BART),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", _BART),
    "marian": ("MarianMTModel", "MarianConfig", _BART),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _BART),
    "blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", _BART),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", _BART),
    "plbart": ("PLBartForConditionalGeneration", "PLBartConfig", _BART),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "t5gemma": ("T5GemmaForConditionalGeneration", "T5GemmaConfig", _GEMMA),
}  # fmt: skip
SPOKEN = ("whisper",)  # its sources are a batch of sounds, one for each target


def built(family, implementation="eager"):
    name, config, values = FAMILIES[family]
    if not hasattr(transformers, config):
        pytest.skip(f"Transformers {transformers.__version__} has no {config}")
    if family == "t5gemma":
        module = transformers.T5GemmaModuleConfig
        decoder = module(**values, is_decoder=True)
        made = transformers.T5GemmaConfig(encoder=module(**values), decoder=decoder, vocab_size=VOCABULARY)
    else:
        made = getattr(transformers, config)(**values)
    made._attn_implementation = implementation
    torch.manual_seed(0)
    return scaled_up(getattr(transformers, name)(made))


def scaled_up(model):
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model.eval()


@dataclass
class Pairs:
    """Sources and targets, each ``[1, length]``; a sound is ``[1, bands, frames]``."""

    name: str  # the argument with the sources
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    def alone(self, at):
        return {self.name: self.sources[at], "labels": self.targets[at]}

    def packed(self):
        along = 1 if self.name == "input_ids" else 0
        batch = {self.name: torch.cat(self.sources, along), "labels": torch.cat(self.targets, 1)}
        batch["decoder_position_ids"] = counted(self.targets)
        return {**batch, "position_ids": counted(self.sources)} if along else batch

    def padded(self, padding):
        rows = {self.name: right_padded(self.sources, padding), "labels": right_padded(self.targets, -100)}
        return {**rows, "attention_mask": right_padded([torch.ones_like(source) for source in self.sources], 0)}


def pairs(family, sources=SOURCES, targets=TARGETS, seed=3):
    drawn = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(3, VOCABULARY, (1, length), generator=drawn)

    if family in SPOKEN:
        sounds = [torch.randn(1, 8, 32, generator=drawn) for _ in sources]
        return Pairs("input_features", sounds, [tokens(length) for length in targets])
    return Pairs("input_ids", [tokens(length) for length in sources], [tokens(length) for length in targets])


def counted(rows):
    return torch.cat([torch.arange(row.shape[1]) for row in rows])[None]


def right_padded(rows, value):
    longest = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=value) for row in rows])


def embedded(model):
    """The input embeddings of later forwards, as leaves, in a list that fills."""
    leaves = []

    def kept(module, args, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1] * 1

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.num_embeddings == VOCABULARY:
            module.register_forward_hook(kept)
    return leaves


def alone(model, batch):
    """The logits of each pair, and the gradients of the mean loss over all tokens."""
    outputs = [model(**batch.alone(at)) for at in range(len(batch.targets))]
    lengths = [target.shape[1] for target in batch.targets]
    model.zero_grad()
    loss = sum(output.loss * length for output, length in zip(outputs, lengths)) / sum(lengths)
    loss.backward()
    return loss.item(), torch.cat([output.logits[0] for output in outputs]).detach(), gradients(model)


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
