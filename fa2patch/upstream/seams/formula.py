"""The formula seam: attention layers that compute attention by themselves (BERT and its kin up to 4.57).

Such a layer has no function that could be replaced. Its own ``forward`` computes a packed batch, and its first
``torch.matmul`` gives a stand-in for the scores (``scores.py``). A layer that adds more to its scores than a mask (a
position bias, relative positions) cannot be computed by a kernel. In a model with such a layer, the base model computes
each document by itself (``apart_models.py``).
"""

from __future__ import annotations

import functools
import inspect
import types
from itertools import chain
from types import ModuleType
from typing import Any

import torch

from ..._types import Function
from .. import caches, inspecting
from ..packed_mask import find
from . import scores

MASKS = ("attention_mask", "mask")

_HARMLESS = {
    *MASKS, "head_mask", "layer_head_mask", "encoder_hidden_states", "encoder_attention_mask",
    "output_attentions", "use_cache", "position_ids", "cache_position",
}  # fmt: skip
"""Optional arguments, beside caches, that add nothing to the scores of a packed batch."""


def is_formula(forward: Function) -> bool:
    """Whether a ``forward`` takes a mask and computes attention with functions of torch."""
    if not any(inspecting.takes(forward, name) for name in MASKS):
        return False
    if inspecting.reads_name(forward, "scaled_dot_product_attention"):
        return True
    names = inspecting.names_read(forward)
    return any("softmax" in name.lower() for name in names) and ("matmul" in names or "bmm" in names)


def convolves(module: torch.nn.Module) -> bool:
    """Whether a layer also mixes tokens by a convolution (ConvBERT). It is then a mixer."""
    convolutions = (each for each in module.modules() if isinstance(each, torch.nn.modules.conv._ConvNd))
    return any(max(each.kernel_size) > 1 for each in convolutions)


def says_more(module: torch.nn.Module) -> bool:
    """Whether such a layer may add more to its scores than a mask.

    Signs are a parameter, a table of embeddings or a part of its own (other than rotary embeddings), arguments of
    unknown meaning, and a product that is not ``torch.matmul``.
    """
    forward = inspecting.forward_of(type(module))
    names, harmless = inspecting.names_read(forward), {*_HARMLESS, *caches.parameters(forward)}
    optional = (each for each in inspecting.parameters(inspect.unwrap(forward)) if each.default is not each.empty)
    return (
        bool(module._parameters)
        or any(_adds(child, type(module).__module__) for child in module.children())
        or any(each.name not in harmless for each in optional)
        or "bmm" in names
    )


def _adds(part: torch.nn.Module, modeling: str) -> bool:
    cls = type(part)
    own = cls.__module__ == modeling or cls.__module__.startswith("transformers.models.")
    return isinstance(part, torch.nn.Embedding) or (own and "Rotary" not in cls.__name__)


def by_formula(original: Function) -> Function:
    """Return the replacement for the ``forward`` of such a layer.

    It raises :class:`PackingNotIsolated` if the layer does something with its scores that packed attention cannot say.
    """
    own = inspect.unwrap(original)
    names, formula = inspecting.parameter_names(own)[1:], _with_scores(own)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = find(chain(args, kwargs.values()))
        if mask is None:
            return original(self, *args, **kwargs)
        of_layer = scores.FormulaMask.of(mask, self)
        call = {**dict(zip(names, args)), **kwargs}
        call = {name: of_layer if value is mask else value for name, value in call.items() if name in names}
        return formula(self, **call)

    return forward


class _Torch(ModuleType):
    """``torch`` with a ``matmul`` that does not compute scores."""

    matmul = staticmethod(scores.matmul)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _with_scores(forward: Function) -> Function:
    """A copy of a ``forward`` whose ``torch.matmul`` is :func:`scores.matmul`."""
    alike = types.FunctionType(
        forward.__code__,
        {**forward.__globals__, "torch": _Torch("torch")},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    alike.__kwdefaults__ = forward.__kwdefaults__
    return alike
