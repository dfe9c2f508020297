"""Options of an attention layer that are tensors: right with their gradient, or refused by name.

A scale may be learned, or be one for each head. It is put where a layer has a number, on a model whose unpatched eager
code takes it.
"""

import copy

import pytest
import torch
from packed_rows import assert_equals_alone, assert_nothing_crosses
from torch.nn.functional import linear

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_as_near, assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch._torch import HAS_OPERATORS
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.errors import PackingNotIsolated
from fa2patch.kernels import Options, packed_attention
from fa2patch.upstream.seams.scores import Scores

LENGTHS = (5, 1, 9, 4)
FAMILIES = ("llama", "gemma2", "granite", "gptj", "qwen3")
# The attributes that hold a scale. The latter is GPT-J's (up to 4.57), and divides.
WHERE = ("scaling", "scale_attn")

SCALES = {
    "learned": lambda scale, heads: torch.nn.Parameter(torch.tensor(float(scale))),
    "one for each head": lambda scale, heads: torch.nn.Parameter(
        scale * torch.linspace(0.5, 2, heads).view(1, heads, 1, 1)
    ),
    "one for each head, without a batch": lambda scale, heads: scale * torch.linspace(0.5, 2, heads)[:, None, None],
    "one value": lambda scale, heads: torch.tensor([float(scale)]),
    "of double precision": lambda scale, heads: torch.nn.Parameter(torch.tensor([float(scale)], dtype=torch.float64)),
    "a whole number": lambda scale, heads: torch.tensor(1),
}
of_each_family = pytest.mark.parametrize("family", FAMILIES)


def layers_of(model):
    return [each for each in model.modules() if type(each).__name__.endswith("Attention") and hasattr(each, "q_proj")]


def with_scale(family, made):
    # The model is unpatched and eager.
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    model = tiny_models.build(family, "eager")
    name = next((name for name in WHERE if hasattr(layers_of(model)[0], name)), None)
    if name is None:
        pytest.skip(f"{family} of this Transformers has no attribute for its scale")
    for number, layer in enumerate(layers_of(model)):
        scale = made((1 + number) * getattr(layer, name), model.config.num_attention_heads)
        delattr(layer, name)
        setattr(layer, name, scale)
    return model


@pytest.fixture
def in_float64(monkeypatch):
    # Eager code makes weights of attention float32. Here it keeps them in float64: the gradient of a learned scale is a
    # sum of products that cancel, of which float32 leaves three digits.
    softmax = torch.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim=-1, **asked: softmax(scores, dim))


@of_each_family
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_a_scale_that_is_a_tensor_learns_as_it_does_from_documents_alone(family, scale, in_float64):
    reference = with_scale(family, scale).double()
    model = copy.deepcopy(reference)
    fa2patch.apply(model)
    for training in (False, True):
        model.train(training)
        reference.train(training)
        assert_equals_alone(model, reference, documents(*LENGTHS), 5e-5)
    assert_nothing_crosses(model.eval(), documents(*LENGTHS))


def test_a_learned_scale_is_used_with_its_value_of_each_step_and_learns_where_nothing_else_does(in_float64):
    reference = with_scale("llama", SCALES["learned"]).double()
    for name, weight in reference.named_parameters():
        weight.requires_grad_("scaling" in name)
    model = copy.deepcopy(reference)
    fa2patch.apply(model)
    for _ in range(3):
        assert_equals_alone(model, reference, documents(*LENGTHS), 5e-5)
        for each in (model, reference):
            for layer in layers_of(each):
                layer.scaling.data.mul_(1.5)
    with torch.no_grad():
        assert_close(model(**pack(documents(*LENGTHS))).logits[0], alone(reference, documents(*LENGTHS)), "logits")


@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_learned_scale_in_half_precision_is_as_near_as_documents_alone(family):
    exact = with_scale(family, SCALES["one for each head"])
    reference = copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(reference)
    fa2patch.apply(model)
    docs = documents(*LENGTHS)
    with torch.no_grad():
        assert_as_near(model(**pack(docs)).logits[0], alone(exact, docs), alone(reference, docs))


@pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gptj"])
def test_a_learned_scale_in_a_graph(family):
    torch._dynamo.reset()
    reference = with_scale(family, SCALES["one for each head"])
    model = copy.deepcopy(reference)
    fa2patch.apply(model)
    model.compile(backend="aot_eager", dynamic=True)
    for lengths in (LENGTHS, (9,), (3, 3, 7)):
        assert_equals_alone(model, reference, documents(*lengths), 5e-4)  # of sums that cancel, in float32
    torch._dynamo.reset()


@of_each_family
def test_a_scale_of_each_key_is_refused_by_name(family):
    model = with_scale(family, lambda scale, heads: torch.full((sum(LENGTHS),), 0.5))
    fa2patch.apply(model)
    with pytest.raises(PackingNotIsolated, match="an attention layer's scale: expected a number, or a tensor with one"):
        model(**pack(documents(*LENGTHS)))


