"""Modules that nobody knows, around a model's own, and what they do: for the tests of unknown code."""

from __future__ import annotations

import torch
from small_models import DOCS


def mixed(values):
    return values - values.mean(1, keepdim=True)


class Around(torch.nn.Module):
    # ``compute(self, states)`` is what the module returns.

    def __init__(self, inner, compute, **held):
        super().__init__()
        self.inner, self.compute = inner, compute
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, states):
        return self.compute(self, states)


def cumulative(inner):
    # It adds up the row's tokens, and so sees other documents.
    return Around(inner, lambda self, states: self.inner(states.cumsum(1) / states.shape[1]))


def harmless(inner):
    # It looks at one token at a time.
    return Around(inner, lambda self, states: 2 * self.inner(states))


def shows_the_second(inner):
    # The second document's first token is shown to all others, and no other document to the second.
    second = len(DOCS[0])
    return Around(inner, lambda self, states: self.inner(states + 8 * states[:, second : second + 1]))


class OneWay(torch.autograd.Function):
    # It computes nothing, and mixes gradients.

    @staticmethod
    def forward(ctx, values):
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        return mixed(gradient)


def mixes_gradients(inner):
    return Around(inner, lambda self, states: OneWay.apply(self.inner(states)))


def wrapped_mlp(model, kind=cumulative):
    model.model.layers[1].mlp = kind(model.model.layers[1].mlp)
    return "layers.1.mlp"


class Routed(torch.nn.Module):
    # Each token is handed to one of several matrices, which round by the number of tokens that they get.

    def __init__(self, size, many=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scores = torch.nn.Parameter(torch.randn(size, many, generator=generator))
        self.matrices = torch.nn.Parameter(torch.randn(many, size, size, generator=generator) / size**0.5)

    def forward(self, states):
        flat = states.reshape(-1, states.shape[-1])
        picked = (flat @ self.scores).argmax(-1)
        made = torch.zeros_like(flat)
        for number, matrix in enumerate(self.matrices):
            (own,) = torch.where(picked == number)
            made = made.index_add(0, own, torch.relu(flat[own] @ matrix))
        return made.view_as(states)


def routed_mlps(model):
    # A mixture of experts of which no module's name tells.
    for layer in model.model.layers:
        layer.mlp = Routed(model.config.hidden_size)


def behind_the_mlp(model, added, at=1):
    # ``added`` is a module, or a function of a module and its states.
    layer = model.model.layers[at]
    layer.mlp = torch.nn.Sequential(layer.mlp, added if isinstance(added, torch.nn.Module) else Around(None, added))


class AddsUp:
    # The same as :func:`cumulative`, as a subclass of the model's own MLP.

    def forward(self, hidden):
        return super().forward(hidden.cumsum(1) / hidden.shape[1])


def subclassed_mlp(model):
    mlp = model.model.layers[1].mlp
    mlp.__class__ = type("OurMLP", (AddsUp, type(mlp)), {})
    return "layers.1.mlp"


class WithAttention(torch.nn.Module):
    # torch's own attention, which sees the whole row, runs before the layer.

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


def attention_around_a_layer(model):
    model.model.layers[1] = WithAttention(model.model.layers[1], model.config.hidden_size)
    return "layers.1"


MIXING = [wrapped_mlp, subclassed_mlp, attention_around_a_layer]
