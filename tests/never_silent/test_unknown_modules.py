"""Unknown modules are not assumed to be harmless: custom modules, and layers that are added or removed."""

import copy

import pytest
import torch
from small_models import DOCS, alone, assert_says_enough, called, labels_of, llama, right_or_refused, told

import fa2patch


class Cumulative(torch.nn.Module):
    """An MLP that also adds up the row's tokens, and so sees other documents."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden.cumsum(1) / hidden.shape[1])


class AddsUp:
    """The same as a subclass of the model's own MLP."""

    def forward(self, hidden):
        return super().forward(hidden.cumsum(1) / hidden.shape[1])


class Harmless(torch.nn.Module):
    """An unknown class that looks at one token at a time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return 2 * self.inner(hidden)


class WithAttention(torch.nn.Module):
    """A layer preceded by torch's own attention, which sees the whole row."""

    def __init__(self, inner, size):
        super().__init__()
        self.inner = inner
        torch.manual_seed(2)
        self.more = torch.nn.MultiheadAttention(size, 4, batch_first=True)

    def forward(self, hidden, *args, **kwargs):
        return self.inner(hidden + 8 * self.more(hidden, hidden, hidden, need_weights=False)[0], *args, **kwargs)

    def __getattr__(self, name):  # models read a layer's attributes
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class ShowsTheSecond(torch.nn.Module):
    """An MLP that shows the second document's first token to all others, and no other document to the second."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        second = len(DOCS[0])
        return self.inner(hidden + 8 * hidden[:, second : second + 1])


class Unsteady(torch.nn.Module):
    """Experts whose output for one token differs slightly in the second call, and half as much in the third."""

    def __init__(self, inner):
        super().__init__()
        self.experts, self.calls = inner, [0.0, 1e-3, 5e-4]

    def forward(self, hidden):
        output = self.experts(hidden)
        more = torch.zeros_like(output)
        more[:, len(DOCS[0])] = self.calls.pop(0) if self.calls else 0.0
        return output * (1 + more)


def wrapped_mlp(model, kind=Cumulative):
    model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
    return "layers.1.mlp"


def subclassed_mlp(model):
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("OurMLP", (AddsUp, type(mlp)), {})
    return "layers.1.mlp"


def attention_around_a_layer(model):
    model.model.layers[1] = WithAttention(model.model.layers[1], model.config.hidden_size)
    return "layers.1"


MIXING = [wrapped_mlp, subclassed_mlp, attention_around_a_layer]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("way", ["position_ids", "seq_idx", "all lengths"])
@pytest.mark.parametrize("mix", MIXING)
def test_a_module_that_mixes_is_named_on_the_first_packed_batch(mix, way, training):
    model = llama().train(training)
    name = mix(model)
    with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")) as caught:
        fa2patch.apply(model)
        model(**told(DOCS, way, labels=labels_of(DOCS)))
    assert_says_enough(caught.value)


@pytest.mark.parametrize("mix", MIXING)
def test_every_batch_is_refused_not_only_the_first(mix):
    model = llama()
    name = mix(model)
    try:
        fa2patch.apply(model)
    except fa2patch.Fa2PatchError:
        return
    for _ in range(2):
        with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")):
            model(**told(DOCS, "position_ids"))


@pytest.mark.parametrize("mix", MIXING)
def test_asked_not_to_look_it_does_not(mix):
    """The caller takes responsibility with ``prove=False``; ``verify`` still finds the leak."""
    model = llama()
    mix(model)
    fa2patch.apply(model, prove=False)
    assert torch.isfinite(model(**told(DOCS, "position_ids", labels=labels_of(DOCS))).loss)
    assert not fa2patch.verify(model, strict=False).ok


@pytest.mark.parametrize("docs", [DOCS, DOCS[:2]], ids=["into other documents", "only into the one before"])
def test_a_module_that_shows_only_one_document_to_others_is_named(docs):
    model = llama()
    name = wrapped_mlp(model, ShowsTheSecond)
    fa2patch.apply(model)
    with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")):
        model(**told(docs, "position_ids"))


def test_what_a_kernel_does_not_compute_twice_alike_is_no_leak():
    """The second run differs from the first twice as much as the third does, by noise alone."""
    model = llama()
    wrapped_mlp(model, Unsteady)
    fa2patch.apply(model)
    assert torch.isfinite(model(**told(DOCS, "position_ids")).logits).all()


@pytest.mark.parametrize("mix", MIXING)
def test_a_head_that_returns_zeros_hides_no_leak(mix):
    model = llama()
    name = mix(model)
    torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(fa2patch.Fa2PatchError, match=name.replace(".", r"\.")):
        fa2patch.apply(model)
        model(**told(DOCS, "position_ids"))


@pytest.mark.parametrize("prove", [True, "unknown"])
def test_what_is_proven_harmless_is_computed(prove):
    def made():
        model = llama()
        wrapped_mlp(model, Harmless)
        return model

    model, reference = made(), made()
    fa2patch.apply(model, prove=prove)
    for _ in range(2):
        found = called(model, model, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))
        assert right_or_refused(lambda found=found: found, alone(reference)) == "right"


def test_a_model_all_of_whose_modules_are_known_is_proven_if_asked_to():
    model, reference = llama(), llama()
    fa2patch.apply(model, prove=True)
    found = called(model, model, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))
    assert right_or_refused(lambda: found, alone(reference)) == "right"


def test_prove_takes_three_values():
    with pytest.raises((TypeError, ValueError, fa2patch.Fa2PatchError), match="sometimes"):
        fa2patch.apply(llama(), prove="sometimes")


def test_the_proof_leaves_random_numbers_and_gradients_as_they_were():
    """Training does not depend on whether the first batch was proven."""
    states = []
    for prove in (True, False):
        model = llama(attention_dropout=0.1).train()
        fa2patch.apply(model, prove=prove)
        torch.manual_seed(5)
        loss = model(**told(DOCS, "position_ids", labels=labels_of(DOCS))).loss
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
        model = llama()
        fa2patch.apply(model)
        if after_a_batch:
            model(**told(DOCS, "position_ids"))
        change(model)
        return called(model, model, told(DOCS, "position_ids", labels=labels_of(DOCS, 7)))

    right_or_refused(run, alone(made()))


@pytest.mark.parametrize("after_a_batch", [False, True], ids=["before the first batch", "after a batch"])
@pytest.mark.parametrize("change", [leaky, wrapped_mlp, attention_around_a_layer])
def test_a_module_that_mixes_and_comes_after_apply_is_noticed(change, after_a_batch):
    model = llama()
    fa2patch.apply(model)
    if after_a_batch:
        model(**told(DOCS, "position_ids"))
    change(model)
    with pytest.raises(fa2patch.Fa2PatchError) as caught:
        model(**told(DOCS, "position_ids"))
    assert_says_enough(caught.value)


def test_the_first_batch_under_autocast_has_all_gradients():
    """A cast of a weight that the proof made would be in autocast's cache, without a gradient."""
    found = []
    for prove in (None, False):
        model = llama()
        model.model.layers[0].mlp = Harmless(model.model.layers[0].mlp)
        with (
            torch.autocast("cpu", torch.bfloat16),
            fa2patch.apply(model, **({} if prove is None else {"prove": prove})),
        ):
            loss = model(**told(DOCS, "position_ids", labels=labels_of(DOCS))).loss
        loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    proven, unproven = found
    assert all(gradient is not None for gradient in unproven.values())
    for name, gradient in unproven.items():
        assert torch.equal(proven[name], gradient), name
