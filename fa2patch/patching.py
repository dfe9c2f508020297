"""``apply``, ``revert``, ``status``: a model's architecture -> seams -> bindings, all or nothing."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

import torch

from . import kernels
from .architectures import Architecture, lookup
from .binding import ABSENT, LOCK, bind, release, used_by
from .errors import LayerNotPatchable, NotAModel, UnsupportedModel, UnsupportedTransformers
from .seams import entry, function, interface, masks, method, rotary

OLDEST = (4, 34)
"""First Transformers with flash attention in modeling files (rule 1 apart: there is no seam to look for before it)."""

HOOKED = "_old_forward"
"""Where accelerate's hooks (``device_map``, offloading) keep the bound ``forward`` that they call."""


@dataclass(frozen=True)
class Site:
    """An attribute to replace, by name, so that a patch can be pickled and bound again in another process.

    Attributes:
        kind: which replacement, a key of ``_MAKERS``.
        module: the module's name.
        owner: the class's name in that module; empty where the module itself is the owner.
        attribute: the attribute's name.
    """

    kind: str
    module: str
    owner: str
    attribute: str

    def find(self) -> tuple[Any, ModuleType]:
        module = sys.modules.get(self.module) or importlib.import_module(self.module)
        return (functools.reduce(getattr, self.owner.split("."), module) if self.owner else module), module

    def bind(self, user: Any) -> None:
        owner, module = self.find()
        bind(owner, self.attribute, functools.partial(_MAKERS[self.kind], owner, module), user)


def _layer(owner: Any, module: ModuleType, original: Any) -> Callable[..., Any]:
    flash = method.flash_class(module, owner)
    assert flash is not None, f"{owner} had a flash class when it was planned"
    return method.on_flash_class(original, owner, flash)


_MAKERS: dict[str, Callable[[Any, ModuleType, Any], Any]] = {
    "causal_lm": lambda owner, module, original: entry.causal_lm(original),
    "base_model": lambda owner, module, original: entry.base_model(original),
    "mask": lambda owner, module, original: masks.let_through(original),
    "registry": lambda owner, module, original: interface.Overlay(original),
    "eager": lambda owner, module, original: interface.routed(original),
    "function": lambda owner, module, original: function.routed(original),
    "layer": _layer,
    "window_flag": lambda owner, module, original: True if original is ABSENT else original,
    "rotary": lambda owner, module, original: rotary.by_document(original),
}


@dataclass(frozen=True)
class _Layer:
    """An attention layer, what is replaced to reach it, and what else that needs."""

    name: str
    seam: str
    site: Site
    others: tuple[Site, ...]


@dataclass(frozen=True)
class PatchedLayer:
    """One attention layer of a patched model, as it was when ``Patch.layers`` was read.

    Attributes:
        name: the layer's name in the base model.
        seam: ``"interface"``, ``"function"`` or ``"method"``.
        owner: the class or module whose attribute is replaced.
        attribute: that attribute's name.
        state: ``"applied"``, ``"covered"`` (somebody has patched on top since) or ``"off"``.
    """

    name: str
    seam: str
    owner: Any
    attribute: str
    state: str


