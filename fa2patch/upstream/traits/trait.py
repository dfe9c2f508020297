"""What a trait is: one feature of a model that packed rows touch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..looked import Looked
from ..site import Site
from ..step import Step


class Trait:
    """One feature of a model that packed rows touch.

    ``apply`` asks every trait, in the order of ``TRAITS``, whether a model has it, whether it must be refused for it,
    and which attributes must be replaced. Every forward of a patched model then calls :meth:`before` and :meth:`after`
    of the traits that were found. A subclass overrides what it needs.

    Attributes:
        name: the key of what was found in ``Patch.found``.
    """

    name: str

    def finds(self, model: Looked) -> Any:
        """What the model has of this trait, or None where it does not have it.

        It is kept in ``Patch.found``, so it must be picklable and must not hold modules or tensors.
        """
        return True

    def refuses(self, model: Looked, found: Any) -> None:
        """Raise an :class:`~fa2patch.errors.Fa2PatchError` where the model cannot be patched for this trait."""

    def replaces(self, model: Looked, found: Any) -> Iterable[Site]:
        """The attributes that must be replaced."""
        return ()

    def before(self, step: Step, found: Any) -> None:
        """Called before each forward that the call goes through. ``step.mask`` is None for a dense batch."""

    def after(self, step: Step, found: Any, output: Any) -> Any:
        """Called after each such forward with its output. Returns the output."""
        return output

    @property
    def acts(self) -> bool:
        """Whether the trait does something in a forward."""
        cls = type(self)
        return cls.before is not Trait.before or cls.after is not Trait.after
