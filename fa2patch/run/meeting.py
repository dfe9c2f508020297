"""Meets the models of a program under ``fa2patch run``: patches each once, and prints what was done."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ..binding import release
from ..errors import Fa2PatchError, KernelUnavailable, NotAModel, UnknownKernel
from ..padded.batches import of_model
from ..patch.applying import apply, status
from ..patch.state import Patch
from ..patch.unwrap import transformers_model
from ..trying import says_nothing
from ..upstream.find_models import is_transformers_model, models
from .saying import say
from .start import Options
from .texts import reads_no_text


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
            if says_nothing(error):
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
