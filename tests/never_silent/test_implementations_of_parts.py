"""Parts of a model have attention implementations of their own: a dict, a part's config, a layer's config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import (
    Result,
    alone,
    assert_right,
    called,
    labelled,
    logits_alone,
    of_family,
    patched,
    right_or_refused,
    told,
)

import fa2patch

# Models with a text side and a tower, each with a config of its own.
FAMILIES = ("gemma3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llava", "qwen2_vl", "mistral3")))


def parts_of(model) -> dict[str, Any]:
    names = getattr(model.config, "sub_configs", None) or {"text_config": None, "vision_config": None}
    return {name: part for name in names if (part := getattr(model.config, name, None)) is not None}


def setting(choose):
    def way(model):
        if not hasattr(model, "set_attn_implementation"):
            pytest.skip("this Transformers cannot set implementations of parts")
        model.set_attn_implementation(choose(parts_of(model)))

    return way


def in_the_text_config(model):
    for name, part in parts_of(model).items():
        part._attn_implementation = "sdpa" if "text" in name else "eager"


def a_dict_in_the_config(model):
    model.config._attn_implementation = {"": "sdpa", **{name: "sdpa" for name in parts_of(model)}}


def in_one_layers_config(model):
    layer = next(module for name, module in model.named_modules() if "vision" not in name and hasattr(module, "q_proj"))
    if not hasattr(layer, "config"):
        pytest.skip("a layer has no config in this version")
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation = "sdpa"


WAYS = {
    "sdpa in the tower": setting(lambda parts: {name: "eager" if "text" in name else "sdpa" for name in parts}),
    "sdpa in the text": setting(lambda parts: {name: "sdpa" if "text" in name else "eager" for name in parts}),
    "sdpa outside": setting(lambda parts: {"": "sdpa"}),
    "in the text config": in_the_text_config,
    "a dict in the config": a_dict_in_the_config,
    "in one layers config": in_one_layers_config,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_implementation_of_a_part(family, way, when):
    model = of_family(family, "eager")
    expected = alone(model)
    if when == "before":
        way(model)
    fa2patch.apply(model, prove=False)
    if when == "after":
        called(model, labelled(use_cache=False))
        way(model)
    assert_right(called(model, labelled(use_cache=False)), expected)


def test_an_implementation_that_takes_padding_out_by_itself_is_set_after_apply():
    # ModernBERT's is one up to 5.0: its rows have another shape then. Later ones are right.
    expected = Result(logits_alone(of_family("modernbert:masked")))
    model = patched(of_family("modernbert:masked"), prove=False)
    model.config._attn_implementation = "flash_attention_2"

    def run():
        with torch.no_grad():
            return Result(model(**told()).logits[0])

    verdict = right_or_refused(run, expected)
    assert verdict in ("right", "refused: UnsupportedModel")
