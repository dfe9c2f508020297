"""Tiny models whose pictures, or prefixes, see themselves in both directions, and documents for them."""

import importlib

import torch

from compat_matrix import tiny_models

PICTURE, TOKENS = 94, 4  # the placeholder of a picture, and the number of placeholders of one picture

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 97, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 14, "projection_dim": 32, "num_image_tokens": TOKENS,
}  # fmt: skip
_CLASSES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "paligemma2": "PaliGemmaForConditionalGeneration",
}
FAMILIES = tuple(_CLASSES)


def is_present(family):
    # The family must make its masks in functions of their own (PaliGemma: 4.46 on).
    cls = getattr(importlib.import_module("transformers"), _CLASSES[family], None)
    return cls is not None and not hasattr(cls, "_merge_input_ids_with_image_features")


def build(family, implementation="eager", **text):
    # The weights are scaled up. The model is in float32 and training mode, without dropout.
    cls = getattr(importlib.import_module("transformers"), _CLASSES[family])
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"]
        given = {"model_type": "gemma3_text", "sliding_window": 6, "sliding_window_pattern": 2, "layer_types": kinds}
        tokens = {"mm_tokens_per_image": TOKENS, "boi_token_index": 92, "eoi_token_index": 93}
    else:
        given = {"model_type": "gemma2" if family == "paligemma2" else "gemma"}
        tokens = {"projection_dim": 32, "hidden_size": 32, "vocab_size": 97}
    if family != "paligemma":
        given.update(query_pre_attn_scalar=8, final_logit_softcapping=None)
    text = {**_TEXT, **given, **text}
    known = tiny_models.parameters(importlib.import_module("transformers").CONFIG_MAPPING[text["model_type"]])
    text = {name: value for name, value in text.items() if name in known or name == "model_type"}
    config = cls.config_class(text_config=text, vision_config=dict(_VISION), image_token_index=PICTURE, **tokens)
    model = tiny_models._load(cls, config, implementation).float()
    tiny_models.scale_up(model)
    return model.train()


def gemma4():
    # Its pictures see themselves. It has no towers.
    transformers = importlib.import_module("transformers")
    text = {
        **_TEXT, "global_head_dim": 8, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
        "sliding_window": 6, "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision", "final_logit_softcapping": None,
    }  # fmt: skip
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    model = tiny_models._load(transformers.Gemma4ForConditionalGeneration, config, "eager").float()
    tiny_models.scale_up(model)
    return model.train()


def document(family, *parts, seed=0):
    # ``parts`` are numbers of words, and "picture". In PaliGemma the last number is the suffix.
    generator = torch.Generator().manual_seed(seed)
    ids, types, pictures = [], [], []
    for part in parts:
        words = part != "picture"
        count = part if words else TOKENS
        ids.append(torch.randint(3, 90, (count,), generator=generator) if words else torch.full((count,), PICTURE))
        types.append(torch.full((count,), int(not words)))
        if not words:
            pictures.append(torch.randn(1, 3, 28, 28, generator=generator))
    if family != "gemma3":
        types = [torch.zeros(sum(map(len, types[:-1])), dtype=torch.long), torch.ones_like(types[-1])]
    found = {"input_ids": torch.cat(ids)[None], "token_type_ids": torch.cat(types)[None]}
    found["labels"] = torch.where(found["input_ids"] == PICTURE, -100, found["input_ids"])
    found["labels"][:, 0] = -100
    return {**found, "pixel_values": torch.cat(pictures)} if pictures else found


def documents(family):
    # Pictures are side by side, at both ends, across a boundary, and nowhere if there may be none.
    parts = [("picture", 2, 3), ("picture", 5, 9), ("picture", 3, 1)]
    if family == "gemma3":
        parts = [(3, "picture", 2, "picture"), ("picture", 5, "picture", 11), (9,), (2, "picture")]
        if not several_pictures():
            parts = [(3, "picture"), ("picture", 11), (9,), (2, "picture", 1)]
    return [document(family, *given, seed=seed) for seed, given in enumerate(parts)]


def several_pictures():
    # In 4.50 and 4.51 the pictures of a document see each other in Gemma 3.
    modeling = importlib.import_module("transformers.models.gemma3.modeling_gemma3")
    make = getattr(modeling.Gemma3ForConditionalGeneration, "_update_causal_mask", None)
    return make is None or "image_group_ids" in make.__code__.co_varnames


def packed(docs):
    row = {name: torch.cat([doc[name] for doc in docs], 1) for name in ("input_ids", "token_type_ids", "labels")}
    row["position_ids"] = torch.cat([torch.arange(doc["input_ids"].shape[1]) for doc in docs])[None]
    pictures = [doc["pixel_values"] for doc in docs if "pixel_values" in doc]
    return {**row, "pixel_values": torch.cat(pictures)} if pictures else row


def alone(model, doc, **call):
    # The logits are [tokens, vocabulary]. The mask is of ones, as a processor makes it.
    given = {**doc, "attention_mask": torch.ones_like(doc["input_ids"]), **call}
    return model(**{name: value for name, value in given.items() if value is not None}, use_cache=False).logits[0]


def with_gradients(model, outputs):
    # The outputs are [tokens, vocabulary], and come end to end. The gradients are those of a fixed weighted sum of
    # them.
    model.zero_grad()
    whole = torch.cat(outputs)
    direction = torch.randn(whole.shape, generator=torch.Generator().manual_seed(3))
    (whole * direction).sum().backward()
    return whole.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
