"""Meets the models of a program under ``fa2patch run``: patches each once, and prints what was done.

Text is not packed for a model that reads other things, too.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from .._torch import is_no_verdict
from ..binding import release
from ..errors import Fa2PatchError, KernelUnavailable, NotAModel, UnknownKernel
from ..padded.batches import of_model
from ..patch.applying import apply, status
from ..patch.state import Patch
from ..upstream import inspecting
from ..upstream.find_layers import attention_layers
from ..upstream.find_models import is_transformers_model, models, transformers_model
from .saying import say
from .start import Options


class Meeting:
    """The models that were met in this process. All replaced methods belong to this object (``binding.bind``).

    Attributes:
        options: The options of ``fa2patch run``.
        met: The models that were patched or left alone.
        active: Whether models are patched.
        patched: Whether any model was patched.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.met: weakref.WeakSet[Any] = weakref.WeakSet()
        self.active, self.patched = True, False
        self._patches: weakref.WeakSet[Patch] = weakref.WeakSet()

    def end(self) -> None:
        """Undo the replacements and revert all patches."""
        self.active = False
        release(self)
        for patch in list(self._patches):
            patch.revert()

    def meet(self, model: Any) -> None:
        """Patch a model that was not met before, or print why it is left alone.

        Raises:
            UnknownKernel, KernelUnavailable: The requested kernel does not exist or cannot run here.
        """
        if model in self.met or status(model) is not None:
            return
        self.met.add(model)
        self._patch(model)

    def meet_in(self, holder: Any) -> None:
        """Patch the model in an object that makes the model's batches, or print why it is left alone.

        Raises:
            UnknownKernel, KernelUnavailable: The requested kernel does not exist or cannot run here.
        """
        with contextlib.suppress(NotAModel):  # apply says why
            self.met.add(transformers_model(holder))
        self._patch(holder)

    def _patch(self, model: Any) -> None:
        """Patch a model, or what holds one, or print why it is left alone."""
        name = type(model).__name__
        try:
            why = reads_no_text(model) if is_transformers_model(model) else ""
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
            if is_no_verdict(error):
                with contextlib.suppress(NotAModel):
                    self.met.discard(transformers_model(model))
                raise
            say(f"{name} left alone: fa2patch.apply failed, please report it: {type(error).__name__}: {error}")
            return
        self._patches.add(patch)
        self.patched = True
        seams = " and ".join(sorted({layer.seam for layer in patch.attention}))
        packs = of_model(models(patch.model)[-1]) is not None
        padding = " Its padded batches are computed packed." if packs else ""
        self.told(
            f"{name} patched: {len(patch.attention)} attention layers, {seams} seam, kernel {patch.kernel}.{padding}"
        )

    def told(self, what: str) -> None:
        """Print what was done, unless the options ask for quiet."""
        if not self.options.quiet:
            say(what)


def reads_no_text(model: Any) -> str:
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
