"""Unknown modules are not assumed to be harmless: custom modules, and layers that are added or removed."""

import contextlib
import copy

import pytest
import torch
from small_models import DOCS, alone, assert_right, called, labelled, llama, patched, refusal, right_or_refused, told
from unknown_modules import (
    MIXING,
    Around,
    attention_around_a_layer,
    harmless,
    mixes_gradients,
    routed_mlps,
    shows_the_second,
    wrapped_mlp,
)

import fa2patch


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "all lengths"])
@pytest.mark.parametrize("mix", MIXING)
def test_a_module_that_mixes_is_named_on_every_packed_batch(mix, way, training):
    model = llama().train(training)
    name = mix(model)
    for _ in range(2):
        with refusal(name.replace(".", r"\.")):
            if fa2patch.status(model) is None:
                fa2patch.apply(model)
            model(**labelled(way))


@pytest.mark.parametrize("mix", MIXING)
def test_asked_not_to_look_it_does_not(mix):
    # The caller takes responsibility with ``prove=False``. ``verify`` still finds the leak.
    model = llama()
    mix(model)
    fa2patch.apply(model, prove=False)
    assert torch.isfinite(model(**labelled()).loss)
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("docs", [DOCS, DOCS[:2]], ids=["into other documents", "only into the one before"])
def test_a_module_that_shows_only_one_document_to_others_is_named(docs):
    model = llama()
    name = wrapped_mlp(model, shows_the_second)
    fa2patch.apply(model)
    with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")):
        model(**told(docs, "position_ids"))


@pytest.mark.parametrize("leaks", [False, True])
def test_what_a_kernel_does_not_compute_twice_alike_is_no_leak_and_hides_no_leak_of_gradients(leaks):
    # Runs with other tokens differ from the first by noise alone, less than twice as much as the same run does.

    def unsteady(self, hidden):
        return self.inner(hidden) * (1 + (self.noise.pop(0) if self.noise else 0.0))

    model = llama()
    wrapped_mlp(model, lambda mlp: Around(mlp, unsteady, noise=[0.0, 9e-4, 5e-4, 9e-4, 5e-4]))
    if leaks:
        wrapped_mlp(model, mixes_gradients)
    fa2patch.apply(model)
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="gradient") if leaks else contextlib.nullcontext():
        assert torch.isfinite(model(**told()).logits).all()


@pytest.mark.parametrize("way", ["eval", "training", "checkpointing", "compiled"])
def test_rounding_by_the_number_of_tokens_that_an_expert_gets_is_no_leak(way):
    model = llama()
    routed_mlps(model)
    expected = alone(model)
    model.train(way != "eval")
    if way == "checkpointing":
        model.gradient_checkpointing_enable()
    fa2patch.apply(model)
    if way == "eval":
        with torch.no_grad():
            model(**told())  # without gradients, values alone are compared
    run = torch.compile(model, backend="eager") if way == "compiled" else model
    assert_right(called(model, labelled(), run), expected)


@pytest.mark.parametrize("mix", MIXING)
def test_a_mixture_of_experts_hides_no_leak(mix):
    model = llama()
    routed_mlps(model)
    name = mix(model)
    fa2patch.apply(model)
    with refusal(name.replace(".", r"\.")):
        model(**told())


@pytest.mark.parametrize("mix", MIXING)
def test_a_head_that_returns_zeros_hides_no_leak(mix):
    model = llama()
    name = mix(model)
    torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")):
        fa2patch.apply(model)
        model(**told())


def test_prove_takes_three_values():
    with pytest.raises((TypeError, ValueError, fa2patch.Fa2PatchError), match="sometimes"):
        fa2patch.apply(llama(), prove="sometimes")


def test_the_proof_leaves_random_numbers_and_gradients_as_they_were():
    # Training must not depend on whether the first batch was proven.
    states = []
    for prove in (True, False):
        model = patched(llama(attention_dropout=0.1).train(), prove=prove)
        torch.manual_seed(5)
        loss = model(**labelled()).loss
        assert all(parameter.grad is None for parameter in model.parameters())
        states.append((loss.detach(), torch.rand(1)))
    assert all(torch.equal(a, b) for a, b in zip(*states))


# Layers that are added or removed after apply


def another(model):
    layer = copy.deepcopy(model.model.layers[1])
    layer.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(layer)


def without_the_last(model):
    del model.model.layers[-1]


def leaky(model):
    another(model)
    wrapped_mlp(model)


@pytest.mark.parametrize("after_a_batch", [False, True], ids=["before the first batch", "after a batch"])
@pytest.mark.parametrize("change", [another, without_the_last])
def test_layers_that_come_or_go_are_noticed(change, after_a_batch):
    def made():
        model = llama()
        change(model)
        return model

    def run():
        model = patched()
        if after_a_batch:
            model(**told())
        change(model)
        return called(model, labelled())

    right_or_refused(run, alone(made()))


@pytest.mark.parametrize("after_a_batch", [False, True], ids=["before the first batch", "after a batch"])
@pytest.mark.parametrize("change", [leaky, wrapped_mlp, attention_around_a_layer])
def test_a_module_that_mixes_and_comes_after_apply_is_noticed(change, after_a_batch):
    model = patched()
    if after_a_batch:
        model(**told())
    change(model)
    with refusal():
        model(**told())


def test_autocast_around_a_forward_that_is_proven_ends_with_it():
    model = llama()
    model.model.layers[0].mlp = harmless(model.model.layers[0].mlp)
    fa2patch.apply(model)
    model.model.forward = torch.autocast("cpu", torch.bfloat16)(model.model.forward)
    assert model(**labelled()).loss.isfinite() and not torch.is_autocast_enabled("cpu")


def test_the_first_batch_under_autocast_has_all_gradients():
    # A cast of a weight that the proof made would be in autocast's cache, without a gradient.
    found = []
    for prove in (None, False):
        model = llama()
        model.model.layers[0].mlp = harmless(model.model.layers[0].mlp)
        with (
            torch.autocast("cpu", torch.bfloat16),
            fa2patch.apply(model, **({} if prove is None else {"prove": prove})),
        ):
            loss = model(**labelled()).loss
        loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    proven, unproven = found
    assert all(gradient is not None for gradient in unproven.values())
    for name, gradient in unproven.items():
        assert torch.equal(proven[name], gradient), name
