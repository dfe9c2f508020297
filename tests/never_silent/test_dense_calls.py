"""Calls that are not packed although their position ids jump: a forward returns the same as unpatched."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from small_models import DOCS, labels_of, llama, patched, takes_any_name, told
from unpatched import PRESENT, ones_and_zeros, require_as_unpatched, tokens

import fa2patch
from compat_matrix import tiny_models

WITHOUT_ATTENTION = [name for name in tiny_models.WITHOUT_ATTENTION if tiny_models.is_present(name)]

# The last three tokens are alternatives for the fourth position; none of them sees another.
TREE = ["100000", "110000", "111000", "111100", "111010", "111001"]

LEVELS = torch.tensor([[0, 1, 2, 3, 3, 3]])


def additive(rows):
    seen = ones_and_zeros(rows)[None, None]
    return torch.where(seen == 1, 0.0, torch.finfo(torch.float32).min)


def ids_of(mask):
    # Upstream's ``generate`` computes position ids this way.
    return (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)


def given_ids(model, position_ids):
    # OPT up to 4.45 takes no position ids, and Mamba does not use them.
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters  # a patched OPT takes them
    return {"position_ids": position_ids} if "position_ids" in parameters else {}


@pytest.mark.parametrize("how", ["at once", "behind a cache", "in two rows"])
@pytest.mark.parametrize("architecture", PRESENT)
def test_a_mask_that_says_who_sees_whom_goes_as_it_came(architecture, how):
    rows, cached = (2 if how == "in two rows" else 1), (3 if how == "behind a cache" else 0)
    ids, mask, levels = tokens(rows, 6), additive(TREE).expand(rows, -1, -1, -1), LEVELS.expand(rows, -1)

    def call(model, _):
        state = {"past_key_values": model(ids[:, :cached], use_cache=True)["past_key_values"]} if cached else {}
        given = {"attention_mask": mask[:, :, cached:], **given_ids(model, levels[:, cached:]), **state}
        return {"logits": model(ids[:, cached:], **given)[0]}

    require_as_unpatched(architecture, call)


# The number of cached tokens, and the mask of cached and new tokens.
CONTINUED = {
    "one token": (6, ["1111111", "0011111"]),
    "three": (4, ["1111111", "0011111"]),
    "a hole": (4, ["1111101"]),
    "padding at the end": (4, ["1111110", "0011111"]),
    "padding": (6, ["1111110", "0011111"]),
}


@pytest.mark.parametrize("with_ids", [False, True], ids=["without ids", "with ids"])
@pytest.mark.parametrize("of", ["cached and new", "new"])
@pytest.mark.parametrize("case", CONTINUED)
@pytest.mark.parametrize("architecture", WITHOUT_ATTENTION)
def test_a_mixer_goes_on_from_its_state_as_unpatched(architecture, case, of, with_ids):
    cached, rows = CONTINUED[case]
    mask, ids = ones_and_zeros(rows), tokens(len(rows), 7)
    new = {"attention_mask": mask if of == "cached and new" else mask[:, cached:]}
    new.update({"position_ids": ids_of(mask)[:, cached:]} if with_ids else {})

    def call(model, _):
        names = inspect.signature(type(model).forward).parameters
        state = next(name for name in ("cache_params", "state") if name in names)
        if "cache_position" in names:
            new["cache_position"] = torch.arange(cached, 7)
        first = model(ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True)
        return {"logits": model(ids[:, cached:], use_cache=True, **{state: first[state]}, **new)[0]}

    require_as_unpatched(architecture, call)


class Recording(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        self.given = kwargs
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels)


class WithoutMore(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None):
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, labels=labels)


def test_lengths_go_on_if_every_forward_that_runs_accepts_them():
    model = patched(llama(Recording))
    model(**told(way="all lengths"))
    lengths = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    accepts = takes_any_name(llama())
    assert lengths & set(model.given) == (lengths if accepts else set())


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_an_argument_that_a_forward_does_not_take_is_an_error_as_without_the_patch(packed):
    # A misspelt argument must not be dropped. Only the collator's lengths are, by a forward that does not take them.
    model, reference = llama(WithoutMore), llama(WithoutMore)
    batch = told(way="all lengths") if packed else {"input_ids": DOCS[2][None]}
    fa2patch.apply(model)
    model(**batch)
    for one in (model, reference):
        with pytest.raises(TypeError, match="lables"):
            one(**{"input_ids": batch["input_ids"]}, lables=labels_of(DOCS))
    with pytest.raises(TypeError, match="lables"):
        model(**batch, lables=labels_of(DOCS))
