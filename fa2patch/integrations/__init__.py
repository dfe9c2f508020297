"""Plugins of other training programs that patch their models, one module for each program. Nothing imports them here.

The names of modules and classes are what users write into their configurations.
"""

from __future__ import annotations

from typing import Any


def patched(model: Any) -> None:
    # Every plugin patches a model in this way, and says so on stderr.
    from ..patch.applying import apply  # not above: to print the path of a plugin takes no torch
    from ..run.start import say

    said = "Rows without padding keep their documents apart, and padded batches are computed packed, too."
    say(f"{apply(model, prove=True, padded_batches=True)!r}. {said}")


def said_after_a_step(trainer: Any) -> None:
    # After its first step, a Trainer says on stderr what computed the model's layers.
    from transformers import TrainerCallback

    class AfterAStep(TrainerCallback):
        said = False

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            if not self.said:
                self.said = True
                _say_what_computed(model)

    trainer.add_callback(AfterAStep())


def _say_what_computed(model: Any) -> None:
    from ..patch.applying import status
    from ..run.start import say

    patch = status(model)
    layers = () if patch is None else patch.layers
    kernels = sorted({layer.kernel for layer in layers if layer.kernel is not None})
    computed = sum(layer.kernel is not None for layer in layers)
    if kernels:
        say(f"the first step was packed. {computed} of {len(layers)} layers were computed with: {'; '.join(kernels)}.")
    elif layers:
        say("in the first step, no layer computed a packed row outside of a compiled graph.")
