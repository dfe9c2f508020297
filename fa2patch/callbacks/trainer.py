"""A callback of Transformers' Trainer that patches the model."""

from __future__ import annotations

from typing import Any

import transformers

from ..errors import PackingNotIsolated
from ..kernels import Kernel
from ..patch.applying import apply, status
from ..patch.state import Patch


class TrainerCallback(transformers.TrainerCallback):
    """Patches the model that a ``Trainer`` trains, whatever makes it: an argument, a name or ``model_init``.

    Example::

        trainer = transformers.Trainer(model_init=make_model, args=args, train_dataset=dataset,
                                       data_collator=fa2patch.DataCollatorWithFlattening(),
                                       callbacks=[fa2patch.TrainerCallback()])

    The model is patched at the end of the Trainer's constructor. A model that ``model_init`` makes for ``train`` or for
    a trial is patched when its training begins. A patch is not reverted when training ends. Only the Trainer's own
    model is patched: reference and reward models of TRL's trainers are not handed to callbacks.

    Args:
        kernel, architecture, prove, padded_batches: As for :func:`fa2patch.apply`, which raises its errors in the
            Trainer's constructor or in ``train``.

    Attributes:
        patch: The :class:`fa2patch.Patch` of the model that was patched last; None before the first one.
    """

    def __init__(
        self,
        *,
        kernel: str | Kernel | None = None,
        architecture: str | None = None,
        prove: bool | str | None = None,
        padded_batches: bool | None = None,
    ) -> None:
        self._options: dict[str, Any] = {
            "kernel": kernel, "architecture": architecture, "prove": prove, "padded_batches": padded_batches,
        }  # fmt: skip
        self.patch: Patch | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Patch the model of a new Trainer, or the one that is about to be trained, which may be another one."""
        self.patch = apply(model, **self._options)

    on_train_begin = on_init_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Raise an error if a model is evaluated that was never patched.

        Raises:
            PackingNotIsolated: The callback was added to a Trainer after its constructor, and ``evaluate`` or
                ``predict`` was called before ``train``. Trainer calls no callback before the first batch then.
        """
        if self.patch is None and status(model) is None:
            raise PackingNotIsolated(
                f"expected fa2patch.TrainerCallback among the arguments of the Trainer, found that it was added later, "
                f"and that this {type(model).__name__} has computed a batch of evaluate or predict unpatched. Pass "
                "callbacks=[fa2patch.TrainerCallback()] to the Trainer, or call fa2patch.apply(trainer.model)."
            )
