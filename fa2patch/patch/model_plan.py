"""What ``apply`` asks of a model, in order, and the plan that is made of the answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Callable

from .. import entry_points
from .._types import Model
from ..documents.names import LENGTHS
from ..errors import BadArgument
from ..upstream import directions, embeddings, heads, inspecting, labels, masks, positions, refusals, windows
from ..upstream.facts import Facts, Role, Site, of_forward
from ..upstream.find_layers import Layer, ModelLayers, carrier
from ..upstream.find_models import named_modules, stacks_of
from ..upstream.forward import entered
from ..upstream.packed_mask import MASK
from ..upstream.step import Trait
from ..upstream.transformers_names import ENCODED


def _cross_attention(model: ModelLayers, facts: Facts) -> list[Site]:
    if not any(inspecting.takes(inspecting.forward_of(type(one)), ENCODED) for one in model.entered):
        return []
    from ..upstream import cross  # which only decoders behind an encoder need

    return cross.look(model, facts)


# Every model is asked these. Each function fills in facts, and returns the sites to replace or refuses the model. The
# first refusal is the error that the user sees, so the order matters.
LOOKS: tuple[Callable[[ModelLayers, Facts], Iterable[Site] | None], ...] = (
    refusals.kind,
    refusals.unreadable_code,
    heads.look,
    refusals.config_of_its_row,
    refusals.mixers_without_boundaries,
    refusals.attention,
    directions.look,
    positions.look,
    _cross_attention,
    refusals.unclaimed_flash,
    masks.look,
    windows.look,
    positions.look_at_rope,
)

# A forward calls `before` of the traits in this order, and `after` in reverse. A new trait is a class in a file of
# upstream/ and one line here.
TRAITS: tuple[Trait, ...] = (
    refusals.FusedFlash(),
    embeddings.TokenTypes(),
    labels.RouterLoss(),
    embeddings.ScaledEmbeddings(),
    embeddings.NoisyEmbeddings(),
    positions.RowLength(),
)

_registered: list[Trait] = []


def register_trait(trait: Trait) -> None:
    """Add a trait for all models that are patched from now on. A registered trait of the same name is replaced.

    Args:
        trait: an instance of a subclass of :class:`Trait`. Its name must differ from the names of fa2patch's traits.

    Raises:
        BadArgument: ``trait`` is no trait with a name, or fa2patch has a trait of this name.
    """
    if not isinstance(trait, Trait) or not isinstance(getattr(trait, "name", None), str):
        raise BadArgument(f"register_trait: expected a Trait with a name, found {trait!r}.")
    if any(own.name == trait.name for own in TRAITS):
        raise BadArgument(f"register_trait: fa2patch has a trait {trait.name!r} of its own. Choose another name.")
    with entry_points.LOCK:
        _registered[:] = [*(other for other in _registered if other.name != trait.name), trait]
        entry_points.note("trait", trait.name)


def traits() -> tuple[Trait, ...]:
    return (*TRAITS, *_registered)


@dataclass(frozen=True)
class ModelPlan:
    """What ``apply`` would do to a model."""

    facts: Facts
    traits: tuple[tuple[Trait, Any], ...]  # each with the result of Trait.finds
    layers: tuple[Layer, ...]  # those that must be given the boundaries, without their modules
    sites: tuple[Site, ...]  # the attributes to replace
    roles: tuple[Role, ...]  # of the models that a call goes through, the outermost first


def plan_model(model: ModelLayers, padded: bool = False) -> ModelPlan:
    # The model is not changed. If padded batches are computed packed, its head gets padded hidden states, so a head of
    # rows is refused only when a packed batch reaches it.
    facts = Facts(model.architecture, padded)
    sites = [of_forward(inner, entered) for inner in model.entered]
    for look in LOOKS:
        sites += look(model, facts) or ()
    found: list[tuple[Trait, Any]] = []
    for trait in traits():
        what = trait.finds(model)
        if what is None:
            continue
        if not (padded and trait.of_head):
            trait.refuses(model, what)
        found.append((trait, what))
        sites += trait.replaces(model, what)
    decoder = model.decoder
    facts.carrier = MASK if model.attention else carrier(model)
    facts.stops_ids = "position_ids" not in inspecting.upstream_parameters(type(decoder).forward)
    facts.keeps_cache = bool(getattr(decoder.config, "num_kv_shared_layers", 0))
    facts.by_document = model.by_document
    return ModelPlan(
        facts,
        tuple(found),
        tuple(replace(layer, module=None) for layer in model.layers),
        tuple(dict.fromkeys(sites)),
        tuple(_role(model, inner, facts.both_ways) for inner in model.entered),
    )


def _role(layers: ModelLayers, model: Model, both_ways: bool) -> Role:
    innermost = model is layers.decoder
    accepted = [inspecting.accepted(forward, LENGTHS) for forward in inspecting.forwards_that_run(type(model))]
    return Role(
        outermost=model is layers.model,
        innermost=innermost,
        predicts_the_next=labels.predicts_the_next(model, both_ways),
        pools=not innermost and heads.pools_documents(model),
        rejected=tuple(name for name in LENGTHS if any(name not in names for names in accepted)),
    )


def plan_pairs(model: ModelLayers) -> ModelPlan:

    from ..upstream import pairs  # which only encoder-decoders need

    names = {module: name for name, module in named_modules(model.model).items()}
    stacks = tuple(names[stack] for stack in stacks_of(model.model) or ())
    facts = Facts(model.architecture, stacks=stacks, shifts_in_its_loss=labels.shifts_in_its_loss(model.model))
    refusals.pairs_within(model, facts)
    refusals.stacks(model, facts)
    refusals.unreadable_code(model, facts)
    refusals.config_of_its_row(model, facts)
    sites = tuple(of_forward(inner, pairs.entered) for inner in model.entered)
    roles = tuple(Role(inner is model.model, False) for inner in model.entered)
    return ModelPlan(facts, (), (), sites, roles)
