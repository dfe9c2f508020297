"""Check that every layer was given the boundaries. A layer without them would mix documents."""

from __future__ import annotations

from collections.abc import Sequence

from .._compile import compiling
from .._types import Model
from ..errors import PackingNotIsolated
from .find_layers import Layer
from .find_models import models
from .packed_mask import PackedMask
from .step import Patched


def require_every_layer(model: Model, patch: Patched, mask: PackedMask) -> None:
    """Raise :class:`PackingNotIsolated` if a layer of the model was not given this batch's boundaries.

    The number of layers is compared in every forward. Eagerly, the layers themselves are compared too, until a packed
    batch has reached them all. Rows of one token need no boundaries in mixers, and LFM2 of 5.10 passes none.
    """
    short = mask.shape[1] == 1
    layers = tuple(layer for layer in patch.attention if layer.seam != "mixer") if short else patch.attention
    missed = len(mask.calls) < len(layers)
    if not compiling():
        known = None not in mask.calls  # 4.47's and 4.48's GPT-NeoX does not pass the layer to its function
        missed = missed or (known and not patch.vouched and bool(_not_given(layers, mask, model)))
        patch.vouched = not missed and not short
    if missed:
        names = _not_given(layers, mask, model)
        raise PackingNotIsolated(
            f"of {len(layers)} attention layers only {len(layers) - len(names)} were given the "
            f"boundaries of this packed batch; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Their "
            "attention was replaced after fa2patch.apply: apply fa2patch last. See fa2patch.status(model).layers."
        )


def _not_given(layers: Sequence[Layer], mask: PackedMask, model: Model) -> list[str]:
    """The names and classes of the layers that were not given the boundaries.

    They are looked up in the model that was called, because a ``DataParallel`` replica carries the original's patch.
    """
    given = {id(module) for module in mask.calls}
    decoder = models(model)[-1]
    modules = [(layer.name, decoder.get_submodule(layer.name)) for layer in layers]
    return [f"{name} ({type(module).__name__})" for name, module in modules if id(module) not in given]
