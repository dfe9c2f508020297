"""Patches every model as it is made, in a process under ``fa2patch run``.

``from_pretrained`` and ``from_config`` end in two methods of PreTrainedModel, which are replaced when Transformers'
modules are imported. Constructors are not replaced, because their end cannot be seen from outside: a base model's last
step runs inside the causal LM's constructor, a subclass adds modules after it, and loading constructs models without
weights. A model made by calling its class is patched when it is given to a ``Trainer``.
"""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import weakref
from types import ModuleType
from typing import Any, Callable

import torch
import wrapt

from .._types import Function
from ..binding import bind, release
from ..errors import Fa2PatchError, KernelUnavailable, NotAModel, UnknownKernel
from ..patch.applying import apply, status
from ..patch.state import Patch
from ..patch.unwrap import transformers_model
from ..trying import says_nothing
from ..upstream import inspecting
from ..upstream.find_layers import attention_layers
from ..upstream.find_models import models
from . import collate
from .saying import say
from .start import Options

MODELS = "transformers.modeling_utils"
WATCHED = (MODELS, "transformers.trainer")

_hook: Hook | None = None


def on(options: Options) -> Hook:
    """Patch the models that this process makes from now on. A hook that is already on is switched off first."""
    global _hook
    off()
    _hook = Hook(options)
    for name in WATCHED:
        wrapt.register_post_import_hook(_hook.watch, name)
    return _hook


def imported(module: Any) -> None:
    """Handle the import of a watched module in a process that ``fa2patch run`` has started."""
    global _hook
    if _hook is None:
        _hook = Hook(Options.inherited())
    _hook.watch(module)


def off() -> None:
    """Switch the hook off, if there is one. It cannot be switched on again."""
    if _hook is not None:
        _hook.off()


class _Depth(threading.local):
    """The number of nested calls of this thread that make a model. Only the outermost returns it to the script."""

    calls = 0


class Hook:
    """The replacements in this process, and the models that passed through them.

    Attributes:
        options: The options of ``fa2patch run``.
        met: The models that were patched or left alone.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._patches: weakref.WeakSet[Patch] = weakref.WeakSet()
        self._trainers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._depth = _Depth()
        self._active, self._patched, self._trained = True, False, False

    def watch(self, module: ModuleType) -> None:
        """Replace the methods of a watched module that make models, or those of its Trainer."""
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
        """Undo the replacements and revert all patches. The hook cannot be switched on again."""
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
        make: Function = original.__func__

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
        """Whether the model is made inside another model's constructor, as a vision tower is."""
        return any(
            frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), self._base)
            for frame, _ in traceback.walk_stack(sys._getframe(2))
        )

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

    def _loading(self, original: Function) -> Function:
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
        """Patch a model that was not met before, or print why it is left alone.

        Raises:
            UnknownKernel, KernelUnavailable: The requested kernel does not exist or cannot run here.
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
            say(f"{name} left alone: {error.message}")
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
    """The reason why text is not packed for a model; empty if it is.

    It is empty for an encoder-decoder too, which ``apply`` refuses with its own message.
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
    return isinstance(embedding, torch.nn.Embedding) and not inspecting.takes(model.forward, "pixel_values")
