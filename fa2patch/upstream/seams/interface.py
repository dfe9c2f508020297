"""The interface seam (4.48 on): ``modeling_x.ALL_ATTENTION_FUNCTIONS`` and ``modeling_x.eager_attention_forward``.

An attention layer looks up its function in one of them, by ``config._attn_implementation``. Both are replaced only in
the layer's modeling module. The function that is found still computes every batch without a packed mask.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..._torch import compiling, constant
from ..._types import Call, Function
from ...errors import PackingNotIsolated
from ...kernels import Options
from ...kernels.options import from_keywords
from ..facts import Site
from ..inspecting import casts_states, reads_name
from ..other_code import require_of_model
from ..packed_mask import PackedMask
from ..prepared import LOOKED_AT
from ..transformers_names import ATTENTION_FUNCTIONS, EAGER
from .layer_of_row import LayerOfRow


def interface_of(modeling: ModuleType, forward: Function) -> tuple[Site, tuple[Site, ...]] | None:
    name = next((name for name in ATTENTION_FUNCTIONS if name in vars(modeling) and reads_name(forward, name)), None)
    if name is None:
        return None
    eager = (Site(modeling, EAGER, routed),) if hasattr(modeling, EAGER) else ()
    return Site(modeling, name, Overlay), eager


def routed(original: Function) -> Function:
    # A function of the user's own computes no packed batch: require_of_model raises PackingNotIsolated.
    asked: set[str] = set()  # modules whose layers may be computed; asking takes ten calls
    casts = casts_states(original)

    @functools.wraps(original)
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        mask = args[0] if args else kwargs.get("attention_mask")
        if not isinstance(mask, PackedMask):
            return original(module, query, key, value, *args, **kwargs)
        if type(module) is LayerOfRow:
            module = module.layer
        home, kind = type(module).__module__, None
        if compiling():
            require_of_model(original, module)
        elif home not in asked:
            require_of_model(original, module)
            asked.add(home)
        else:
            kind = mask.kind_of(module, query, key, value, kwargs, casts)
            known = mask.picks.prepared.get(kind)
            if known is not None and known.holds_for(module):
                return mask.attend_again(module, query, key, value, known), None
        # no generator: dynamo traces each of its steps, in every layer
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return mask.attend(module, q, k, v, _options(module, kwargs), kind, casts), None

    return attention


class Overlay:
    """Stands in for ``ALL_ATTENTION_FUNCTIONS`` in one modeling module. Every access goes to the real one."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        # all at once, because a graph that is captured first would make and trace them in every layer
        registered = (each for each in map(registry.get, registry) if isinstance(each, FunctionType))
        self._routed: dict[Any, Function] = {function: routed(function) for function in registered}

    def _route(self, function: Function) -> Function:
        if function in self._routed:
            return self._routed[function]
        route = routed(function)
        if not compiling():  # a graph would add it again in every call, also where the real dictionary is back
            self._routed[function] = route
        return route

    def __getitem__(self, name: str) -> Function:
        return self._route(self._registry[name])

    def __setitem__(self, name: str, function: Function) -> None:
        self._registry[name] = function

    def __delitem__(self, name: str) -> None:
        del self._registry[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._registry else default

    def get_interface(self, name: str, default: Function) -> Function:
        function = self._registry.get_interface(name, default)
        return self._routed.get(function) or self._route(function)

    def __contains__(self, name: object) -> bool:
        return name in self._registry

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)

    def __getattr__(self, name: str) -> Any:
        if name == "_registry":
            raise AttributeError(name)
        return getattr(self._registry, name)


@constant
def _not_looked_at(names: tuple[str, ...]) -> tuple[str, ...]:
    # A constant for dynamo, which would trace a loop over all keywords in each layer.
    return tuple([name for name in names if name not in LOOKED_AT])


def _options(module: Any, kwargs: Call) -> Options:
    for name in _not_looked_at(tuple(kwargs)):
        if isinstance(kwargs[name], torch.Tensor):
            raise PackingNotIsolated(
                f"{type(module).__name__} hands its attention a tensor {name!r}, whose meaning for a packed batch is "
                "not known. If it is a column of your batch that the model does not need (token_type_ids), leave it "
                "out. Otherwise, please report the model, and train it padded until then."
            )
    said = kwargs.get("is_causal")  # from 4.48 on GPT-2 passes False with a mask, because the mask is causal
    return from_keywords(kwargs, bool(said) or bool(getattr(module, "is_causal", said is None)))
