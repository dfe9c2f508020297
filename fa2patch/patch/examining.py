"""What happens on a patched model's first packed batch, and on each one after its modules have changed."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from .._compile import compiling, constant, paused
from ..errors import Fa2PatchError, NothingProven, PackingNotIsolated
from ..probing import proving


class Patched(Protocol):
    """What an examination needs of a patch.

    Attributes:
        model: the Transformers model.
        examination: what has been looked at.
    """

    model: Any
    examination: Examination

    @property
    def active(self) -> bool:
        """Whether the model is patched."""

    def renew(self) -> None:
        """Look at a model again that has changed."""


_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Patched] = weakref.WeakValueDictionary()


@dataclass
class Examination:
    """What has been looked at in a patched model.

    Attributes:
        prove: whether the first packed batch is proven, as ``apply`` was told.
        unproven: whether a packed batch has still to be proven.
        structure: what :func:`~fa2patch.probing.proving.structure` said of the model when it was last looked at.
        under_way: whether somebody runs the model to look at it. Packed batches of such runs are not examined.
        number: a number for a compiled graph to know the patch by.
    """

    prove: bool | str
    unproven: bool
    structure: int
    under_way: bool = False
    number: int = field(default_factory=lambda: next(_numbers))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Packed batches are not examined meanwhile."""
        before, self.under_way = self.under_way, True
        try:
            yield
        finally:
            self.under_way = before


def begun(patch: Patched, prove: bool | str) -> Examination:
    """The examination of a model that has just been planned."""
    has_to_be = prove is True or (prove == "unknown" and bool(proving.unknown(patch.model)))
    return known(patch, Examination(prove, has_to_be, proving.structure(patch.model)))


def copied(patch: Patched, examination: Examination) -> Examination:
    """The examination of a copy. It has other modules, which are looked at when all of them are there."""
    return known(patch, Examination(examination.prove, examination.unproven, 0))


def known(patch: Patched, examination: Examination) -> Examination:
    """Remember by which number a compiled graph knows the patch."""
    _by_number[examination.number] = patch
    return examination


def examine(patch: Patched, module: Any, call: dict[str, Any], mask: Any) -> None:
    """Before a packed batch is computed: notice layers that have come or gone, and prove what is not known.

    Args:
        module: the model that the batch came to.
        call: its arguments by name.
        mask: the batch's :class:`~fa2patch.upstream.packed_mask.PackedMask`.

    Raises:
        PackingNotIsolated: documents see each other in a module that is not known.
        LayerNotPatchable, UnsupportedModel: the model has other layers now, and they cannot be patched.
    """
    examination = patch.examination
    if compiling():
        found = _examined(examination.number)
        if found:
            raise PackingNotIsolated(found)
        return
    if examination.under_way or getattr(module, "_is_replica", False) or not patch.active:
        return
    if proving.structure(patch.model) != examination.structure:
        patch.renew()
        examination = patch.examination
    if not examination.unproven or sum(length > 0 for length in mask.boundaries.lengths) < 2:
        return
    if proving.is_sharded(patch.model) and examination.prove is not True:
        examination.unproven = False
        warnings.warn(
            f"{type(patch.model).__name__} holds a module that fa2patch does not know, "
            f"{proving.unknown(patch.model)}, and is sharded, so that one rank cannot prove it by itself. Call "
            "fa2patch.verify(model, batch=batch) on every rank, or fa2patch.apply(model, prove=False).",
            NothingProven,
            stacklevel=2,
        )
        return
    _proven(patch, module, call, mask)


def _proven(patch: Patched, module: Any, call: dict[str, Any], mask: Any) -> None:
    with patch.examination.paused():
        proving.prove(module, call, mask)
    patch.examination.unproven = False


@constant
def _examined(number: int) -> str:
    """What :func:`examine` finds wrong while a graph is captured; empty if nothing.

    The values of the batch are not there yet, so an example takes its place.
    """
    patch = _by_number[number]
    if patch.examination.under_way:
        return ""
    with paused():
        try:
            if proving.structure(patch.model) != patch.examination.structure:
                patch.renew()
            if patch.examination.unproven:
                _proven(patch, patch.model, *proving.example_of(patch.model, patch))
        except Fa2PatchError as error:
            return str(error)
    return ""
