"""What ``apply`` finds in a tiny model, as a snapshot that two versions of fa2patch can be compared by."""

from __future__ import annotations

import dataclasses
import json
import re
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from fa2patch.errors import Fa2PatchError, message
from fa2patch.patch.model_plan import ModelPlan, plan_model, plan_pairs
from fa2patch.upstream.facts import Facts
from fa2patch.upstream.find_layers import ModelLayers
from fa2patch.upstream.find_models import stacks_of, takes_no_token_ids, transformers_model

from .. import tiny_models
from .cell import Cell

# Configs hold these beside the model.
NOT_OF_THE_MODEL = ("transformers_version", "_attn_implementation", "_attn_implementation_autoset", "_name_or_path")


def of(architecture: str, implementations: Iterable[str]) -> dict[str, Any]:
    # No forward is run. A snapshot holds what told() says of the plan, or "refused" with fa2patch's error, or "error"
    # with another one. "model" is a hash of what points are run on: the tiny config, the dtype, whether there are
    # experts.
    found = {}
    for implementation in implementations:
        try:
            model = tiny_models.unfilled(architecture, implementation)
        except Exception as error:
            found[implementation] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        try:
            said = planned(model)
        except Fa2PatchError as error:
            said = {"refused": f"{type(error).__name__}: {error.message}"}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {message(error)}"[:200]}
        found[implementation] = {"model": _model(architecture, model), **said}
    return found


def planned(model: Any) -> dict[str, Any]:
    # An encoder-decoder has a plan of its own, and one for each stack that reads tokens.
    stacks = stacks_of(model)
    if stacks is None:
        return told(plan_model(ModelLayers(model)))
    found = told(plan_pairs(ModelLayers(model)))
    for name, stack in zip(("encoder", "decoder"), stacks):
        if takes_no_token_ids(stack):
            continue
        part = told(plan_model(ModelLayers(transformers_model(stack))))
        found["layers"] |= {f"{name}.{layer}": count for layer, count in part.pop("layers").items()}
        found["sites"] += part.pop("sites")
        found["found"][name] = part
    return found


def _model(architecture: str, model: Any) -> str:
    try:
        settings = model.config.to_diff_dict()
    except Exception:  # it makes the class without arguments, which some of 5.4's do not allow
        settings = model.config.to_dict()
    config = {name: value for name, value in settings.items() if name not in NOT_OF_THE_MODEL}
    dtype = str(Cell(architecture, "eager").dtype)
    about = [config, dtype, tiny_models.first_position(model), tiny_models.has_experts(model)]
    return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:8]


def told(plan: ModelPlan) -> dict[str, Any]:
    # "layers": how many layers there are of each kind of name, with the seam. "sites": what is replaced, and by what.
    # "found": the facts and what the traits found. "route": the facts of how boundaries reach the layers.
    layers = Counter(f"{re.sub(r'[0-9]+', 'N', layer.name)}: {layer.seam}" for layer in plan.layers)
    facts = plan.facts
    route = {
        "carrier": facts.carrier,
        "stops_ids": facts.stops_ids,
        "makes_masks": facts.makes_masks,
        "apart": facts.by_document,
    }
    return {
        "layers": dict(layers),
        "sites": [f"{_text(site.owner)}.{site.attribute}: {_text(site.make)}" for site in plan.sites],
        "found": {**_known(facts), **{trait.name: _text(found) for trait, found in plan.traits}},
        "route": {name: held for name, held in route.items() if held},
        "roles": [_text(role) for role in plan.roles],
    }


def _known(facts: Facts) -> dict[str, Any]:
    # These tell models apart.
    directions = {"both": facts.both_ways, "contradiction": facts.contradiction, "told": facts.told_of_types}
    positions = {"first": facts.first_position, "by_column": facts.by_column}
    known = {
        "registry": _text(facts.architecture),
        "directions": {name: held for name, held in directions.items() if held},
        "positions": {name: held for name, held in positions.items() if held},
    }
    if facts.has_mixers:
        known["mixers"] = {}
    if facts.row_positions:
        known["row positions"] = True
    if facts.rope is not None:
        rides = {"rides": True} if facts.rope_by_document else {}
        known["rope"] = {"scaling": _text(facts.rope), **rides}
    if not facts.keeps_cache:
        known["cache"] = True
    return known


def _text(value: Any) -> Any:
    # Of a data class, what is False, None or empty is left out.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        empty = (None, False, "", (), {}, frozenset())
        return {name: _text(held) for name, held in fields.items() if held not in empty}
    if hasattr(value, "_asdict"):
        return {name: _text(held) for name, held in value._asdict().items() if held}
    if isinstance(value, Mapping):
        return {str(name): _text(held) for name, held in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_text, value), key=str)
    if isinstance(value, (list, tuple)):
        return [_text(held) for held in value]
    if isinstance(value, types.ModuleType):
        return value.__name__.rpartition(".")[2]
    if hasattr(value, "__qualname__"):
        return value.__qualname__
    return value if isinstance(value, (str, int, float, bool, type(None))) else f"a {type(value).__name__}"
