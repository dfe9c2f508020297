"""Models that hold, share or copy parts of a patched one: a packed batch is right, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from small_models import (
    DOCS,
    alone,
    assert_right,
    called,
    class_of,
    labelled,
    labels_of,
    llama,
    logits_alone,
    padded,
    patched,
    told,
)

import fa2patch
from compat_matrix.check.compare import assert_close
from fa2patch.errors import PackingNotIsolated
from fa2patch.patch.padding import of_model

OPEN = labels_of(DOCS, 7)  # labels that cross documents


def head(name, **changes):
    return llama(class_of(name), **changes)


def patched_trunk(model=None, **options):
    model = llama() if model is None else model
    patched(model.model, **options)
    return model


def assert_right_packed(model):
    assert_right(called(model, labelled()), alone(llama()))


def assert_classified(model, expected):
    with torch.no_grad():
        assert_close(model(**told()).logits, expected, "logits")


def sharing(one, other):
    other.model = one.model
    return one, other


def refused(call, harm="computes a loss from"):
    with pytest.raises(PackingNotIsolated, match=rf"is not patched and {harm}.*fa2patch\.apply\(model\)"):
        call()


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_a_model_whose_trunk_alone_is_patched(name):
    model = patched_trunk()
    more = {"labels": OPEN} if name == "labels" else {"labels": OPEN, name: OPEN.roll(-1)}
    if "shift_labels" in more and transformers.__version__ < "4.46":
        pytest.skip("this Transformers has no shift_labels")
    refused(lambda: model(**told(**more)))


def test_logits_of_a_model_whose_trunk_alone_is_patched():
    model = patched_trunk()
    assert_close(model(**told()).logits[0].detach(), alone(llama()).logits, "logits")


def test_what_the_error_says_to_do_helps():
    model = patched_trunk()
    refused(lambda: model(**labelled()))
    fa2patch.apply(model)
    assert_right_packed(model)
    fa2patch.revert(model)
    assert fa2patch.status(model) is None and fa2patch.status(model.model) is None


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "LlamaForQuestionAnswering"])
def test_a_head_of_rows_around_a_patched_trunk(name):
    model = head(name, num_labels=3)
    trunk = getattr(model, model.base_model_prefix, None) or model.transformer
    fa2patch.apply(trunk)
    refused(lambda: model(**told()), "has a head")


def test_a_dense_batch_with_labels_is_as_before():
    ids = torch.cat(DOCS)[None]
    assert torch.equal(patched_trunk()(ids, labels=ids).loss, llama()(ids, labels=ids).loss)


def test_padded_batches_of_a_trunk_that_packs_them_are_right_under_any_head():
    model = patched_trunk(padded_batches=True)
    assert_close(model(**padded(), use_cache=False).loss, llama()(**padded(), use_cache=False).loss, "loss")


def test_the_second_causal_lm_on_a_patched_trunk():
    one, other = sharing(llama(), llama())
    fa2patch.apply(one)
    refused(lambda: other(**labelled()))
    assert_right_packed(one)


def test_a_classifier_on_the_trunk_of_a_patched_causal_lm():
    one, other = sharing(llama(), head("LlamaForSequenceClassification", num_labels=3))
    expected = logits_alone(copy.deepcopy(other))
    fa2patch.apply(one)
    refused(lambda: other(**told()), "has a head")
    fa2patch.apply(other)
    assert_classified(other, expected)


@pytest.mark.parametrize("reverted", ["the first", "the second"])
def test_a_reverted_head_leaves_the_other_one_patched(reverted):
    one, other = sharing(llama(), head("LlamaForSequenceClassification", num_labels=3))
    expected = logits_alone(copy.deepcopy(other))
    patches = fa2patch.apply(one), fa2patch.apply(other)
    patches[reverted == "the second"].revert()
    if reverted == "the first":
        assert_classified(other, expected)
    else:
        assert_right_packed(one)
    for patch in patches:
        patch.revert()
    assert fa2patch.status(one) is fa2patch.status(other) is fa2patch.status(one.model) is None
    plain = llama()
    with torch.no_grad():
        assert torch.equal(one(**told()).logits, plain(**told()).logits)


def test_a_shallow_copy_whose_original_is_reverted():
    # The copy's base model is the original's, which is not patched any more, and so the copy is not either.
    model, third = patched(), llama()
    fa2patch.apply(third)  # keeps the replaced forward on the class
    other = copy.copy(model)
    fa2patch.revert(model)
    assert fa2patch.status(other) is None
    with pytest.raises(PackingNotIsolated, match=r"inside it is not any more.*fa2patch\.apply\(model\) again"):
        other(**labelled())
    fa2patch.apply(other)
    assert_right_packed(other)


def test_a_superseded_patch_that_is_reverted_leaves_padded_batches_packed():
    model = llama()
    first = fa2patch.apply(model.model, padded_batches=True)
    second = fa2patch.apply(model)
    first.revert()
    assert second.active and fa2patch.status(model.model) is second
    assert of_model(model.model) is not None


def test_a_model_of_ones_own_around_a_whole_causal_lm():
    # The model holds a causal LM as LLaVA up to 4.46 does, and shifts labels by itself.
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
    batch = told()
    refused(lambda: outer(batch["input_ids"], batch["position_ids"], labels=OPEN))
    refused(lambda: outer.forward(batch["input_ids"], batch["position_ids"], labels=OPEN))


@pytest.mark.parametrize("compiled", ["the whole", "the trunk", "the caller"])
def test_in_a_compiled_graph(compiled):
    torch._dynamo.reset()
    model = patched_trunk()

    def loss(model, batch):
        return model(**batch, use_cache=False).loss

    run, called_model = loss, model
    if compiled == "the whole":
        called_model = torch.compile(model, backend="eager")
    elif compiled == "the trunk":
        model.model = torch.compile(model.model, backend="eager")
    else:
        run = torch.compile(loss, backend="eager")
    refused(lambda: run(called_model, labelled()))


def test_a_compiled_trunk_by_itself_is_as_before():
    torch._dynamo.reset()
    base, plain = patched(llama().model), llama().model
    with torch.no_grad():
        found = torch.compile(base, backend="eager")(**told(), use_cache=False).last_hidden_state[0]
        expected = torch.cat([plain(doc[None]).last_hidden_state[0] for doc in DOCS])
    assert_close(found, expected, "hidden states")


# A part of a patched model that is copied is a model of its own


def hidden(base, docs=DOCS):
    with torch.no_grad():
        return base(**told(docs, "position_ids"), use_cache=False).last_hidden_state[0]


def expected():
    base = llama().model
    with torch.no_grad():
        return torch.cat([base(doc[None], use_cache=False).last_hidden_state[0] for doc in DOCS])


def test_a_copied_base_model_is_patched_by_itself():
    model = patched()
    base = copy.deepcopy(model.model)
    assert fa2patch.status(base).model is base and fa2patch.status(model).model is model
    fa2patch.revert(model)
    assert fa2patch.status(model) is None and fa2patch.status(base) is not None
    assert_close(hidden(base), expected(), "hidden states")


def test_a_reverted_copy_of_the_base_leaves_the_original_patched():
    model = patched()
    base = copy.deepcopy(model.model)
    fa2patch.revert(base)
    assert fa2patch.status(base) is None and fa2patch.status(model).active
    unpatched = llama().model
    assert torch.equal(hidden(base), hidden(unpatched))
    assert_right_packed(model)


def test_apply_to_a_copy_of_the_base_patches_no_other_model():
    model = patched()
    base = copy.deepcopy(model.model)
    fa2patch.revert(model)
    fa2patch.apply(base)
    assert fa2patch.status(model) is None
    plain = llama()
    batch = told()
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert_close(hidden(base), expected(), "hidden states")


@pytest.mark.parametrize("renewed", [False, True], ids=["as it is", "apply"])
def test_a_copied_base_in_another_model(renewed):
    # Without ``apply`` the model around it is not patched, and its labels may cross documents: no loss is taken.
    model, other = patched(), llama()
    other.model = copy.deepcopy(model.model)
    if renewed:
        fa2patch.apply(other)
        assert_right_packed(other)
    logits = other(**told()).logits[0].detach()
    assert_close(logits, alone(llama()).logits, "logits")


def test_a_model_that_is_copied_whole_is_as_before():
    model = patched()
    other = copy.deepcopy(model)
    fa2patch.revert(model)
    assert fa2patch.status(other).model is other
    assert_right_packed(other)
