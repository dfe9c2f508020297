"""A callback of Lightning that patches the Transformers models of a LightningModule."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import BadArgument, Fa2PatchError, NotAModel
from ..kernels import Kernel
from ..patch.applying import apply, status
from ..patch.state import Patch
from ..upstream.find_models import outermost_models

# Lightning is imported under either name. They are different modules, with a class Callback each.
_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _bases() -> tuple[tuple[Any, ...], str]:
    # The Lightning that is imported is used, else the one that can be. The text says why there is none.
    imported = tuple(sys.modules[name].Callback for name in _NAMES if sys.modules.get(name) is not None)
    if imported:
        return imported, ""
    why = ""
    for name in _NAMES:
        try:
            return (importlib.import_module(name).Callback,), ""
        except ImportError as error:
            why = str(error)
    return (), why


_BASES, _WHY = _bases()


class LightningCallback(*_BASES):  # type: ignore[misc]
    """Patches the Transformers models in a LightningModule, for ``fit``, ``validate``, ``test`` and ``predict``.

    Example::

        trainer = lightning.Trainer(callbacks=[fa2patch.LightningCallback()])
        trainer.fit(module, DataLoader(dataset, batch_size=8, collate_fn=fa2patch.DataCollatorWithFlattening()))

    Models that exist at ``setup`` are patched then, before Lightning wraps or shards them. Models that the module makes
    in its own ``setup`` or ``configure_model`` are patched before the first batch. Patches are not reverted when
    training ends.

    Args:
        models: Names of the models to patch, as in ``module.named_modules()``, or of modules that hold them, such as
            ``["llm"]``. None patches every Transformers model in the module.
        kernel, architecture, prove, padded_batches: As for :func:`fa2patch.apply`.

    Attributes:
        patches: The :class:`fa2patch.Patch` of each model, by the model's name in the module.

    Raises:
        Fa2PatchError: Lightning does not import. A class of its errors is raised in ``fit`` if a model cannot be
            patched.
        NotAModel: The module holds no Transformers model before the first batch.
        BadArgument: The module holds no model of a name in ``models``.
    """

    def __init__(
        self,
        models: Sequence[str] | None = None,
        *,
        kernel: str | Kernel | None = None,
        architecture: str | None = None,
        prove: bool | str | None = None,
        padded_batches: bool | None = None,
    ) -> None:
        if not _BASES:
            raise Fa2PatchError(
                f"LightningCallback needs Lightning, which does not import ({_WHY}): pip install lightning"
            )
        super().__init__()
        self.models = None if models is None else tuple(models)
        self.patches: dict[str, Patch] = {}
        self._options: dict[str, Any] = {
            "kernel": kernel, "architecture": architecture, "prove": prove, "padded_batches": padded_batches,
        }  # fmt: skip

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Patch the models that the module holds already."""
        self._patch(pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Patch the models that the module has made since."""
        found, name = self._patch(pl_module), type(pl_module).__name__
        if not found:
            raise NotAModel(
                f"expected a Transformers model in this {name}, found none. LightningCallback patches models that are "
                "modules of the LightningModule. Call fa2patch.apply(model) for a model that is kept elsewhere, such "
                "as in a list."
            )
        for wanted in self.models or ():
            if not any(_within(each, wanted) for each in found):
                raise BadArgument(
                    f"models={list(self.models or ())!r}: expected names of Transformers models in this {name}, or of "
                    f"modules that hold them; found {', '.join(map(repr, found))}, and none of the name {wanted!r}."
                )

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _patch(self, module: Any) -> dict[str, Any]:
        found = outermost_models(module)
        for name, model in found.items():
            asked = self.models is None or any(_within(name, wanted) for wanted in self.models)
            if not asked or status(model) in self.patches.values():
                continue
            try:
                self.patches[name] = apply(model, **self._options)
            except Fa2PatchError as error:
                raise type(error)(
                    f"{name} of this {type(module).__name__}: {error.message} If it is to stay as it is, name the "
                    "other models: LightningCallback(models=[...])."
                ) from error
        return found


def _within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")
