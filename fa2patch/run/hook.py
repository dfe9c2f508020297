"""In a process under ``fa2patch run``: every model is patched as it is made.

``from_pretrained`` and ``from_config`` end in two methods of PreTrainedModel, and those are replaced as Transformers'
modules are imported. A constructor is not: from outside nothing says when it is done (a base model's own last step runs
inside the causal LM's, a subclass adds modules behind it, and loading constructs models without weights). A model that
was made by its class is patched when a ``Trainer`` is given it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from types import ModuleType
from typing import Any, Callable

import torch
import wrapt

from ..binding import bind, release
from ..errors import Fa2PatchError, KernelUnavailable, NotAModel, UnknownKernel
from ..patch.applying import apply, status
from ..patch.state import Patch
from ..patch.unwrap import transformers_model
from ..trying import says_nothing
from ..upstream.find_layers import attention_layers
from ..upstream.find_models import models
from . import collate
from .saying import say
from .start import Options

MODELS, TRAINER = WATCHED = "transformers.modeling_utils", "transformers.trainer"

_hook: Hook | None = None


def on(options: Options) -> Hook:
    """Patch models from now on, in this process; one hook at a time."""
    global _hook
    off()
    _hook = Hook(options)
    for name in WATCHED:
        wrapt.register_post_import_hook(_hook.watch, name)
    return _hook


def imported(module: Any) -> None:
    """One of the watched modules is there, in a process that ``fa2patch run`` has started."""
    global _hook
    if _hook is None:
        _hook = Hook(Options.inherited())
    _hook.watch(module)


def off() -> None:
    """Undo all that was done, for good."""
    if _hook is not None:
        _hook.off()


class _Depth(threading.local):
    """How many calls of this thread are making a model: the outermost is the one whose result the script gets."""

    calls = 0


class Hook:
    """What is replaced in this process, and the models that it has met.

    Attributes:
        options: what was asked for.
        met: the models that were patched, or left alone.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches: weakref.WeakSet[Patch] = weakref.WeakSet()
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = _Depth()
        self._active, self._patched, self._trained = True, False, False

    def watch(self, module: ModuleType) -> None:
        """Replace what this module has of what makes models, and of what trains them."""
        if not self._active:
            return
        if module.__name__ == MODELS:
            self._base = module.PreTrainedModel
            for name in ("from_pretrained", "_from_config"):
                bind(self._base, name, self._making, self)
        else:
            bind(module.Trainer, "__init__", self._given, self)
            if self.options.collate:
                bind(module.Trainer, "get_train_dataloader", self._loading, self)

    def off(self) -> None:
        """Undo all that was done, for good."""
        if not self._active:
            return
        self._active = False
        release(self)
        for patch in list(self._patches):
            patch.revert()
        if self.options.collate and self._patched and not self._trained:
            say(
                "--collate has changed nothing: no Trainer has trained here, and a loop of one's own may look at rows "
                "and masks. There, give the loader fa2patch.DataCollatorWithFlattening()."
            )

    def _making(self, original: classmethod[Any, Any, Any]) -> classmethod[Any, Any, Any]:
        make: Callable[..., Any] = original.__func__

        @functools.wraps(make)
        def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth.calls += 1
            try:
                made = make(cls, *args, **kwargs)
            finally:
                self._depth.calls -= 1
            model = made[0] if isinstance(made, tuple) else made  # a tuple: output_loading_info=True
            whole = not self._depth.calls and not self._inside_a_constructor()
            if self._active and whole and isinstance(model, self._base):
                self.meet(model)
            return made

        return classmethod(watched)

    def _inside_a_constructor(self) -> bool:
        """Whether what is made here is a part of a model that is being made: a vision tower, say."""
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), self._base):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _given(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            if not self._active:
                return
            try:
                model = transformers_model(getattr(trainer, "model", None))
            except NotAModel:
                return
            self.meet(model)
            own_loader = collate.replaced(trainer, ["get_train_dataloader"])
            if self.options.collate and own_loader:
                self._left_padded(trainer, own_loader)

        return __init__

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_train_dataloader(trainer: Any) -> Any:
            why = collate.why_not(trainer)
            if why:
                self._left_padded(trainer, why)
                return original(trainer)
            padding = trainer.data_collator
            if trainer not in self._trainers:
                self._told(
                    f"{type(trainer).__name__} trains on what its {collate.name(padding)} gives laid end to end, "
                    "without the padding; the same mini-batches, the same steps. Evaluation stays padded."
                )
            self._trainers.add(trainer)
            self._trained = True
            trainer.data_collator = collate.flattening(trainer)
            try:
                return original(trainer)
            finally:
                trainer.data_collator = padding

        return get_train_dataloader

    def _left_padded(self, trainer: Any, why: str) -> None:
        self._trained = True
        if trainer not in self._trainers:
            self._trainers.add(trainer)
            say(f"{type(trainer).__name__} trains padded, as it would without --collate: {why}.")

    def meet(self, model: Any) -> None:
        """Patch a model, or say why it is left alone; once.

        Raises:
            UnknownKernel, KernelUnavailable: the kernel that was asked for is not to be had.
        """
        if model in self.met or status(model) is not None:
            return
        self.met.add(model)
        name = type(model).__name__
        try:
            why = _reads_no_text(model)
            if why:
                say(f"{name} left alone: {why}. Call fa2patch.apply(model) if its batches are packed all the same.")
                return
            patch = apply(model, kernel=self.options.kernel)
        except (UnknownKernel, KernelUnavailable):
            raise
        except Fa2PatchError as error:
            say(f"{name} left alone: {error}")
            return
        except Exception as error:
            if says_nothing(error):
                self.met.discard(model)
                raise
            say(f"{name} left alone: fa2patch.apply failed, please report it: {type(error).__name__}: {error}")
            return
        self._patches.add(patch)
        self._patched = True
        seams = " and ".join(sorted({layer.seam for layer in patch.attention}))
        self._told(f"{name} patched: {len(patch.attention)} attention layers, {seams} seam, kernel {patch.kernel}.")

    def _told(self, what: str) -> None:
        if not self.options.quiet:
            say(what)


def _reads_no_text(model: Any) -> str:
    """Why a model is none that text is packed for; empty if it is one.

    Empty for an encoder-decoder as well, which ``apply`` refuses in words of its own.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        return ""
    seen = {getattr(layer.module, "is_causal", None) for layer in attention_layers(models(model)[-1])}
    if seen == {False} and _embeds_tokens_only(model):
        return ""
    if False in seen:
        return "its attention looks both ways, and not at text alone"
    return "" if seen == {True} or model.can_generate() else "it generates no text"


def _embeds_tokens_only(model: Any) -> bool:
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return False
    return (
        isinstance(embedding, torch.nn.Embedding) and "pixel_values" not in inspect.signature(model.forward).parameters
    )
