"""Folders with a tiny model and its tokenizer, and models of sentence-transformers made of them, without a network."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 200
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, **NO_DROPOUT},
    "roberta": {**SIZES, **NO_DROPOUT},
    "mpnet": {**SIZES, **NO_DROPOUT},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "modernbert": {**SIZES, "num_hidden_layers": 4, "local_attention": 8, "global_attn_every_n_layers": 2},
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
}
CAUSAL = ("qwen2", "qwen3")
# The family that is padded on the left. sentence-transformers 3.0, which has no Qwen3, reads padding there.
LEFT = "qwen3"

TYPED = ("bert", "roberta")  # their models take ``token_type_ids``


def folder_of(family: str, home: Path) -> str:
    # The tokenizer's words are ``w0`` to ``w199``. The model has a masked-LM head unless it is causal.
    folder = home / family
    causal = family in CAUSAL
    vocabulary = {word: at for at, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(WORDS))])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    kind = ":1" if family == "bert" else ""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]" if causal else "[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B{kind} [SEP]{kind}",
        special_tokens=special,
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        padding_side="left" if family == LEFT else "right",
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if family in TYPED else [])],
    ).save_pretrained(folder)
    config = AutoConfig.for_model(
        family, vocab_size=len(vocabulary), max_position_embeddings=80, pad_token_id=1, bos_token_id=2, eos_token_id=3,
        **CONFIGS[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model = (AutoModel if causal else AutoModelForMaskedLM).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(4)  # the products of small weights hide leaks
    model.save_pretrained(folder)
    return str(folder)


def sentence_transformer(folder: str, pooling: str = "mean", attention: str = "sdpa", **options: Any) -> Any:
    # The options are those of its Pooling, with ``pooling_mode_<pooling>``.
    taken = inspect.signature(models.Transformer.__init__).parameters
    name = "model_kwargs" if "model_kwargs" in taken else "model_args"
    inner = models.Transformer(folder, **{name: {"attn_implementation": attention}})
    pooled = models.Pooling(32, pooling_mode=pooling, **options)
    return SentenceTransformer(modules=[inner, pooled], device="cpu")


def texts(number: int = 13, seed: int = 0) -> list[str]:
    # Texts have 0 to 40 words, and some of them are equal at the beginning.
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (number,), generator=generator).tolist()
    drawn = [torch.randint(0, WORDS, (length,), generator=generator).tolist() for length in lengths]
    found = [" ".join(f"w{n}" for n in numbers) for numbers in drawn]
    found[number // 2] = ""
    return found


def tokens_of(model: torch.nn.Module) -> list[int]:
    # Every later forward appends the number of tokens in the last layer. A proof runs a replica.
    seen: list[int] = []
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    linear = next(module for module in layers[-1].modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_pre_hook(
        lambda module, args: seen.append(args[0][..., 0].numel()) if module is linear else None
    )
    return seen


def real_tokens_of(model: Any) -> list[int]:
    # Every later forward of a SentenceTransformer appends the number of tokens that are no padding.
    seen: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(int((args[0] if args else kwargs["features"])["attention_mask"].sum()))

    model[0].register_forward_pre_hook(count, with_kwargs=True)
    return seen
