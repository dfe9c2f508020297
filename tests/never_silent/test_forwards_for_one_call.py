"""Forwards on the object that say nothing of their arguments: dense and padded batches work, packed ones never leak.

TRL and Lightning put such a forward on the object for one call, to reach a method of their own through a wrapper.
"""

from __future__ import annotations

import functools
import types
import warnings

import pytest
import torch
from small_models import DOCS, Result, alone, assert_right, called, labelled, llama, padded, patched, refusal, told
from torch.nn.functional import cross_entropy

import fa2patch
from compat_matrix.check.compare import assert_close
from fa2patch.errors import PackingNotIsolated

# The first parameters of Llama's forward in every release.
NAMES = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels")

# When a forward is put on the object. A trainer of ``packed_trainer`` does so between two calls of ``apply``.
ORDERS = ("before apply", "after apply", "between two")


def redirected(model, method, *args, **kwargs):
    # The method is called through ``model(...)``, which runs the hooks of the model and of what is around it.
    inner, had_its_own = model.forward, "forward" in vars(model)

    def forward(*given, **named):
        if had_its_own:
            model.forward = inner
        else:
            del model.forward
        return method(*given, **named)

    model.forward = forward
    return model(*args, **kwargs)


def step(model, batch, times):
    # A trainer's method that calls the model itself.
    output = model(**batch)
    output["loss"] = output.loss * times
    return output


def on_hidden_states(model, batch, times):
    # A trainer's method that computes a loss from the base model's hidden states, as TRL's distillation does.
    hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)[0]
    logits, labels = model.lm_head(hidden), batch["labels"]
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100) * times
    return types.SimpleNamespace(loss=loss, logits=logits[labels != -100][None])


def of_padded(method, model):
    # What the method computes from a padded batch.
    found = called(model, {}, lambda: redirected(model, method, model, padded(), 1.0))
    real = padded()["attention_mask"].bool().flatten()
    return found if len(found.logits) == int(real.sum()) else None


