"""``generate`` of a patched model returns the same tokens and scores as unpatched."""

from __future__ import annotations

import pytest
import torch
from unpatched import PRESENT, ones_and_zeros, require_as_unpatched, tokens

NEW = 4

# Ones stand for the tokens of each row that are seen.
MASKS = {
    "no mask": [],
    "no padding": ["111111", "111111"],
    "left": ["001111"],
    "right": ["111100"],
    "a hole": ["110111"],
    "several rows, left": ["001111", "111111", "000011"],
    "several rows, right": ["111100", "111111", "110000"],
    "several rows, right, of one and two tokens": ["100000", "110000"],
    "several rows, holes": ["110111", "101101", "111111"],
    "left, right and a hole": ["001111", "111100", "110111", "011010"],
}

# These are for generation modes that make ids and masks like greedy search.
FEWER_MASKS = ["no padding", "right", "several rows, right, of one and two tokens", "left, right and a hole"]

WAYS = {"greedy": {}, "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20}, "beam": {"num_beams": 3}}

CACHES = {"dynamic": {}, "off": {"use_cache": False}, "static": {"cache_implementation": "static"}}

OFTEN = [("dynamic", way, mask) for way in WAYS for mask in (MASKS if way == "greedy" else FEWER_MASKS[::3])] + [
    (cache, "greedy", mask) for cache in ("off", "static") for mask in FEWER_MASKS
]
RARELY = [
    (cache, way, mask)
    for cache in CACHES
    for way in WAYS
    for mask in (MASKS if way == "greedy" else FEWER_MASKS)
    if (cache, way, mask) not in OFTEN
]
TRIED = OFTEN + [pytest.param(*each, marks=pytest.mark.slow) for each in RARELY]


def batch(mask):
    seen = ones_and_zeros(MASKS[mask])
    ids = tokens(len(seen) or 2, 6)
    return {"input_ids": torch.where(seen == 1, ids, 0), "attention_mask": seen} if len(seen) else {"input_ids": ids}


def generated(model, inputs, **settings):
    wanted = {"max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0, "do_sample": False, **settings}
    found = model.generate(**inputs, **wanted, return_dict_in_generate=True, output_scores=True)
    return {"tokens": found["sequences"], "scores": torch.stack(found["scores"])}


@pytest.mark.parametrize("cache, way, mask", TRIED)
@pytest.mark.parametrize("architecture", PRESENT)
def test_generates_as_unpatched(architecture, way, cache, mask):
    require_as_unpatched(architecture, lambda model, _: generated(model, batch(mask), **WAYS[way], **CACHES[cache]))


@pytest.mark.parametrize(
    "mask", ["left", "a hole", *(pytest.param(m, marks=pytest.mark.slow) for m in ("no padding", "right"))]
)
@pytest.mark.parametrize("architecture", PRESENT)
class TestWithHelp:
    # Drafts are made for one row at a time, so these tests have single rows only.

    def test_of_an_assistant_generates_as_unpatched(self, architecture, mask):
        row = {name: value[:1] for name, value in batch(mask).items()}
        require_as_unpatched(architecture, lambda model, assistant: generated(model, row, assistant_model=assistant))

    def test_of_its_prompt_generates_as_unpatched(self, architecture, mask):
        row = {name: value[:1] for name, value in batch(mask).items()}
        row["input_ids"][0, -2:] = row["input_ids"][0, 2:4]  # drafts repeat an earlier part of the prompt
        require_as_unpatched(architecture, lambda model, _: generated(model, row, prompt_lookup_num_tokens=2))
