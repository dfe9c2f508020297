"""Patches every model of a program under ``fa2patch run``: as it is made, or when what holds or trains it is made.

``startup/fa2patch_startup.py`` names the classes that are watched, and the kinds. There is one part here for each kind.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
import weakref
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .._torch import is_no_verdict
from .._types import Function
from ..binding import ABSENT, bind, release
from ..errors import Fa2PatchError, KernelUnavailable, NotAModel, UnknownKernel, UnsupportedModel
from ..patch.applying import apply, status
from ..patch.padding import of_model
from ..patch.state import Patch
from ..trainers.packed_trainer import PACKS, held_models, pack_models
from ..trainers.token_budget import TokenBudget
from ..upstream import inspecting
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import embedding_of, is_transformers_model, stacks_of, transformers_model
from ..upstream.step import Tally
from . import flattening
from .start import RunOptions, say

PACKED = "packed"


@functools.cache
def of_this_process() -> Patcher:
    return Patcher(RunOptions.inherited())


class Patcher:
    """Replaces methods when the watched modules are imported, and patches models. It owns all that it replaced."""

    def __init__(self, options: RunOptions) -> None:
        self.options, self.active = options, True
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()  # models that were patched or left alone
        # of each patched model, which may be gone in the end: its name, its patch, what it computed, and whether it
        # packs padding; no WeakSet, which a finalizer may change while it is read
        self._patched: list[tuple[str, weakref.ref[Patch], list[Tally], bool]] = []
        # how each trainer's padded batches are computed, once it was said; trainers that are dataclasses have no hash
        self._ways: Any = WeakIdKeyDictionary()
        self._under_way: set[int] = set()  # ids of trainers and holders that are constructed
        self._trained = False
        self._model_classes: tuple[Any, ...] = ()
        self._holders: tuple[Any, ...] = ()

    def watch(self, kind: str, name: str, module: ModuleType) -> None:
        cls = getattr(module, name, None)
        if not self.active or cls is None:  # newer releases keep the module of an older one for its name only
            return
        if kind == "models":
            self._model_classes += (cls,)
            for method in ("from_pretrained", "_from_config"):
                bind(cls, method, self._making, self)
            return
        if kind == "trainers":
            bind(cls, "call_model_init", self._making_for_trainer, self)
            if self.options.collate:
                bind(cls, "get_train_dataloader", self._loading, self)
        else:
            self._holders += (cls,)
        bind(cls, "__init_subclass__", functools.partial(self._subclassing, cls), self)
        self._watch_constructors(cls)

    def off(self) -> None:
        if not self.active:
            return
        self.active = False
        release(self)
        for patch in [ref() for _, ref, *_ in self._patched]:
            if patch is not None:
                patch.revert()
        if self._patched:
            self._say_what_was_done()

    def _say_what_was_done(self) -> None:
        names, _, counted, packs = zip(*self._patched)
        tallies = [own.with_stacks(of_stacks) for own, *of_stacks in counted]
        rows = [name for name, tally in zip(names, tallies) if tally.rows]
        padded = [name for name, tally in zip(names, tallies) if tally.batches]
        why = next((tally.why for tally in tallies if tally.why), "")
        said = [f"{_joined(rows)} computed packed rows, each document by itself"] if rows else []
        if padded:
            batches, cells, tokens = map(sum, zip(*((each.batches, each.cells, each.tokens) for each in tallies)))
            said.append(f"{_joined(padded)} computed {tokens:,} tokens for the {cells:,} of {batches:,} padded batches")
        if said:
            self._say_unless_quiet("; ".join(said) + (f". Other batches stayed padded: {why}." if why else "."))
        elif why:
            say(f"nothing was packed: batches of {_joined(names)} were computed as they came: {why}.")
        else:
            may_pack = all(packs) or PACKED in [*self._ways.values()]
            none = "with padding, and none whose" if may_pack else "whose"
            hint = "" if may_pack else " If batches are padded, --padded-batches computes them packed."
            say(f"nothing was packed: {_joined(names)} had no batch {none} rows say where documents start.{hint}")
        if self.options.collate and not self._trained:
            say(
                "--collate has changed nothing: no Trainer has trained here, and a loop of one's own may look at rows "
                "and masks. There, give the loader fa2patch.DataCollatorWithFlattening()."
            )

    def patch(self, model: Any) -> None:
        # A model that was seen before is left as it is.
        with contextlib.suppress(NotAModel):
            model = transformers_model(model)
            if model not in self._seen and status(model) is None:
                self._patch(model)

    def _patch(self, whole: Any) -> None:
        # `whole` is a model, or an object that holds one and makes its batches.
        name, options = type(whole).__name__, self.options
        try:
            if is_transformers_model(whole) and (why := reads_no_text(whole, options.padded_batches)):
                raise UnsupportedModel(f"{why}. Call fa2patch.apply(model) if its batches are packed all the same.")
            patch = apply(whole, kernel=options.kernel, padded_batches=options.padded_batches or None)
        except (UnknownKernel, KernelUnavailable):
            raise
        except Fa2PatchError as error:
            say(f"{name} left alone: {error.message}")
            if isinstance(error, UnsupportedModel) and error.takes_padded_batches:
                say("padded_batches=True is the option --padded-batches here.")
        except Exception as error:
            if is_no_verdict(error):
                raise
            say(f"{name} left alone: fa2patch.apply failed, please report it: {type(error).__name__}: {error}")
        else:
            packs = of_model(patch.model) is not None
            patches = (patch, *patch.stacks)
            self._patched.append((name, weakref.ref(patch), [each.tally for each in patches], packs))
            attention = [layer for each in patches for layer in each.attention]
            seams = _joined(layer.seam for layer in attention)
            padding = " Padded batches are computed packed, too." if packs else ""
            layers = f"{len(attention)} attention layers, {seams} seam, kernel {patch.kernel}"
            self._say_unless_quiet(f"{name} patched: {layers}.{padding}")
        with contextlib.suppress(NotAModel):  # apply has said why
            self._seen.add(transformers_model(whole))

    def _say_unless_quiet(self, what: str) -> None:
        if not self.options.quiet:
            say(what)

    # --- models: what class methods of PreTrainedModel return to the program ------------------------------------------

    def _making(self, original: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
        # `from_config` ends in `_from_config`. Constructors of models are not replaced, because their end cannot be
        # seen from outside: a base model's last step runs inside the causal LM's constructor, a subclass adds modules
        # after it, and loading constructs models without weights. A model made by calling its class is patched when a
        # Trainer gets it.
        make: Function = original.__func__

        @functools.wraps(make)
        def making(cls: Any, *args: Any, **kwargs: Any) -> Any:
            made = make(cls, *args, **kwargs)
            model = made[0] if isinstance(made, tuple) else made  # a tuple: output_loading_info=True
            if self.active and isinstance(model, self._model_classes) and not self._is_a_part():
                self.patch(model)
            return made

        return classmethod(making)

    def _is_a_part(self) -> bool:
        # A model is a part if it goes to a constructor, as a vision tower does, or to a further call of `making`.
        making, owners = sys._getframe(1), (*self._model_classes, *self._holders)
        return any(
            frame.f_code is making.f_code
            or (frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), owners))
            for frame, _ in traceback.walk_stack(making.f_back)
        )

    # --- constructors of trainers and holders -------------------------------------------------------------------------

    def _subclassing(self, base: Any, original: Any) -> Any:
        # Subclasses that are defined later are watched, too.
        def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:
            if original is ABSENT:
                super(base, cls).__init_subclass__(**kwargs)
            else:
                original.__get__(None, cls)(**kwargs)
            self._watch_constructors(cls)

        return classmethod(__init_subclass__)

    def _watch_constructors(self, cls: Any) -> None:
        if "__init__" in vars(cls):
            bind(cls, "__init__", self._constructing, self)
        for subclass in cls.__subclasses__():
            self._watch_constructors(subclass)

    def _constructing(self, original: Function) -> Function:
        patcher = self

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # _is_a_part looks for this name and `self`
            outermost = id(self) not in patcher._under_way
            patcher._under_way.add(id(self))
            try:
                original(self, *args, **kwargs)
            finally:
                if outermost:
                    patcher._under_way.discard(id(self))
            if patcher.active:
                patcher._constructed(self, outermost)

        return __init__

    def _constructed(self, made: Any, outermost: bool) -> None:
        # An object passes through several constructors. That of a subclass, the outermost one, goes on after that of
        # its base.
        if not isinstance(made, self._holders):
            self.patch(getattr(made, "model", None))
            if outermost:
                self._trainer_constructed(made)
        elif outermost:
            self._patch(made)

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _trainer_constructed(self, trainer: Any) -> None:
        # The losses and metrics of TRL's trainers were compared (docs/stack/trl.md). They look at the rows of their
        # batches, so a collator cannot pack these. Batches of other trainers stay padded unless an option says
        # otherwise: code around the model may read what it computes of padding.
        options = self.options
        of_trl = any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__)
        if options.pack and (of_trl or (options.max_tokens and not options.collate)) and not hasattr(trainer, PACKS):
            self._pack_models(trainer)
        elif options.collate and (own_loader := flattening.replaced(trainer, ["get_train_dataloader"])):
            self._trained = True
            self._say_way(trainer, own_loader)
        if options.max_tokens and not hasattr(trainer, "token_budget"):  # else packed_trainer made it
            trainer.token_budget = TokenBudget(options.max_tokens)
            trainer.token_budget.install(trainer)
            for model in _held(trainer):
                trainer.token_budget.give(model)
            self._say_unless_quiet(
                f"{type(trainer).__name__} computes each batch in passes of at most {options.max_tokens} tokens: the "
                "same mini-batches, the same steps, the same losses."
            )

    def _pack_models(self, trainer: Any) -> None:
        for model in _held(trainer):
            self.patch(model)
        name, found = type(trainer).__name__, pack_models(vars(trainer))
        self._ways[trainer] = PACKED
        first: dict[int, str] = {}  # several attributes may hold one model, as model and model_wrapped do
        for attribute, hooks in found.packed.items():
            first.setdefault(id(hooks), attribute)
        if first:
            self._say_unless_quiet(
                f"{name} computes padded batches packed, and what their rows begin with in common once: "
                f"{', '.join(first.values())}. Losses and metrics stay those of padded batches; --no-pack leaves them "
                "padded."
            )
        reasons: dict[str, list[str]] = {}
        for attribute, error in found.padded.items():
            reasons.setdefault(error.message, []).append(attribute)
        for reason, attributes in reasons.items():
            say(f"{name} computes padded batches of {', '.join(attributes)} padded: {reason}")

    def _making_for_trainer(self, original: Function) -> Function:
        @functools.wraps(original)
        def call_model_init(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            model = original(trainer, *args, **kwargs)
            if self.active:
                self.patch(model)
                if self._ways.get(trainer) == PACKED:
                    pack_models({"model": model})
                if hasattr(trainer, "token_budget"):
                    trainer.token_budget.give(model)
            return model

        return call_model_init

    def _loading(self, original: Function) -> Function:
        @functools.wraps(original)
        def get_train_dataloader(trainer: Any) -> Any:
            self._trained = True
            if self._ways.get(trainer) == PACKED:
                return original(trainer)
            why, padding = flattening.why_trainer_stays_padded(trainer), trainer.data_collator
            self._say_way(trainer, why)
            if why:
                return original(trainer)
            trainer.data_collator = flattening.flattening(trainer)
            try:
                return original(trainer)
            finally:
                trainer.data_collator = padding

        return get_train_dataloader

    def _say_way(self, trainer: Any, stays_padded: str) -> None:
        if trainer in self._ways:
            return
        self._ways[trainer], name = "padded" if stays_padded else "flattened", type(trainer).__name__
        if stays_padded:
            say(f"{name} trains padded, as it would without --collate: {stays_padded}.")
        else:
            collator = flattening.collator_name(trainer.data_collator)
            self._say_unless_quiet(
                f"{name} trains on what its {collator} gives laid end to end, without the padding; the same "
                "mini-batches, the same steps. Evaluation stays padded."
            )


def _held(trainer: Any) -> list[Any]:
    found = [model for value in vars(trainer).values() for model in held_models(value)]
    return [*dict.fromkeys(found)]  # several attributes may hold one model, as model and model_wrapped do


def _joined(names: Iterable[str]) -> str:
    return " and ".join(sorted({*names}))


def reads_no_text(model: Any, padded_batches: bool = False) -> str:
    if stacks_of(model) is not None:
        takes = "packed pairs (fa2patch.DataCollatorForSeq2Seq makes them), or padded ones with --padded-batches"
        return "" if padded_batches else f"it is an encoder-decoder, which takes {takes}"
    seen = {getattr(layer.module, "is_causal", None) for layer in ModelLayers(model).attention}
    if False in seen:
        embeds = isinstance(embedding_of(model), torch.nn.Embedding)
        of_text = seen == {False} and embeds and not inspecting.takes(model.forward, "pixel_values")
        return "" if of_text else "its attention looks both ways, and not at text alone"
    return "" if seen == {True} or model.can_generate() else "it generates no text"