class Patch:
    """A patched model. Leaving it as a context manager reverts it.

    Attributes:
        model: the Transformers model inside what was handed to ``apply``.
        architecture: its row of the registry.
        kernel: the kernel's name that was asked for.
    """

    def __init__(
        self, model: Any, architecture: Architecture, kernel: str, attention: list[_Layer], sites: list[Site]
    ) -> None:
        self.model, self.architecture, self.kernel = model, architecture, kernel
        self.attention, self.sites = tuple(attention), tuple(sites)
        self.rotary = rotary.length_scaled(model.config)
        self.rehooked: list[tuple[Any, Any]] = []

    @property
    def adjust(self) -> Any:
        return self.architecture.adjust

    @property
    def active(self) -> bool:
        """Whether the model is patched (False after ``revert``)."""
        return self.model.__dict__.get(entry.MARK) is self

    @property
    def layers(self) -> tuple[PatchedLayer, ...]:
        """Every attention layer, with its state looked up now."""
        states = {(binding.owner, binding.attribute): binding.state for binding in used_by(self)}
        found = [(layer, layer.site.find()[0]) for layer in self.attention]
        return tuple(
            PatchedLayer(
                layer.name, layer.seam, owner, layer.site.attribute, states.get((owner, layer.site.attribute), "off")
            )
            for layer, owner in found
        )

    def revert(self) -> None:
        """Take the patch off this model. Reverting twice is a no-op."""
        with LOCK:
            for marked in _marked(self.model):
                marked.__dict__.pop(entry.MARK, None)
            for module, bound in self.rehooked:
                module.__dict__[HOOKED] = bound
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
        rehooked = [(memo[id(module)], copy.deepcopy(bound, memo)) for module, bound in self.rehooked]
        copied.__setstate__({**self.__dict__, "model": memo.get(id(self.model), self.model), "rehooked": rehooked})
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, or a model loaded in another process, is patched too: its bindings have one more user."""
        self.__dict__.update(state)
        for site in self.sites:
            site.bind(self)


def apply(model: Any, *, kernel: str = "auto", architecture: str | None = None) -> Patch:
    """Make a causal LM compute packed batches with every document on its own. In place, all or nothing.

    Args:
        model: a Transformers causal LM, or what PEFT, accelerate, DDP, FSDP, DeepSpeed, ``torch.compile`` made of one.
        kernel: ``"auto"`` or the name of a kernel (:data:`fa2patch.kernels.NAMES`).
        architecture: the registry row to use, where ``config.model_type`` does not name it.

    Returns:
        The model's :class:`Patch`; the same one if it is patched already.

    Raises:
        UnsupportedTransformers, NotAModel, UnknownArchitecture, UnsupportedModel, LayerNotPatchable, UnknownKernel,
        KernelUnavailable: nothing was changed.
    """
    _check_transformers()
    kernels.check_name(kernel)
    inner = transformers_model(model)
    current = status(inner)
    if current is not None:
        return current
    patch = _plan(inner, kernel, architecture)
    _check_own_forwards(patch)
    with LOCK:
        try:
            for site in patch.sites:
                site.bind(patch)
        except BaseException:
            release(patch)
            raise
        for marked in _marked(inner):
            marked.__dict__[entry.MARK] = patch
        for module in _with_replaced_forward(patch):
            if "forward" in module.__dict__ and _looks_up_hooked(module):
                patch.rehooked.append((module, module.__dict__[HOOKED]))
                module.__dict__[HOOKED] = types.MethodType(type(module).forward, module)
    return patch


def revert(model: Any) -> None:
    """Take the patch off a model; every namespace is as it was before ``apply``. A no-op on a model without one.

    Where somebody patched on top of us, theirs stays and ours beneath does nothing any more; it goes when theirs goes.
    """
    patch = status(model)
    if patch is not None:
        patch.revert()


def status(model: Any) -> Patch | None:
    """The model's :class:`Patch`, or None where it is not patched."""
    patch: Patch | None = transformers_model(model).__dict__.get(entry.MARK)
    return patch


def transformers_model(model: Any) -> Any:
    """The Transformers model inside the wrappers that training puts around it.

    Raises:
        NotAModel: there is none.
    """
    seen = model
    for _ in range(16):
        if _is_transformers_model(seen):
            return seen
        inside = [getattr(seen, name, None) for name in ("_orig_mod", "module", "pretrained_model", "model")]
        if hasattr(seen, "get_base_model"):  # PEFT
            inside.insert(0, seen.get_base_model())
        seen = next((inner for inner in inside if isinstance(inner, torch.nn.Module)), None)
    raise NotAModel(
        f"expected a Transformers model, or a wrapper (PEFT, accelerate, DDP, FSDP, torch.compile) around one; "
        f"found {type(model).__name__}. Hand over the model object itself."
    )


def _with_replaced_forward(patch: Patch) -> Iterator[Any]:
    """The modules of the model whose class's ``forward`` this patch replaces."""
    base = _base_of(patch.model)
    yield from _marked(patch.model)
    for layer in patch.attention:
        if layer.site.attribute == "forward":
            yield base.get_submodule(layer.name)


def _looks_up_hooked(module: Any) -> bool:
    """Whether the object's own ``forward`` is accelerate's and looks ``HOOKED`` up when called (0.23's does not)."""
    own = module.__dict__["forward"]
    code = getattr(getattr(own, "func", own), "__code__", None)
    return HOOKED in module.__dict__ and code is not None and HOOKED in code.co_names


