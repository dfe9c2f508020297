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

    from ..patch.applying import status
    from ..run.start import say

    class AfterAStep(TrainerCallback):
        said = False

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
            patch = None if self.said else status(model)
            self.said = True
            layers = () if patch is None else patch.layers
            kernels = [layer.kernel for layer in layers if layer.kernel is not None]
            if kernels:
                named = "; ".join(sorted({*kernels}))
                say(f"the first step was packed. {len(kernels)} of {len(layers)} layers were computed with: {named}.")
            elif layers:
                say("in the first step, no layer computed a packed row outside of a compiled graph.")

    trainer.add_callback(AfterAStep())
