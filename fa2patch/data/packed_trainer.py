"""TRL's trainers with their padded batches computed packed, and which models a trainer holds."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from .._types import Model
from ..errors import BadArgument, Fa2PatchError, StaysPadded
from ..padded.batches import PaddedBatches
from ..patch.applying import apply
from ..patch.padding import pack_padded_batches
from ..upstream.find_models import outermost_models

PACKS = "_fa2patch_packs"
"""The class attribute of what :func:`packed_trainer` returns. ``fa2patch run`` leaves such trainers alone."""


class PackedModels(NamedTuple):
    """The models of a trainer, by the names of its attributes.

    Attributes:
        packed: The hooks of the models that compute padded batches packed, with a ``remove()`` method each. Several
            attributes may hold one model. If an attribute holds several models, these are ``"reward_funcs[0]"`` and so
            on, numbered among the models.
        padded: The errors that say why the others stay as they were. Their padded batches are computed padded.
    """

    packed: dict[str, PaddedBatches]
    padded: dict[str, Fa2PatchError]


def pack_models(trainer: object, share_prompts: bool = True) -> PackedModels:
    """Patch every Transformers model that a trainer holds, and make it compute padded batches packed.

    All attributes of the trainer are looked at: modules, and modules in a list, tuple or dictionary, such as the
    policy, the reference model and reward models. A model inside of a wrapper is found (PEFT, DDP, FSDP, DeepSpeed,
    ``torch.compile``, a value head). Call it again after the trainer has got other models. Models that it has packed
    before are not packed a second time.

    Args:
        trainer: A Trainer of Transformers or TRL, or any object with models as attributes.
        share_prompts: Whether the first tokens in which rows of a batch are equal are computed once, if this saves at
            least 16 tokens.

    Returns:
        What was packed, and what was not and why.
    """
    found = PackedModels({}, {})
    for name, value in list(vars(trainer).items()):
        _pack(name, value, share_prompts, found)
    return found


def _pack(name: str, value: object, share_prompts: bool, found: PackedModels) -> None:
    """Pack the models of one attribute, and add them to what was found."""
    models = list(held_models(value))
    for number, model in enumerate(models):
        where = name if len(models) == 1 else f"{name}[{number}]"
        try:
            apply(model)
            found.packed[where] = pack_padded_batches(model, share_prompts)
        except Fa2PatchError as error:
            found.padded[where] = error


def held_models(value: object) -> Iterator[Model]:
    """The outermost Transformers models in a module, or in a list, tuple or dictionary of modules."""
    if isinstance(value, dict):
        value = list(value.values())
    for one in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(one, torch.nn.Module):
            yield from outermost_models(one).values()


def packed_trainer(base: type[Any] | None = None, share_prompts: bool = True) -> type[Any]:
    """Return a subclass of a TRL trainer whose models compute padded batches packed.

    Arguments, batches and losses are those of the trainer, and so are metrics, except those that TRL averages over
    padding too. Each Transformers model is patched when it becomes an attribute of the trainer, alone or in a list: the
    model, a reference model, reward models, and models that the trainer makes later. Their padded batches are then
    computed packed in all layers, equal prompts once. Generation is unchanged.

    A model that cannot be packed is an error if it is the attribute ``model``. All others stay as they were, with a
    warning.

    Args:
        base: The trainer class to derive from, such as ``trl.GRPOTrainer``, ``trl.RewardTrainer`` or your own subclass.
            None means ``trl.DPOTrainer``.
        share_prompts: Whether the first tokens in which rows of a batch are equal are computed once, if this saves at
            least 16 tokens.

    Returns:
        The subclass. Its constructor raises ``BadArgument`` if the trainer makes packed rows itself
        (``padding_free=True``), and the errors of :func:`fa2patch.apply`. It warns with ``StaysPadded``.

    Raises:
        Fa2PatchError: TRL cannot be imported.
    """
    if base is None:
        try:
            base = importlib.import_module("trl").DPOTrainer
        except ImportError as error:
            raise Fa2PatchError(
                f"packed_trainer needs TRL, which does not import ({error}): pip install trl"
            ) from error
    parent: Any = base

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        parent.__init__(self, *args, **kwargs)
        _refuse_packed_rows(self, parent)

    def __setattr__(self: Any, name: str, value: object) -> None:
        parent.__setattr__(self, name, value)
        found = PackedModels({}, {})
        _pack(name, value, share_prompts, found)
        _raise_or_warn(found.padded, parent)

    members = {"__init__": __init__, "__setattr__": __setattr__, "__doc__": packed_trainer.__doc__, PACKS: True}
    return type(f"Packed{parent.__name__}", (parent,), members)


def _raise_or_warn(padded: Mapping[str, Fa2PatchError], trainer: type[Any]) -> None:
    """Raise the error about the model that is trained, and warn about the others."""
    for where, error in padded.items():
        if where == "model":
            raise error
        warnings.warn(
            f"{trainer.__name__}.{where} stays as it was, and its batches are computed padded: {error.message}",
            StaysPadded,
            stacklevel=3,
        )


def _refuse_packed_rows(trainer: Any, parent: type[Any]) -> None:
    name, args = parent.__name__, getattr(trainer, "args", None)
    if getattr(trainer, "padding_free", False):
        raise BadArgument(
            f"padding_free=True: expected padded batches, but {name} then makes packed rows itself. Leave padding_free "
            f"and packing out, or use {name} itself with a model that fa2patch.apply has patched."
        )
    if getattr(args, "packing", False):
        raise BadArgument(
            f"packing_strategy={getattr(args, 'packing_strategy', None)!r}: {name} joins and cuts texts without saying "
            "where texts start, so they would see each other. Use packing_strategy='bfd', or 'bfd_split' if long texts "
            f"are to be cut, with {name} itself and a model that fa2patch.apply has patched."
        )
