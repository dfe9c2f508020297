"""Patches the models that a Trainer trains, and packs the padded batches of some Trainers.

A model that was made by calling its class is met here: as an argument of the Trainer, or when its ``model_init``
returns it. TRL's trainers for preferences, rewards and reinforcement learning look at the rows of their batches, so a
collator cannot pack these. Their models compute the padded batches packed. Batches of other Trainers stay padded,
unless ``--collate`` flattens them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from .._types import Function
from ..binding import bind
from ..data.packed_trainer import PACKS, PackedModels, held_models, pack_models
from ..errors import NotAModel
from ..patch.applying import status
from ..patch.padding import pack_padded_batches
from ..upstream.find_models import transformers_model
from . import collate
from .constructed import Constructed
from .meeting import Meeting
from .saying import say

PADS = (
    "DPOTrainer", "KTOTrainer", "ORPOTrainer", "CPOTrainer", "RewardTrainer", "PRMTrainer", "GRPOTrainer",
    "RLOOTrainer",
)  # fmt: skip
"""TRL's trainers whose padded batches are computed packed: those in which losses and metrics were compared."""


class Trainers:
    """The replaced methods of ``Trainer`` and the constructors of its subclasses.

    Attributes:
        trained: Whether a Trainer has trained, or has said why it trains padded.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self.trained = False
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._packing: weakref.WeakSet[Any] = weakref.WeakSet()

    def watch(self, base: Any) -> None:
        """Replace methods of Transformers' ``Trainer``."""
        Constructed(base, self._constructed, self._meeting)
        bind(base, "call_model_init", self._making, self._meeting)
        if self._meeting.options.collate:
            bind(base, "get_train_dataloader", self._loading, self._meeting)

    def _constructed(self, trainer: Any, outermost: bool) -> None:
        if not self._meeting.active:
            return
        self._meet(getattr(trainer, "model", None))
        if outermost and self._meeting.options.pack and packs(trainer):
            self._pack(trainer)
        elif outermost and self._meeting.options.collate:
            own_loader = collate.replaced(trainer, ["get_train_dataloader"])
            if own_loader:
                self._left_padded(trainer, own_loader)

    def _meet(self, model: Any) -> None:
        try:
            inner = transformers_model(model)
        except NotAModel:
            return
        self._meeting.meet(inner)

    def _making(self, original: Function) -> Function:
        @functools.wraps(original)
        def call_model_init(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            model = original(trainer, *args, **kwargs)
            if self._meeting.active:
                self._meet(model)
                if trainer in self._packing and status(model) is not None:
                    pack_padded_batches(model, share_prompts=True)
            return model

        return call_model_init

    def _pack(self, trainer: Any) -> None:
        """Make all models of a trainer compute its padded batches packed, and print what was done."""
        for value in list(vars(trainer).values()):
            for model in held_models(value):
                self._meeting.meet(model)
        found = pack_models(trainer)
        self._packing.add(trainer)
        name = type(trainer).__name__
        packed = ", ".join(_one_name_each(found))
        if packed:
            self._meeting.told(
                f"{name} makes padded batches, and computes them packed, with what rows begin with in common once: "
                f"{packed}. Losses and metrics stay those of padded batches; --no-pack leaves them padded."
            )
        for error in {error.message: error for error in found.padded.values()}.values():
            attributes = ", ".join(where for where, other in found.padded.items() if other.message == error.message)
            say(f"{name} computes padded batches of {attributes} padded: {error.message}")

    def _loading(self, original: Function) -> Function:
        @functools.wraps(original)
        def get_train_dataloader(trainer: Any) -> Any:
            if trainer in self._packing:
                self.trained = True
                return original(trainer)
            why = collate.why_not(trainer)
            if why:
                self._left_padded(trainer, why)
                return original(trainer)
            padding = trainer.data_collator
            if trainer not in self._told:
                self._meeting.told(
                    f"{type(trainer).__name__} trains on what its {collate.name(padding)} gives laid end to end, "
                    "without the padding; the same mini-batches, the same steps. Evaluation stays padded."
                )
            self._told.add(trainer)
            self.trained = True
            trainer.data_collator = collate.flattening(trainer)
            try:
                return original(trainer)
            finally:
                trainer.data_collator = padding

        return get_train_dataloader

    def _left_padded(self, trainer: Any, why: str) -> None:
        self.trained = True
        if trainer not in self._told:
            self._told.add(trainer)
            say(f"{type(trainer).__name__} trains padded, as it would without --collate: {why}.")


def packs(trainer: Any) -> bool:
    """Whether a trainer is one of :data:`PADS`, and is not packed already by :func:`fa2patch.packed_trainer`.

    A subclass counts. TRL has some of its trainers in ``trl.experimental`` in newer releases.
    """
    return not hasattr(trainer, PACKS) and any(
        cls.__name__ in PADS and cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__
    )


def _one_name_each(found: PackedModels) -> list[str]:
    """The attributes that hold different models: several may hold one, as ``model`` and ``model_wrapped`` do."""
    first: dict[int, str] = {}
    for where, hooks in found.packed.items():
        first.setdefault(id(hooks), where)
    return list(first.values())
