"""Whatever changes a model's structure is seen at the next packed batch, without a call of Python's for any module."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import fa2patch
from compat_matrix import tiny_models
from fa2patch.patch import examining
from fa2patch.proof.unknown import Structure


def of_modeling(model: Any) -> dict[str, Any]:
    return vars(sys.modules[type(model).__module__])


def another_code(function: Any) -> Any:
    def forward(self: Any, x: Any) -> Any:
        return x

    before, function.__code__ = function.__code__, forward.__code__
    return lambda: setattr(function, "__code__", before)


def replaced(holder: Any, name: str, value: Any) -> Any:
    before = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before)


def in_a_table(table: dict[str, Any], name: str, value: Any) -> Any:
    before, table[name] = table[name], value
    return lambda: table.__setitem__(name, before)


def on_the_object(module: nn.Module) -> Any:
    module.forward = lambda x: x  # type: ignore[method-assign]
    return lambda: delattr(module, "forward")


def a_child(module: nn.Module) -> Any:
    module.added = nn.Identity()  # type: ignore[assignment]
    return lambda: delattr(module, "added")


of_all_modules = nn.modules.module.register_module_forward_hook
CHANGES = {
    "a module": lambda model, layer: replaced(layer, "mlp", nn.Identity()),
    "an entry of _modules": lambda model, layer: in_a_table(layer._modules, "mlp", nn.Identity()),
    "a child of a leaf": lambda model, layer: a_child(layer.mlp.act_fn),
    "a forward on the object": lambda model, layer: on_the_object(layer.mlp),
    "the class": lambda model, layer: replaced(layer.mlp, "__class__", type("Other", (type(layer.mlp),), {})),
    "the class's forward": lambda model, layer: replaced(type(layer.mlp), "forward", lambda self, x: x),
    "the class's call": lambda model, layer: replaced(type(layer.mlp), "__call__", lambda self, x: x),
    "the code of a forward": lambda model, layer: another_code(type(layer.mlp).forward),
    "a function of the modeling file": lambda model, layer: in_a_table(of_modeling(model), "rotate_half", abs),
    "a hook": lambda model, layer: layer.mlp.register_forward_hook(lambda *given: None).remove,
    "a pre-hook": lambda model, layer: layer.mlp.register_forward_pre_hook(lambda *given: None).remove,
    "a backward hook": lambda model, layer: layer.mlp.register_full_backward_hook(lambda *given: None).remove,
    "a hook of all modules": lambda model, layer: (
        nn.modules.module.register_module_forward_hook(lambda *g: None).remove
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_is_seen(change: Any) -> None:
    model = tiny_models.build("llama")
    kept = Structure(model)
    assert kept.is_as_kept()
    undo = change(model, model.model.layers[1])
    try:
        assert not kept.is_as_kept() and Structure(model).number != kept.number
    finally:
        undo()


def test_what_fa2patch_itself_changes_is_no_change() -> None:
    one, other = tiny_models.build("llama"), tiny_models.build("llama")
    patch = fa2patch.apply(one)
    kept = patch.examination.structure
    assert kept is not None and kept.is_as_kept()
    with fa2patch.apply(other):  # the class's forward may be replaced once more
        assert not examining._has_changed(patch)
    assert not examining._has_changed(patch)


def test_copies_are_looked_at_again() -> None:
    model = tiny_models.build("llama")
    fa2patch.apply(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        patch = fa2patch.status(copied)
        assert patch is not None and patch.examination.structure is None
        copied(**row(), use_cache=False)
        assert patch.examination.structure is not None


def row() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3, 13)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])}


def calls(model: Any) -> int:
    # The number of calls of Python functions in a packed forward.
    counted: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counted.update([event]))
    try:
        model(**row(), use_cache=False)
    finally:
        sys.setprofile(None)
    return counted["call"]


def test_a_forward_calls_nothing_for_modules_that_do_not_run() -> None:
    counted = []
    for more in (0, 2000):
        model = tiny_models.build("llama")
        model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(more))
        fa2patch.apply(model, prove=False)
        for _ in range(2):
            model(**row(), use_cache=False)
        counted.append(calls(model))
    assert counted[0] == counted[1]
