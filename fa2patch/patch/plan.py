"""The plan for a model: a loop over the traits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .._types import Model
from ..documents.names import LENGTHS
from ..upstream import directions, heads, inspecting, labels
from ..upstream.architectures import is_registered, lookup, row_of
from ..upstream.facts import Site, of_forward
from ..upstream.find_layers import Layer
from ..upstream.find_models import models
from ..upstream.find_route import route_of
from ..upstream.forward import entered
from ..upstream.pipeline import traits
from ..upstream.step import Role, Route
from ..upstream.trait import Looked


@dataclass(frozen=True)
class Plan:
    """What ``apply`` would do to a model.

    Attributes:
        found: the result of :meth:`Trait.finds` by trait name, for the traits that the model has.
        layers: the layers that must be given the boundaries, without their modules.
        sites: the attributes to replace.
        route: how the boundaries get through the model's forwards.
        roles: the role of each model that a call goes through, the outermost first.
        padded: whether it is made for padded batches that are computed packed.
    """

    found: dict[str, Any]
    layers: tuple[Layer, ...]
    sites: tuple[Site, ...]
    route: Route
    roles: tuple[Role, ...]
    padded: bool = False


def plan(model: Model, architecture: str | None = None, padded: bool = False) -> Plan:
    """Plan what ``apply`` does to a Transformers model. The model is not changed.

    Args:
        model: the Transformers model.
        architecture: the ``model_type`` of the registry row to use instead of that of ``config.model_type``.
        padded: whether its padded batches are computed packed. Its head gets padded hidden states then, so that a head
            of rows is refused only when a packed batch reaches it.

    Raises:
        UnknownArchitecture, UnsupportedModel, LayerNotPatchable: the model cannot be patched.
    """
    config = models(model)[-1].config
    row = lookup(architecture) if architecture is not None else row_of(config)
    looked = Looked(model, row, vouched=architecture is not None or is_registered(config))
    found: dict[str, Any] = {}
    sites = [of_forward(inner, entered) for inner in looked.entered]
    for trait in traits():
        what = trait.finds(looked)
        if what is None:
            continue
        if not (padded and trait.of_head):
            trait.refuses(looked, what)
        found[trait.name] = what
        sites += trait.replaces(looked, what)
    return Plan(
        found,
        tuple(replace(layer, module=None) for layer in looked.layers),
        tuple(dict.fromkeys(sites)),
        route_of(looked, sites),
        tuple(_role(looked, inner, found[directions.NAME].both) for inner in looked.entered),
        padded,
    )


def _role(looked: Looked, model: Model, sees_both_ways: bool) -> Role:
    innermost = model is looked.decoder
    return Role(
        outermost=model is looked.model,
        innermost=innermost,
        predicts_the_next=labels.predicts_the_next(model, sees_both_ways),
        pools=not innermost and heads.pools_documents(model),
        lengths=frozenset(LENGTHS).intersection(
            *(inspecting.accepted(forward, LENGTHS) for forward in inspecting.forwards_that_run(type(model)))
        ),
    )
