"""A packed batch that comes to a patched model from an unpatched one around it: right, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from small_models import DOCS, alone, called, class_of, labels_of, llama, right_or_refused, told

import fa2patch
from compat_matrix.check.compare import assert_close
from fa2patch.errors import PackingNotIsolated
from fa2patch.padded.batches import of_model

OPEN = labels_of(DOCS, 7)
"""Labels that cross documents."""


def packed(**more):
    return told(DOCS, "position_ids", **more)


def head(name, **changes):
    return llama(class_of(name), **changes)


def classified(model):
    """What a classifier says of every document alone."""
    with torch.no_grad():
        return torch.cat([model(doc[None]).logits for doc in DOCS])


def sharing(one, other):
    """Two models with one trunk."""
    other.model = one.model
    return one, other


def refused(call, harm="computes a loss from"):
    with pytest.raises(PackingNotIsolated, match=rf"is not patched and {harm}.*fa2patch\.apply\(model\)"):
        call()


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_a_model_whose_trunk_alone_is_patched(name):
    model = llama()
    fa2patch.apply(model.model)
    more = {"labels": OPEN} if name == "labels" else {"labels": OPEN, name: OPEN.roll(-1)}
    if "shift_labels" in more and transformers.__version__ < "4.46":
        pytest.skip("this Transformers has no shift_labels")
    refused(lambda: model(**packed(**more)))


def test_logits_of_a_model_whose_trunk_alone_is_patched():
    model = llama()
    fa2patch.apply(model.model)
    assert_close(model(**packed()).logits[0].detach(), alone(llama()).logits, "logits")


def test_what_the_error_says_to_do_helps():
    model = llama()
    fa2patch.apply(model.model)
    refused(lambda: model(**packed(labels=OPEN)))
    fa2patch.apply(model)
    assert right_or_refused(lambda: called(model, model, packed(labels=OPEN)), alone(llama())) == "right"
    fa2patch.revert(model)
    assert fa2patch.status(model) is None and fa2patch.status(model.model) is None


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForQuestionAnswering"])
def test_a_head_of_rows_around_a_patched_trunk(name):
    model = head(name, num_labels=3)
    trunk = getattr(model, model.base_model_prefix, None) or model.transformer
    fa2patch.apply(trunk)
    refused(lambda: model(**packed()), "has a head")


def test_a_dense_batch_with_labels_is_as_before():
    model, plain = llama(), llama()
    fa2patch.apply(model.model)
    ids = torch.cat(DOCS)[None]
    assert torch.equal(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)


def test_padded_batches_of_a_trunk_that_packs_them_are_right_under_any_head():
    model, plain = llama(), llama()
    fa2patch.apply(model.model, padded_batches=True)
    rows = torch.nn.utils.rnn.pad_sequence(DOCS, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(doc) for doc in DOCS], batch_first=True)
    given = {"input_ids": rows, "attention_mask": mask, "labels": rows.masked_fill(mask == 0, -100)}
    given["use_cache"] = False
    assert_close(model(**given).loss, plain(**given).loss, "loss")


def test_the_second_causal_lm_on_a_patched_trunk():
    one, other = sharing(llama(), llama())
    fa2patch.apply(one)
    refused(lambda: other(**packed(labels=OPEN)))
    assert right_or_refused(lambda: called(one, one, packed(labels=OPEN)), alone(llama())) == "right"


def test_a_classifier_on_the_trunk_of_a_patched_causal_lm():
    one, other = sharing(llama(), head("LlamaForSequenceClassification", num_labels=3))
    expected = classified(copy.deepcopy(other))
    fa2patch.apply(one)
    refused(lambda: other(**packed()), "has a head")
    fa2patch.apply(other)
    with torch.no_grad():
        assert_close(other(**packed()).logits, expected, "logits")


@pytest.mark.parametrize("reverted", ["the first", "the second"])
def test_a_reverted_head_leaves_the_other_one_patched(reverted):
    one, other = sharing(llama(), head("LlamaForSequenceClassification", num_labels=3))
    expected = classified(copy.deepcopy(other))
    patches = fa2patch.apply(one), fa2patch.apply(other)
    patches[reverted == "the second"].revert()
    if reverted == "the first":
        with torch.no_grad():
            assert_close(other(**packed()).logits, expected, "logits")
    else:
        assert right_or_refused(lambda: called(one, one, packed(labels=OPEN)), alone(llama())) == "right"
    for patch in patches:
        patch.revert()
    assert fa2patch.status(one) is fa2patch.status(other) is fa2patch.status(one.model) is None
    plain = llama()
    with torch.no_grad():
        assert torch.equal(one(**packed()).logits, plain(**packed()).logits)


def test_a_shallow_copy_whose_original_is_reverted():
    """Its base model is the original's, which is not patched any more, and so it is not either."""
    model, third = llama(), llama()
    fa2patch.apply(model)
    fa2patch.apply(third)  # keeps the replaced forward on the class
    other = copy.copy(model)
    fa2patch.revert(model)
    assert fa2patch.status(other) is None
    with pytest.raises(PackingNotIsolated, match=r"inside it is not any more.*fa2patch\.apply\(model\) again"):
        other(**packed(labels=OPEN))
    fa2patch.apply(other)
    assert right_or_refused(lambda: called(other, other, packed(labels=OPEN)), alone(llama())) == "right"


def test_a_superseded_patch_that_is_reverted_leaves_padded_batches_packed():
    model = llama()
    first = fa2patch.apply(model.model, padded_batches=True)
    second = fa2patch.apply(model)
    first.revert()
    assert second.active and fa2patch.status(model.model) is second
    assert of_model(model.model) is not None


def test_a_model_of_ones_own_around_a_whole_causal_lm():
    """It holds a causal LM as LLaVA up to 4.46 does, and shifts labels by itself."""
    inner = llama()

    class Around(transformers.PreTrainedModel):
        config_class = type(inner.config)
        _supports_sdpa = True

        def __init__(self):
            super().__init__(inner.config)
            self.language_model = inner

        def forward(self, tokens, ids, targets=None, labels=None):
            logits = self.language_model(inputs_embeds=inner.model.embed_tokens(tokens), position_ids=ids).logits
            if labels is None:
                return logits
            return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:])

    outer = Around()
    fa2patch.apply(inner)
    batch = packed()
    refused(lambda: outer(batch["input_ids"], batch["position_ids"], labels=OPEN))
    refused(lambda: outer.forward(batch["input_ids"], batch["position_ids"], labels=OPEN))


@pytest.mark.slow  # ten seconds for each; small models compile no faster
@pytest.mark.parametrize("compiled", ["the whole", "the trunk", "the caller"])
def test_in_a_compiled_graph(compiled):
    torch._dynamo.reset()
    model = llama()
    fa2patch.apply(model.model)

    def loss(model, batch):
        return model(**batch, use_cache=False).loss

    run, called_model = loss, model
    if compiled == "the whole":
        called_model = torch.compile(model, backend="eager")
    elif compiled == "the trunk":
        model.model = torch.compile(model.model, backend="eager")
    else:
        run = torch.compile(loss, backend="eager")
    refused(lambda: run(called_model, packed(labels=OPEN)))


@pytest.mark.slow
def test_a_compiled_trunk_by_itself_is_as_before():
    torch._dynamo.reset()
    base, plain = llama().model, llama().model
    fa2patch.apply(base)
    with torch.no_grad():
        found = torch.compile(base, backend="eager")(**packed(), use_cache=False).last_hidden_state[0]
        expected = torch.cat([plain(doc[None]).last_hidden_state[0] for doc in DOCS])
    assert_close(found, expected, "hidden states")
