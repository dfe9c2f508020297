"""The state of a patched model: what was found in it, what was replaced for it, and how to revert that."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch.fx

from .. import kernels
from .._types import Function
from ..binding import bind, changing, release, used_by, users, when_imported
from ..proof import looking
from ..upstream import embeddings, hooks, other_code
from ..upstream.architectures import Architecture
from ..upstream.calls import refuse_recording
from ..upstream.engines import SPLITS_ROWS
from ..upstream.find_layers import Layer, ModelLayers
from ..upstream.find_models import models, named_modules, walked_once
from ..upstream.forward import SAY_AFTER
from ..upstream.step import MARK, ROLE, Budgeted, Tally, Trait
from ..upstream.transformers_names import TRAINERS
from . import examining
from .model_plan import ModelPlan, plan_model, plan_pairs
from .padding import of_model


@dataclass(frozen=True)
class PatchedLayer:
    """One attention layer or mixer of a patched model, as it was when ``Patch.layers`` was read.

    Attributes:
        name: the layer's name in the base model, or in an encoder-decoder.
        seam: ``"interface"``, ``"formula"``, ``"document"`` or ``"mixer"``.
        owner: the class or module whose attribute is replaced.
        attribute: that attribute's name.
        state: ``"applied"``, ``"covered"`` (other code has replaced the attribute since) or ``"off"``.
        kernel: the name of the kernel that computed its last packed batch; None before the first one, for a compiled
            model and for a mixer.
        why: why ``kernel="auto"`` did not choose a better kernel.
    """

    name: str
    seam: str
    owner: Any
    attribute: str
    state: str
    kernel: str | None = None
    why: str = ""


class Patch:
    """The patch of a model. As a context manager, it reverts the model on exit.

    Attributes:
        model: the Transformers model inside the object that ``apply`` was called with.
        kernel: the name of the kernel that was asked for.
        picks: the kernel chosen for each layer.
        plan: what was found in the model, and what is replaced for it.
        facts: what is known of the model.
        attention: the layers that must be given the boundaries.
        before: the traits that do something before a forward, in order, each with what it has found.
        after: those that do something after it.
        examination: the state of the examination on packed batches.
        computes_packed: whether the last batch was a packed one.
        unpacked: the number of training batches without document information; None stops the count.
        stated: whether a packed batch has come with lengths.
        may_be_overwritten: how many more training rows whose ids count on are looked at for signs of documents.
        padded_batches: the argument of ``apply``; None if it was not given.
        budget: how many tokens are computed at once; None for no limit.
        vouched: whether the last packed batch reached every layer in ``attention``.
        skips: whether a packed batch has missed a layer, so that the layers that run are recorded.
        changes_ids: whether the last packed batch's position ids were changed in place.
        named: the ``architecture`` argument of ``apply``.
        tally: what the model has computed packed. ``fa2patch run`` says it in the end.
        rehooked: the instance attributes ``forward`` and ``_old_forward`` that were replaced: object, name and the
            value before.
    """

    def __init__(
        self,
        layers: ModelLayers,
        planned: ModelPlan,
        kernel: str | kernels.Kernel = "auto",
        named: str | None = None,
        prove: bool | str = "unknown",
    ) -> None:
        self.model, self.named = layers.model, named
        self.picks = kernels.Picks(kernel)
        self.kernel = self.picks.name
        self.rehooked: list[tuple[Any, str, Any]] = []
        self.unpacked: int | None = 0
        self.tally = Tally()
        self.stated, self.may_be_overwritten = False, SAY_AFTER
        self.computes_packed = False
        self.padded_batches: bool | None = None
        self.budget: Budgeted | None = None
        self._take(planned)
        self.examination = examining.begun(self, prove, layers)

    def _take(self, planned: ModelPlan) -> None:
        self.plan, self.facts, self.vouched, self.skips = planned, planned.facts, False, False
        self.changes_ids = False
        self.attention: tuple[Layer, ...] = planned.layers
        acting = [(trait, found, type(trait)) for trait, found in planned.traits]
        self.before: tuple[tuple[Trait, Any], ...] = tuple(
            (trait, found) for trait, found, cls in acting if cls.before is not Trait.before
        )
        self.after: tuple[tuple[Trait, Any], ...] = tuple(
            (trait, found) for trait, found, cls in acting[::-1] if cls.after is not Trait.after
        )

    @property
    def architecture(self) -> Architecture:
        """The model's row of the registry."""
        return self.facts.architecture

    @property
    def found(self) -> dict[str, Any]:
        """What each trait has found, by trait name."""
        return {trait.name: found for trait, found in self.plan.traits}

    @property
    def for_padded_batches(self) -> bool:
        """Whether the model's head takes no packed batches, so that only padded batches are computed packed."""
        return bool(self.facts.row_head) or any(trait.of_head for trait, _ in self.plan.traits)

    examine = examining.examine
    must_prove = examining.must_prove
    hook_changes = examining.hook_changes

    @property
    def number(self) -> str:
        """The number by which a graph that is captured looks this patch up."""
        return self.examination.number

    @changing(waits=True)
    def renew(
        self,
        kernel: str | kernels.Kernel | None = None,
        named: str | None = None,
        prove: bool | str | None = None,
        padded: bool | None = None,
    ) -> None:
        # An attribute that other code has replaced since is replaced again. An argument that is None keeps its value:
        # errors advise to call apply(model) again, which must not reset a kernel that was chosen. If the model cannot
        # be patched, the patch stays as it was.
        named = self.named if named is None else named
        layers = ModelLayers(self.model, named)
        if self.facts.stacks:
            planned = plan_pairs(layers)
            for stack in self.stacks:
                stack.renew(kernel, named)  # no head of rows is around its layers
        else:
            planned = plan_model(layers, self.facts.padded if padded is None else padded)
        for site in planned.sites:
            site.bind(self)
        self.named = named
        if kernel is not None and kernel != (self.picks.given or self.picks.name):
            self.picks = kernels.Picks(kernel)
            self.kernel = self.picks.name
        self.picks.prepared.clear()  # facts are others now
        self._take(planned)
        under_way = self.examination.under_way
        self.examination = examining.begun(self, self.examination.prove if prove is None else prove, layers)
        self.examination.under_way = under_way
        self.mark()

    @changing(waits=True)
    def bind(self) -> None:
        # Other packages change what is around a model, too: PEFT, Trainer and torch.fx.
        for site in self.plan.sites:
            site.bind(self)
        bind(torch.fx.Tracer, "trace", _refuses_patched, self)
        when_imported("peft.peft_model", _check_calls, self)  # a patch without bindings would count as gone
        for module in TRAINERS:
            when_imported(module, _mend_labels, self)
        for module in SPLITS_ROWS:
            when_imported(module, _balance_parts, self)

    def mark(self) -> None:
        # If other code has put a `forward` on the outermost model's object, ours is put around it. So it is around what
        # adds noise to the embeddings.
        entered_models = models(self.model)
        for model, role in zip(entered_models, self.plan.roles):
            model.__dict__.update({MARK: self, ROLE: role})
            if not self.facts.stacks:
                hooks.add(model)
        embeddings.take_apart(self.model)
        if other_code.replaced_on(self.model):
            self.rehooked.append((self.model, "forward", self.model.__dict__["forward"]))
            entered = self.plan.sites[0].make  # of the outermost model's forward
            self.model.__dict__["forward"] = other_code.entered_first(self.model, entered)
        for other in _patches():  # apply(model.model) came before apply(model): then one revert must be enough
            if other is not self and other.model in entered_models:
                other.revert()
        examining.keep_structure(self)

    @property
    def stacks(self) -> tuple[Patch, ...]:
        """The patches of the encoder and of the decoder, if the model is an encoder-decoder."""
        held = [self.model.get_submodule(name) for name in self.facts.stacks]
        return tuple(vars(stack)[MARK] for stack in held if MARK in vars(stack))

    @property
    def active(self) -> bool:
        """Whether the model is patched (False after ``revert``)."""
        return self.model.__dict__.get(MARK) is self

    @property
    def layers(self) -> tuple[PatchedLayer, ...]:
        """Every layer that is given the boundaries, with its state looked up now."""
        states = {(binding.owner, binding.attribute): binding.state for binding in used_by(self)}
        decoder = models(self.model)[-1]

        def found(layer: Layer) -> PatchedLayer:
            owner, attribute = layer.site.owner, layer.site.attribute
            picked = self.picks.of(decoder.get_submodule(layer.name))
            kernel, why = (picked.kernel.name, picked.why) if picked else (None, "")
            state = states.get((owner, attribute), "off")
            return PatchedLayer(layer.name, layer.seam, owner, attribute, state, kernel, why)

        if not self.facts.stacks:
            return tuple(found(layer) for layer in self.attention)
        names = {module: name for name, module in named_modules(self.model).items()}
        return tuple(
            replace(layer, name=f"{names[models(stack.model)[-1]]}.{layer.name}")
            for stack in self.stacks
            for layer in stack.layers
        )

    def limit(self, budget: Budgeted | None) -> None:
        # Each stack of an encoder-decoder computes its own tokens within the budget.
        for patch in (self, *self.stacks):
            patch.budget = budget

    def revert(self) -> None:
        """Remove the patch from this model. Reverting twice is a no-op.

        If the model shares its base model with another one that is patched, the base model stays patched for that one.
        """
        from ..upstream import dropped_masks  # which few need before

        stacks = self.stacks
        with changing(), walked_once():
            modules = named_modules(self.model).values()
            own = {module for module in modules if module.__dict__.get(MARK) is self}
            for module in modules:
                embeddings.put_back(module)
                dropped_masks.remove(module)
            padding = of_model(self.model)
            if padding is not None and padding.base in own:
                padding.remove()
            looking.release(self.model, everywhere=not any(other.active for other in _patches() if other is not self))
            for module in own:
                del module.__dict__[MARK], module.__dict__[ROLE]
                hooks.remove(module)
            for module, name, bound in self.rehooked:
                module.__dict__[name] = bound
            self.rehooked.clear()
            release(self)
            for other in _patches():
                if other.active and not own.isdisjoint(models(other.model)):
                    other.mark()
        for stack in stacks:
            stack.revert()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.revert()

    def __repr__(self) -> str:
        attention = [layer for patch in (self.stacks or (self,)) for layer in patch.attention]
        seams = sorted({layer.seam for layer in attention})
        return (
            f"<fa2patch.Patch of {type(self.model).__name__}: {len(attention)} {self.architecture.model_type} "
            f"attention layers on the {' and '.join(seams)} seam, kernel {self.kernel!r}, "
            f"{'applied' if self.active else 'reverted'}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        copied = Patch.__new__(Patch)
        memo[id(self)] = copied
        inside = [memo[id(model)] for model in models(self.model) if id(model) in memo]  # of the base model alone, too
        rehooked = [
            (memo[id(module)], name, copy.deepcopy(bound, memo))
            for module, name, bound in self.rehooked
            if id(module) in memo
        ]
        copied.__setstate__({**self.__dict__, "model": inside[0] if inside else self.model, "rehooked": rehooked})
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled patch binds its sites too, so that its model is patched.
        self.__dict__.update(state)
        self.examination = examining.begun(self, self.examination.prove, must=self.examination.must)
        self.bind()


def _check_calls(peft: ModuleType, patch: Patch) -> None:
    from . import peft_models  # only where PEFT is

    peft_models.check_calls(peft, patch)


def _mend_labels(trainer: ModuleType, patch: Patch) -> None:
    from . import trainer_labels  # only where Trainer is

    trainer_labels.mend_labels(trainer, patch)


def _balance_parts(engine: ModuleType, patch: Patch) -> None:
    from ..upstream.split import balance  # only where torch's context parallelism is

    balance.bind_to(engine, patch)


def _refuses_patched(original: Function) -> Function:
    # Tracing would fail in a patched forward with an error of torch.fx's own.

    @functools.wraps(original)
    def trace(self: Any, root: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(root, torch.nn.Module) and any(MARK in vars(module) for module in root.modules()):
            refuse_recording("torch.fx")
        return original(self, root, *args, **kwargs)

    return trace


def _patches() -> list[Patch]:
    return [user for user in users() if isinstance(user, Patch)]