@pytest.mark.parametrize("options", [{}, {"padded_batches": True}], ids=["dense", "padded"])
@pytest.mark.parametrize("method", [step, on_hidden_states])
def test_a_method_that_is_reached_through_the_model(method, options):
    reference, model = llama(), patched(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = (
            called(one, {}, lambda one=one: redirected(one, method, one, padded(), 1.0)) for one in (model, reference)
        )
    if method is on_hidden_states:
        assert_right(found, expected)
    assert_close(found.loss, expected.loss, "loss")
    assert "forward" not in vars(model)


def test_a_packed_batch_inside_of_the_method_is_right():
    model = patched()
    found = called(model, {}, lambda: redirected(model, step, model, labelled(), 1.0))
    assert_right(found, alone(llama()))


# Forwards that stay


def handing_on(model):
    inner = model.forward
    model.forward = lambda *given, **named: inner(*given, **named)


def with_a_loss_of_its_own(model):
    # It takes the labels out, and shifts them over the whole row.
    inner = model.forward

    def forward(*given, **named):
        labels = named.pop("labels", None) if len(given) < len(NAMES) else given[5]
        output = inner(*given[:5], **named)
        if labels is not None:
            output["loss"] = cross_entropy(output.logits[0, :-1], labels[0, 1:])
        return output

    model.forward = forward


def with_it(replace, order, **options):
    model = llama()
    if order != "before apply":
        fa2patch.apply(model, **options)
    replace(model)
    if order != "after apply":
        fa2patch.apply(model, **options)
    return model


def without_names(batch, names=NAMES):
    return [batch.get(name) for name in names]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("replace", [handing_on, with_a_loss_of_its_own])
def test_dense_batches_without_names(replace, order):
    model, reference = with_it(replace, order), llama()
    replace(reference)
    rows = torch.stack([DOCS[2], DOCS[2].flip(0)])
    batch = without_names({"input_ids": rows, "labels": rows})
    assert torch.equal(model(*batch).loss, reference(*batch).loss)
    assert torch.equal(model(*batch[:2]).logits, reference(*batch[:2]).logits)


@pytest.mark.parametrize("order", ORDERS)
def test_a_packed_batch_without_names_that_is_handed_on_as_it_is(order):
    # Every argument arrives under its name in the forward below, which is ours after ``apply``.
    model = with_it(handing_on, order)
    batch = without_names(labelled())
    if order == "before apply":  # the forward below is upstream's, and what it does with labels is not seen
        with refusal("6 arguments without names", PackingNotIsolated):
            model(*batch)
    else:
        assert_right(called(model, {}, lambda: model(*batch)), alone(llama()))
    found = model(*without_names(told(), NAMES[:3])).logits[0].detach()
    assert_right(Result(found), Result(alone(llama()).logits))


@pytest.mark.parametrize("order", ORDERS)
def test_a_packed_batch_whose_labels_stay_on_the_way_is_refused(order):
    model = with_it(with_a_loss_of_its_own, order)
    with refusal(r"6 arguments without names.*with_a_loss_of_its_own|6 arguments without names", PackingNotIsolated):
        model(*without_names(labelled()))
    assert_right(called(model, labelled()), alone(llama()))  # with names


@pytest.mark.parametrize("order", ORDERS)
def test_a_dictionary_of_labels_is_not_seen_through(order):
    def replace(model):
        def forward(*given, **named):
            batch, _ = given
            output = type(model).forward(model, **{name: batch[name] for name in batch if name != "labels"})
            output["loss"] = cross_entropy(output.logits[0, :-1], batch["labels"][0, 1:])
            return output

        model.forward = forward

    model = with_it(replace, order)
    with refusal("2 arguments without names", PackingNotIsolated):
        model(labelled(), 1.0)
    assert torch.equal(model(padded(DOCS[2:3]), 1.0).logits, llama()(**padded(DOCS[2:3])).logits)


# Padded batches computed packed, below a forward on the object


def on_the_object(model):
    # It calls the base model, and computes the loss itself.

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return on_hidden_states(self, {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}, 1.0)

    model.forward = types.MethodType(forward, model)


def looking_like_the_class_s(model):
    # It keeps the signature of the forward that it calls, as TRL's fused head does.
    inner = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *given, **named):
        return inner(*given, **named)

    model.forward = types.MethodType(forward, model)


def of_an_object(model):
    inner = model.forward

    class Forward:
        def __call__(self, *given, **named):
            return inner(*given, **named)

    model.forward = Forward()


def in_two_functions(model):
    handing_on(model)
    looking_like_the_class_s(model)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", [True, False], ids=["names", "no names"])
@pytest.mark.parametrize(
    "replace", [handing_on, on_the_object, looking_like_the_class_s, of_an_object, in_two_functions]
)
def test_padded_batches_are_computed_packed(replace, names, order):
    # Whether the head reads padding is tried on a copy: the forward on the object must compute with the copy.
    model, reference = with_it(replace, order, padded_batches=True), llama()
    replace(reference)
    tokens = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, given: tokens.append(given[0][..., 0].numel()))

    def output(one):
        if names or replace is on_the_object:
            return one(**padded())
        return one(*without_names(padded()))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, expected = (called(one, {}, lambda one=one: output(one)) for one in (model, reference))
    assert_close(found.loss, expected.loss, "loss")
    assert_right(
        Result(found.loss[None], found.loss, found.gradients),
        Result(expected.loss[None], expected.loss, expected.gradients),
    )
    assert tokens[-1] == sum(map(len, DOCS))


@pytest.mark.parametrize("order", ORDERS)
def test_a_forward_on_the_object_that_reads_padding_stays_padded(order):
    def replace(model):
        inner = model.forward

        def forward(*given, **named):
            output = inner(*given, **named)
            output["loss"] = output.logits.float().logsumexp(1).mean()
            return output

        model.forward = forward

    model, reference = with_it(replace, order, padded_batches=True), llama()
    replace(reference)
    batch = {name: value for name, value in padded().items() if name != "labels"}
    with pytest.warns(fa2patch.errors.StaysPadded, match="reads hidden states of padding"):
        assert torch.equal(model(**batch).loss, reference(**batch).loss)
