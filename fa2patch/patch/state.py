"""A patched model: what was found in it, what was replaced for it, and how that is taken back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from .. import kernels
from ..binding import LOCK, release, used_by
from ..upstream import foreign, hooks
from ..upstream.find_layers import Layer
from ..upstream.find_models import models
from ..upstream.forward import entered
from ..upstream.step import MARK, ROLE
from ..upstream.traits.order import by_name
from . import examining, peft_models
from .plan import Plan, plan


@dataclass(frozen=True)
class PatchedLayer:
    """One attention layer of a patched model, as it was when ``Patch.layers`` was read.

    Attributes:
        name: the layer's name in the base model.
        seam: ``"interface"``, ``"function"``, ``"method"`` or ``"mixer"``.
        owner: the class or module whose attribute is replaced.
        attribute: that attribute's name.
        state: ``"applied"``, ``"covered"`` (somebody has patched on top since) or ``"off"``.
        kernel: what computed its last packed batch; None if it has seen none, or was compiled.
        why: why better kernels were passed over, with ``kernel="auto"``.
    """

    name: str
    seam: str
    owner: Any
    attribute: str
    state: str
    kernel: str | None = None
    why: str = ""


class Patch:
    """A patched model. Leaving it as a context manager reverts it.

    Attributes:
        model: the Transformers model inside what was handed to ``apply``.
        kernel: the name of the kernel that was asked for.
        picks: the kernels that were picked.
        plan: what was found in the model, and what is replaced for it.
        acting: the traits that do something in a forward, each with what it has found.
        examination: what has been looked at.
        unpacked: the number of training batches without document information; None stops the count.
        vouched: whether a packed batch has been seen to reach every attention layer.
        named: the architecture that ``apply`` was told, if any.
        rehooked: attributes of objects that hold a bound forward: the object, the name, and what it held.
    """

    def __init__(
        self,
        model: Any,
        planned: Plan,
        kernel: str | kernels.Kernel = "auto",
        named: str | None = None,
        prove: bool | str = "unknown",
    ) -> None:
        self.model, self.named = model, named
        self.picks = kernels.Picks(kernel)
        self.kernel = self.picks.name
        self.rehooked: list[tuple[Any, str, Any]] = []
        self.unpacked: int | None = 0
        self._take(planned)
        self.examination = examining.begun(self, prove)

    def _take(self, planned: Plan) -> None:
        self.plan, self.vouched = planned, False
        self.acting = tuple(
            (trait, found)
            for trait, found in ((by_name(name), found) for name, found in planned.found.items())
            if trait.acts
        )

    @property
    def architecture(self) -> Any:
        """The model's row of the registry."""
        return self.plan.architecture

    @property
    def found(self) -> dict[str, Any]:
        """What each trait has found, by its name."""
        return self.plan.found

    @property
    def route(self) -> Any:
        """The way that boundaries take through the model."""
        return self.plan.route

    @property
    def attention(self) -> tuple[Layer, ...]:
        """The layers that must be given the boundaries."""
        return self.plan.layers

    def examine(self, module: Any, call: dict[str, Any], mask: Any) -> None:
        """See :func:`fa2patch.patch.examining.examine`."""
        examining.examine(self, module, call, mask)

    def renew(self) -> None:
        """Look at a model again that has changed since ``apply``. What is new is bound, what covers ours is bound over.

        Raises:
            UnsupportedModel, LayerNotPatchable: what has come cannot be patched.
        """
        planned = plan(self.model, self.named)
        with LOCK:
            for site in planned.sites:
                site.bind(self)
        self._take(planned)
        under_way = self.examination.under_way
        self.examination = examining.begun(self, self.examination.prove)
        self.examination.under_way = under_way
        self.mark()

    def mark(self) -> None:
        """Put our marks and hooks on the models that a call goes through, and our forward over one of the object's."""
        for model, role in zip(models(self.model), self.plan.roles):
            model.__dict__.update({MARK: self, ROLE: role})
            hooks.register(model)
        if foreign.replaced_on(self.model):
            self.rehooked.append((self.model, "forward", self.model.__dict__["forward"]))
            self.model.__dict__["forward"] = foreign.entered_first(self.model, entered)

    @property
    def active(self) -> bool:
        """Whether the model is patched (False after ``revert``)."""
        return self.model.__dict__.get(MARK) is self

    @property
    def layers(self) -> tuple[PatchedLayer, ...]:
        """Every attention layer, with its state looked up now."""
        states = {(binding.owner, binding.attribute): binding.state for binding in used_by(self)}
        decoder = models(self.model)[-1]

        def found(layer: Layer) -> PatchedLayer:
            owner, attribute = layer.site.owner, layer.site.attribute
            picked = self.picks.of(decoder.get_submodule(layer.name))
            kernel, why = (picked.kernel.name, picked.why) if picked else (None, "")
            state = states.get((owner, attribute), "off")
            return PatchedLayer(layer.name, layer.seam, owner, attribute, state, kernel, why)

        return tuple(found(layer) for layer in self.attention)

    def revert(self) -> None:
        """Take the patch off this model. Reverting twice is a no-op."""
        with LOCK:
            for module in self.model.modules():
                if module.__dict__.get(MARK) is self:
                    del module.__dict__[MARK], module.__dict__[ROLE]
                    hooks.remove(module)
            for module, name, bound in self.rehooked:
                module.__dict__[name] = bound
            self.rehooked.clear()
            release(self)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.revert()

    def __repr__(self) -> str:
        seams = sorted({layer.seam for layer in self.attention})
        return (
            f"<fa2patch.Patch of {type(self.model).__name__}: {len(self.attention)} {self.architecture.model_type} "
            f"attention layers on the {' and '.join(seams)} seam, kernel {self.kernel!r}, "
            f"{'applied' if self.active else 'reverted'}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copied = Patch.__new__(Patch)
        memo[id(self)] = copied
        rehooked = [(memo[id(module)], name, copy.deepcopy(bound, memo)) for module, name, bound in self.rehooked]
        copied.__setstate__({**self.__dict__, "model": memo.get(id(self.model), self.model), "rehooked": rehooked})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or a model loaded in another process, is patched too: its bindings have one more user."""
        self.__dict__.update(state)
        self.examination = examining.copied(self, self.examination)
        for site in self.plan.sites:
            site.bind(self)
        peft_models.watch(self)