def _check_own_forwards(patch: Patch) -> None:
    for module in _with_replaced_forward(patch):
        if module is not patch.model and "forward" in module.__dict__ and not _looks_up_hooked(module):
            raise LayerNotPatchable(
                f"the forward of this {type(module).__name__} was replaced on the object itself, by "
                f"{getattr(module.__dict__['forward'], '__module__', 'something')}, which has caught the unpatched "
                "one. Nothing was patched. Call fa2patch.apply(model) before whatever replaces it."
            )


def _is_transformers_model(model: Any) -> bool:
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.split(".")[0] == "transformers"
        for cls in type(model).__mro__
    )


def _check_transformers() -> None:
    try:
        version = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise UnsupportedTransformers(
            f"Transformers does not import ({error}). Install it: pip install 'transformers>=4.34'."
        ) from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise UnsupportedTransformers(
            f"expected Transformers {OLDEST[0]}.{OLDEST[1]} or newer, found {version}, which has no flash attention to "
            "patch. Upgrade it: pip install 'transformers>=4.34'."
        )


def _base_of(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model


def _marked(model: Any) -> list[Any]:
    base = _base_of(model)
    return [model] if base is model else [model, base]


def _defining(cls: type, attribute: str) -> type:
    return next(base for base in cls.__mro__ if attribute in vars(base))


def _plan(model: Any, kernel: str, architecture: str | None) -> Patch:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder: fa2patch packs decoder-only language models. "
            "Train it padded."
        )
    row = lookup(architecture or getattr(config, "model_type", None))
    if "SequenceClassification" in type(model).__name__:
        raise UnsupportedModel(
            f"{type(model).__name__} pools one vector per row, and a packed row holds many documents. Train it padded."
        )
    reason = row.refuse(config) if row.refuse is not None else None
    if reason:
        raise UnsupportedModel(f"{type(model).__name__} cannot be trained packed: {reason}.")

    base = _base_of(model)
    sites = [_class_site("base_model", base)]
    if base is not model:
        sites.append(_class_site("causal_lm", model))
    sites += [_site("mask", owner, name) for owner, name in masks.sites(type(base))]
    layers = list(_layers(base))
    expected = getattr(config, "num_hidden_layers", len(layers))
    if len(layers) != expected:
        found = ", ".join(layer.name for layer in layers) or "none"
        raise LayerNotPatchable(
            f"{type(base).__name__} has {expected} layers, but attention with a seam was found in {len(layers)} "
            f"({found}). Nothing was patched. Please report the model and the Transformers version."
        )
    sites += dict.fromkeys(site for layer in layers for site in (layer.site, *layer.others))
    scaled = rotary.length_scaled(config)
    if scaled is not None and scaled.kind == "longrope":
        sites += dict.fromkeys(
            _class_site("rotary", module) for name, module in base.named_children() if name in rotary.NAMES
        )
    return Patch(model, row, kernel, layers, sites)


def _layers(base: Any) -> Iterator[_Layer]:
    for name, module in base.named_modules():
        cls = type(module)
        if not re.search(r"Attention(2|Base)?$", cls.__name__) or "forward" not in dir(cls):
            continue
        owner = _defining(cls, "forward")
        home = sys.modules[owner.__module__]
        flash = method.flash_class(home, cls)
        if interface.is_seam(home, inspect.unwrap(vars(owner)["forward"])):
            others = [_site("eager", home, interface.EAGER)] if hasattr(home, interface.EAGER) else []
            yield _Layer(name, "interface", _site("registry", home, interface.REGISTRY), tuple(others))
        elif flash is not None:
            site, scope = _site("layer", owner, "forward"), sys.modules[_defining(flash, "forward").__module__]
            if method.is_method_seam(flash):
                yield _Layer(name, "method", site, (_site("window_flag", scope, method.WINDOW_FLAG),))
            else:
                yield _Layer(name, "function", site, (_site("function", scope, function.NAME),))


def _class_site(kind: str, module: Any) -> Site:
    return _site(kind, _defining(type(module), "forward"), "forward")


def _site(kind: str, owner: Any, attribute: str) -> Site:
    if isinstance(owner, ModuleType):
        return Site(kind, owner.__name__, "", attribute)
    site = Site(kind, owner.__module__, owner.__qualname__, attribute)
    try:
        found = site.find()[0]
    except (AttributeError, ImportError):
        found = None
    if found is not owner:
        raise LayerNotPatchable(
            f"{owner.__module__}.{owner.__qualname__} is not to be found under that name, so a copy of the model could "
            "not be patched too. Nothing was patched. Define the class at the top level of its module."
        )
    return site
