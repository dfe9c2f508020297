"""TRL's trainers with their padded batches computed packed, and which models a trainer holds."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .._types import Model
from ..documents.row_shape import RowShape
from ..errors import BadArgument, Fa2PatchError, StaysPadded
from ..packing.budget import check_budget
from ..padded.batches import PaddedBatches
from ..padded.pairs import PaddedPairs
from ..patch.applying import apply
from ..patch.padding import pack_padded_batches
from ..upstream.find_models import outermost_models
from .token_budget import TokenBudget

# `fa2patch run` leaves trainers with this class attribute alone.
PACKS = "_fa2patch_packs"


class PackedModels(NamedTuple):
    """The models of a trainer, by the names of its attributes."""

    # Several attributes may hold one model. If an attribute holds several, these are "reward_funcs[0]" and so on.
    packed: dict[str, PaddedBatches | PaddedPairs]
    padded: dict[str, Fa2PatchError]  # why the others stay as they were


def pack_models(
    attributes: Mapping[str, object], share_prompts: bool = True, budget: TokenBudget | None = None
) -> PackedModels:
    # Models that are packed already are not packed a second time. With a `budget`, they compute each batch within it.
    found = PackedModels({}, {})
    for name, value in [*attributes.items()]:
        held = held_models(value)
        for number, model in enumerate(held):
            where = name if len(held) == 1 else f"{name}[{number}]"
            try:
                apply(model)
                found.packed[where] = pack_padded_batches(model, share_prompts)
                if budget is not None:
                    budget.give(model)
            except Fa2PatchError as error:
                found.padded[where] = error
    return found


def held_models(value: object) -> list[Model]:
    several = [*value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    modules = [one for one in several if isinstance(one, torch.nn.Module)]
    return [model for module in modules for model in outermost_models(module).values()]


def packed_trainer(
    base: type[Any] | None = None,
    share_prompts: bool = True,
    *,
    max_tokens: int | None = None,
    too_long: str = "error",
    pad_to_multiple_of: int | str | None = None,
    max_documents: int | None = None,
    longest_document: int | str | None = None,
) -> type[Any]:
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
        max_tokens: A budget of tokens: each batch is computed in as few packed passes of at most so many tokens as fit,
            and the optimizer's steps, gradients, logged losses and metrics stay those of the whole batch. Any Trainer
            serves as ``base`` then, with padded batches or with packed rows. The loss sees the outputs of the whole
            batch, and the base model's forward is computed a second time in the backward, as with gradient
            checkpointing. If the loss is known to be a sum over tokens (that of ``Trainer`` itself, from Transformers
            4.46 on), each pass is computed once instead, with its own backward. The log says which of the two. None
            computes each batch in one pass.
        too_long: What to do with a document that is longer than ``max_tokens``: ``"error"``, or ``"alone"`` to give it
            a pass of its own.
        pad_to_multiple_of, max_documents, longest_document: With a budget and packed rows, shapes of the passes that do
            not depend on their documents, as in :func:`fa2patch.packing.passes`: a compiled model makes one graph. The
            logs say what part of the passes is padding, ``padding_of_passes``.

    Returns:
        The subclass. Its constructor raises ``BadArgument`` if the trainer makes packed rows itself
        (``padding_free=True``), and the errors of :func:`fa2patch.apply`. It warns with ``StaysPadded``.

    Raises:
        BadArgument: ``base`` is no class, or shapes are given without a budget.
        PackingError: The budget, or an option of shapes, is invalid.
        Fa2PatchError: TRL cannot be imported.
    """
    if base is None:
        try:
            base = importlib.import_module("trl").DPOTrainer
        except ImportError as error:
            raise Fa2PatchError(
                f"packed_trainer needs TRL, which does not import ({error}): pip install trl"
            ) from error
    if not isinstance(base, type):
        raise BadArgument(
            f"base: expected a class, such as trl.GRPOTrainer, found an object of class {type(base).__name__}. "
            "Make the trainer from what packed_trainer returns: packed_trainer(trl.GRPOTrainer)(model, ...)."
        )
    if not isinstance(share_prompts, bool):
        raise BadArgument(
            f"share_prompts: expected True or False, found {share_prompts!r}. A budget is given by its name: "
            "packed_trainer(trl.DPOTrainer, max_tokens=8192)."
        )
    budget = None if max_tokens is None else check_budget(max_tokens)
    shapes = RowShape(pad_to_multiple_of, max_documents, longest_document, budget)
    if budget is None and shapes:
        raise BadArgument(
            "pad_to_multiple_of, max_documents, longest_document: expected max_tokens, too, because these are of the "
            "passes of a budget, found none. Give max_tokens, or let the collator pad: "
            "fa2patch.DataCollatorWithFlattening."
        )

    members = {
        "_packed_class": base,
        "_packed_sharing": share_prompts,
        "_packed_budget": None if budget is None else (budget, too_long, shapes),
        PACKS: True,
        "__doc__": packed_trainer.__doc__,
    }
    return type(f"Packed{base.__name__}", (_Packing, base), members)


class _Packing:
    # Its methods are found by their names. datasets hashes what a trainer maps its dataset with, and so the trainer's
    # class: dill would follow each global name of functions that are made here, which takes minutes.
    _packed_class: Any
    _packed_sharing: bool
    _packed_budget: tuple[int, str, RowShape] | None
    token_budget: TokenBudget | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self._packed_budget is not None:  # before a model becomes an attribute
            vars(self)["token_budget"] = TokenBudget(*self._packed_budget)
        super().__init__(*args, **kwargs)
        if self.token_budget is None:
            _refuse_packed_rows(self, self._packed_class)
        else:
            self.token_budget.install(self)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        for where, error in pack_models({name: value}, self._packed_sharing, self.token_budget).padded.items():
            if where == "model":
                raise error
            warnings.warn(
                f"{self._packed_class.__name__}.{where} stays as it was, and its batches are computed padded: "
                f"{error.message}",
                StaysPadded,
                stacklevel=2,
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