# The same options, said to the kernels


def called(**options):
    # The scores of these states are far apart.
    states = [torch.linspace(-2, 2, 19 * 4 * 8).sin().view(1, 19, 4, 8) * (2 + part) for part in range(3)]
    ends = torch.tensor([0, 5, 6, 15, 19], dtype=torch.int32)
    return packed_attention(*states, from_cu_seqlens(ends, 9, (1, 19)), Options(**options))


@pytest.mark.parametrize("name, value", [("window", 3), ("softcap", 2.0), ("scale", 0.3)])
def test_a_tensor_of_one_value_is_the_number(name, value):
    expected = called(**{name: value})
    assert not torch.allclose(expected, called())
    for tensor in (torch.tensor(value), torch.tensor([[value]])):
        torch.testing.assert_close(called(**{name: tensor}), expected)
    learned = torch.nn.Parameter(torch.tensor(float(value)))
    with torch.no_grad():
        torch.testing.assert_close(called(**{name: learned}), expected)


def test_dropout_of_a_tensor_is_the_number():
    torch.manual_seed(0)
    expected = called(dropout=0.5)
    torch.manual_seed(0)
    assert torch.equal(called(dropout=torch.tensor(0.5)), expected)


@pytest.mark.parametrize("name", ["window", "softcap", "dropout"])
@pytest.mark.parametrize(
    "value, found",
    [
        (torch.nn.Parameter(torch.tensor(0.5)), r"\[\] that needs a gradient"),
        (torch.full((4,), 0.5), r"\[4\] of several values"),
    ],
    ids=["learned", "one for each head"],
)
def test_another_option_that_no_kernel_has_is_refused_by_name(name, value, found):
    with pytest.raises(PackingNotIsolated, match=f"layer's {name}: expected a number, found a tensor {found}"):
        called(**{name: value})


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_what_each_head_has_may_have_the_shape_of_scores(name):
    values = torch.tensor([0.5, 1.0, 2.0, 4.0])
    expected = called(**{name: values})
    assert not torch.allclose(expected, called())
    shaped = values.view(1, 4, 1, 1).requires_grad_()
    found = called(**{name: shaped})
    assert torch.equal(found, expected)
    assert (torch.autograd.grad(found.square().sum(), shaped)[0] != 0).all()
    with pytest.raises(PackingNotIsolated, match=f"layer's {name}: expected one for each of 4 query heads, found 3"):
        called(**{name: values[:3]})


# What a formula does with its scores


def scores():
    return Scores(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8), (1, 2, 3, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda scores, factor: scores * factor,
        lambda scores, factor: factor * scores,
        lambda scores, factor: torch.mul(scores, factor),
        lambda scores, factor: torch.mul(factor, scores),
        lambda scores, factor: scores / (1 / factor),
    ],
    ids=range(5),
)
@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.tensor([[[0.5]], [[0.25]]])], ids=str)
def test_scores_times_a_factor(change, factor):
    found = change(scores(), factor)
    torch.testing.assert_close(found.q * found.scale, torch.ones(1, 2, 3, 8) * factor)


def test_a_factor_of_heads_that_are_in_the_batch():
    of_batch = Scores(torch.ones(2, 3, 8), torch.ones(2, 3, 8), (2, 3, 3)).view(1, 2, 3, 3)
    found = of_batch * torch.tensor([0.5, 0.25]).view(1, 2, 1, 1)
    assert found.q.shape == (2, 3, 8) and found.q[:, 0, 0].tolist() == [0.5, 0.25]


def test_a_cap_that_learns_is_refused_by_name():
    cap = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(PackingNotIsolated, match="layer's softcap: expected a number"):
        torch.tanh(scores() / cap) * cap
    assert (torch.tanh(scores() / cap.detach()) * cap.detach()).softcap == 0.5


# Weights in another dtype than the activations


def stored_in_half(self, states):
    return linear(states, self.weight.to(states.dtype))


@pytest.mark.parametrize("parts", [("q_proj",), ("q_proj", "k_proj", "v_proj", "o_proj")], ids=len)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_weights_that_are_stored_in_half_precision_leave_states_in_float32(family, parts):
    parts = parts if family != "gpt_neox" else ("query_key_value", "dense")[: len(parts)]
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    reference = tiny_models.build(family, "eager")
    for module in reference.modules():
        for name, part in module.named_children():
            if name in parts:
                part.weight.data = part.weight.data.bfloat16()
                forward = stored_in_half if part.bias is None else with_bias
                part.forward = forward.__get__(part)
    model = copy.deepcopy(reference)
    for each in model.modules():  # a copy's methods are still those of the parts it was copied from
        if "forward" in vars(each):
            each.forward = each.forward.__func__.__get__(each)
    fa2patch.apply(model)
    # gradients of a weight in half precision are added up in it, for each document that is computed alone
    assert_equals_alone(model, reference, documents(*LENGTHS), 2e-2)


def with_bias(self, states):
    return linear(states, self.weight.to(states.dtype), self.bias)
