"""``apply``, ``revert``, ``status``: a model's architecture -> seams -> bindings, all or nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import re
import types
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

import torch

from .. import kernels
from .._compile import compiling, constant, paused
from ..binding import ABSENT, LOCK, bind, release, used_by
from ..errors import (
    BadArgument,
    Fa2PatchError,
    LayerNotPatchable,
    NotAModel,
    NothingProven,
    PackingNotIsolated,
    UnsupportedModel,
    UnsupportedTransformers,
)
from ..probing import proving
from ..upstream import foreign, hooks, layers, rope
from ..upstream import forward as entry
from ..upstream.seams import function, interface, method
from ..upstream.traits import embeddings, heads, masks, pooling, refusals, rotary
from ..upstream.traits.mixing import by_document
from . import peft_models  # fmt: skip
from .architectures import Architecture, is_registered, lookup, row_of

OLDEST = (4, 34)
"""First Transformers with flash attention in modeling files (rule 1 apart: there is no seam to look for before it)."""


@dataclass(frozen=True)
class Site:
    """An attribute to replace. Pickled by name, so that a patch can be bound again in another process.

    Attributes:
        kind: which replacement, a key of ``_MAKERS``.
        owner: a class or a module: the object, as remote code may have another one of that name by now.
        attribute: the attribute's name.
    """

    kind: str
    owner: Any
    attribute: str

    def find(self) -> tuple[Any, ModuleType]:
        if isinstance(self.owner, ModuleType):
            return self.owner, self.owner
        return self.owner, importlib.import_module(self.owner.__module__)

    def bind(self, user: Any) -> None:
        owner, module = self.find()
        bind(owner, self.attribute, functools.partial(_MAKERS[self.kind], owner, module), user)

    def __reduce__(self) -> Any:
        if isinstance(self.owner, ModuleType):
            return _site_of_module, (self.kind, self.owner.__name__, self.attribute)
        return Site, (self.kind, self.owner, self.attribute)


def _site_of_module(kind: str, module: str, attribute: str) -> Site:
    return Site(kind, importlib.import_module(module), attribute)


def _layer(owner: Any, module: ModuleType, original: Any) -> Callable[..., Any]:
    flash = method.flash_class(module, owner)
    assert flash is not None, f"{owner} had a flash class when it was planned"
    return method.on_flash_class(original, owner, flash)


_MAKERS: dict[str, Callable[[Any, ModuleType, Any], Any]] = {
    "causal_lm": lambda owner, module, original: entry.entered(original),
    "base_model": lambda owner, module, original: entry.entered(original),
    "mask": lambda owner, module, original: masks.let_through(original),
    "positions": lambda owner, module, original: masks.counted_by_position_ids(original),
    "registry": lambda owner, module, original: interface.Overlay(original),
    "eager": lambda owner, module, original: interface.routed(original),
    "table": lambda owner, module, original: function.routed_table(original),
    "function": lambda owner, module, original: function.routed(original),
    "layer": _layer,
    "window_flag": lambda owner, module, original: True if original is ABSENT else original,
    "rotary": lambda owner, module, original: rotary.by_document(original),
    "embeddings": lambda owner, module, original: embeddings.by_document(original),
    "mixer": lambda owner, module, original: by_document(original),
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
        kernel: what computed its last packed batch; None where it has seen none, or was compiled.
        why: why the kernels that are better were passed over, where ``kernel="auto"``.
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
        architecture: its row of the registry.
        kernel: the kernel's name that was asked for.
        picks: the kernels that were picked.
        makes_masks: whether the causal LM makes masks itself, for the models inside it (Gemma 3 up to 4.52).
        unpacked: how many training batches have come that said nothing of documents; None once one did, or it was said.
        vouched: whether a packed batch has gone through every attention layer, each one looked at.
        carrier: the argument of the models' forwards in whose place the boundaries travel.
        stops_ids: whether position_ids go no further than to the causal LM (Mamba, RWKV, OPT up to 4.45).
        first_position: the position of a document's first token, where a batch has boundaries but no position_ids.
        documents_ride: whether position_ids carry the documents to the model's rotary module or embeddings (ESM).
        mixes: whether a layer carries state along the row outside attention.
        sees_both_ways: whether tokens see those behind them too.
        roles: what the models are that a call goes through, the outermost first.
        prove: whether the first packed batch is proven, as ``apply`` was told.
        unproven: whether a packed batch has still to be.
        structure: what :func:`proving.structure` said of the model when it was last looked at.
        needs_cache: whether later layers read earlier ones' keys and values from a cache (Gemma 3n).
    """

    def __init__(
        self,
        model: Any,
        architecture: Architecture,
        kernel: str,
        attention: list[_Layer],
        sites: list[Site],
        carrier: str = masks.MASK,
        sees_both_ways: bool = False,
        prove: bool | str = "unknown",
    ) -> None:
        self.prove = prove
        self.named: str | None = None
        self.picks = kernels.Picks(kernel)
        self.rehooked: list[tuple[Any, str, Any]] = []
        self.unpacked: int | None = 0
        self.number = next(_numbers)
        _by_number[self.number] = self
        self.model, self.architecture, self.kernel = model, architecture, kernel
        self.attention, self.sites, self.carrier = tuple(attention), tuple(sites), carrier
        *outer, decoder = layers.models(model)
        upstream = inspect.unwrap(decoder.forward)  # ours takes position_ids, whatever it stands for
        self.stops_ids = "position_ids" not in inspect.signature(upstream).parameters
        self.makes_masks = bool(outer) and any(
            site.kind == "mask" and isinstance(site.owner, type) and isinstance(model, site.owner) for site in sites
        )
        self.first_position = embeddings.first_position(decoder)
        self.documents_ride = any(site.kind in ("embeddings", "rotary") for site in sites)
        self.mixes = any(layer.seam == "mixer" for layer in attention)
        self.sees_both_ways = sees_both_ways
        self.roles = tuple(
            entry.Role(
                outermost=entered is model,
                innermost=entered is decoder,
                predicts_the_next=heads.predicts_the_next(entered, self.sees_both_ways),
                pools=entered is not decoder and pooling.pools_documents(entered),
            )
            for entered in [*outer, decoder]
        )
        self.rotary = rope.length_scaled(decoder.config)
        self.needs_cache = bool(getattr(decoder.config, "num_kv_shared_layers", 0))
        self.vouched = False
        self.structure = proving.structure(model)
        self.unproven = self._has_to_be_proven()
        self._examining = False

    def _has_to_be_proven(self) -> bool:
        return self.prove is True or (self.prove == "unknown" and bool(proving.unknown(self.model)))

    def examine(self, module: Any, call: dict[str, Any], mask: Any) -> None:
        """Before a packed batch is computed: layers that have come or gone are noticed, what is not known is proven.

        Args:
            module: the model that the batch came to.
            call: its arguments.
            mask: the batch's documents.

        Raises:
            PackingNotIsolated: documents see each other in a module that is not known.
            LayerNotPatchable, UnsupportedModel: the model has other layers now, and they cannot be patched.
        """
        if compiling():
            found = _examined(self.number)
            if found:
                raise PackingNotIsolated(found)
            return
        if self._examining or getattr(module, "_is_replica", False) or not self.active:
            return
        structure = proving.structure(self.model)
        if structure != self.structure:
            self.renew()
        if not self.unproven or sum(length > 0 for length in mask.boundaries.lengths) < 2:
            return
        if proving.is_sharded(self.model) and self.prove is not True:
            self.unproven = False
            warnings.warn(
                f"{type(self.model).__name__} holds a module that fa2patch does not know, "
                f"{proving.unknown(self.model)}, and is sharded, so that one rank cannot prove it by itself. Call "
                "fa2patch.verify(model, batch=batch) on every rank, or fa2patch.apply(model, prove=False).",
                NothingProven,
                stacklevel=2,
            )
            return
        self._proven(module, call, mask)

    def _proven(self, module: Any, call: dict[str, Any], mask: Any) -> None:
        with self.unexamined():
            proving.prove(module, call, mask)
        self.unproven = False

    @contextlib.contextmanager
    def unexamined(self) -> Iterator[None]:
        """While somebody looks at the model with runs of their own: packed batches of these are not proven first."""
        before, self._examining = self._examining, True
        try:
            yield
        finally:
            self._examining = before

    def renew(self) -> None:
        """Look at a model again that has changed since ``apply``. What is new is bound, what covers ours is bound over.

        Raises:
            UnsupportedModel, LayerNotPatchable: what has come cannot be patched.
        """
        fresh = plan(self.model, self.kernel, self.named, self.prove)
        with LOCK:
            for site in fresh.sites:
                site.bind(self)
        for name in ("attention", "sites", "carrier", "roles", "structure", "unproven", "vouched", "mixes"):
            setattr(self, name, getattr(fresh, name))
        _mark(self)

    @property
    def active(self) -> bool:
        """Whether the model is patched (False after ``revert``)."""
        return self.model.__dict__.get(entry.MARK) is self

    @property
    def layers(self) -> tuple[PatchedLayer, ...]:
        """Every attention layer, with its state looked up now."""
        states = {(binding.owner, binding.attribute): binding.state for binding in used_by(self)}
        decoder = layers.models(self.model)[-1]

        def found(layer: _Layer) -> PatchedLayer:
            (owner, _), attribute = layer.site.find(), layer.site.attribute
            picked = self.picks.of(decoder.get_submodule(layer.name))
            kernel, why = (picked.kernel.name, picked.why) if picked else (None, "")
            state = states.get((owner, attribute), "off")
            return PatchedLayer(layer.name, layer.seam, owner, attribute, state, kernel, why)

        return tuple(found(layer) for layer in self.attention)

    def revert(self) -> None:
        """Take the patch off this model. Reverting twice is a no-op."""
        with LOCK:
            for module in self.model.modules():
                if module.__dict__.get(entry.MARK) is self:
                    del module.__dict__[entry.MARK], module.__dict__[entry.ROLE]
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
        self.number = next(_numbers)
        _by_number[self.number] = self
        self.structure, self._examining = 0, False  # a copy has other modules, looked at when they are all there
        for site in self.sites:
            site.bind(self)
        peft_models.watch(self)


_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Patch] = weakref.WeakValueDictionary()


@constant
def _examined(number: int) -> str:
    """What ``Patch.examine`` finds wrong while a graph is captured, or nothing.

    An example stands in the place of the batch, whose values are not there yet.
    """
    patch = _by_number[number]
    if patch._examining:
        return ""
    with paused():
        try:
            if proving.structure(patch.model) != patch.structure:
                patch.renew()
            if patch.unproven:
                patch._proven(patch.model, *proving.example_of(patch.model, patch))
        except Fa2PatchError as error:
            return str(error)
    return ""


def _mark(patch: Patch) -> None:
    """Put our marks and hooks on the models that a call goes through, and our forward over one of the object's own."""
    for entered, role in zip(layers.models(patch.model), patch.roles):
        entered.__dict__.update({entry.MARK: patch, entry.ROLE: role})
        hooks.register(entered)
    if foreign.replaced_on(patch.model):
        patch.rehooked.append((patch.model, "forward", patch.model.__dict__["forward"]))
        patch.model.__dict__["forward"] = foreign.entered_first(patch.model, entry.entered)


def apply(model: Any, *, kernel: str = "auto", architecture: str | None = None, prove: bool | str = "unknown") -> Patch:
    """Make a causal LM compute packed batches with every document on its own. In place, all or nothing.

    Args:
        model: a Transformers causal LM, or what PEFT, accelerate, DDP, FSDP, DeepSpeed, ``torch.compile`` made of one.
        kernel: ``"auto"`` or the name of a kernel (:data:`fa2patch.kernels.NAMES`).
        architecture: the registry row to use, where ``config.model_type`` does not name it.
        prove: whether the first packed batch is also run with other tokens in every second document, to see that no
            module lets documents see each other. ``"unknown"``: if the model holds a module that is neither torch's
            nor Transformers' own (remote code, a subclass, something wrapped around a layer).

    Returns:
        The model's :class:`Patch`; the same one if it is patched already, which then takes in what has come since.

    Raises:
        UnsupportedTransformers, NotAModel, UnknownArchitecture, UnsupportedModel, LayerNotPatchable, UnknownKernel,
        KernelUnavailable, BadArgument: nothing was changed.
    """
    _check_transformers()
    kernels.check_name(kernel)
    if not (isinstance(prove, bool) or prove == "unknown"):
        raise BadArgument(f"prove={prove!r}: expected True, False or 'unknown'.")
    inner = transformers_model(model)
    current = status(inner)
    if current is not None:
        current.renew()
        return current
    patch = plan(inner, kernel, architecture, prove)
    _check_own_forwards(patch)
    originals = {module: type(module).forward for module in _with_replaced_forward(patch)}
    with LOCK:
        try:
            for site in patch.sites:
                site.bind(patch)
            peft_models.watch(patch)
        except BaseException:
            release(patch)
            raise
        _mark(patch)
        for module in _with_replaced_forward(patch):
            for name in _held_under(module, originals.get(module)):
                patch.rehooked.append((module, name, module.__dict__[name]))
                module.__dict__[name] = types.MethodType(type(module).forward, module)
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
        if layers.is_transformers_model(seen):
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
    entered = layers.models(patch.model)
    yield from entered
    for layer in patch.attention:
        if layer.site.attribute == "forward":
            yield entered[-1].get_submodule(layer.name)


def _held_under(module: Any, original: Any) -> list[str]:
    """Under which name an object that has a ``forward`` of its own holds its class's, bound, to be called.

    ``_old_forward`` where it is accelerate's, which looks it up when called (0.23's does not); ``forward`` where it is
    the class's itself (5.0 and 5.1 leave it there after ``output_attentions``).
    """
    own = module.__dict__.get("forward")
    code = getattr(getattr(own, "func", own), "__code__", None)
    if foreign.HOOKED in module.__dict__ and code is not None and foreign.HOOKED in code.co_names:
        return [foreign.HOOKED]
    return ["forward"] if own is not None and getattr(own, "__func__", None) is original else []


def _check_own_forwards(patch: Patch) -> None:
    for module in _with_replaced_forward(patch):
        own = "forward" in module.__dict__ and module is not patch.model
        if own and not _held_under(module, type(module).forward):
            raise LayerNotPatchable(
                f"the forward of this {type(module).__name__} was replaced on the object itself, by "
                f"{getattr(module.__dict__['forward'], '__module__', 'something')}, which has caught the unpatched "
                "one. Nothing was patched. Call fa2patch.apply(model) before whatever replaces it."
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


def plan(model: Any, kernel: str = "auto", architecture: str | None = None, prove: bool | str = "unknown") -> Patch:
    """What ``apply`` would do to a Transformers model, not done: its :class:`Patch`, without effect.

    Raises:
        UnknownArchitecture, UnsupportedModel, LayerNotPatchable.
    """
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{type(model).__name__} is an encoder-decoder: fa2patch packs decoder-only language models. "
            "Train it padded."
        )
    *outer, decoder = layers.models(model)
    row = lookup(architecture) if architecture is not None else row_of(decoder.config)
    if embeddings.pools_rows(model, decoder):
        raise UnsupportedModel(
            f"{type(model).__name__} reads one vector per row, made of its first token by "
            f"{type(decoder.pooler).__name__}, and a packed row holds many documents. Train it padded, or without that "
            "head."
        )
    refusals.check_model(model, [*outer, decoder])
    for refuse, of in ((row.refuse, decoder.config), (row_of(config).refuse, config)):
        reason = refuse(of) if refuse is not None else None
        if reason:
            raise UnsupportedModel(f"{type(model).__name__} cannot be trained packed: {reason}.")

    attention = list(layers.attention_layers(decoder))
    mixing = list(layers.mixer_layers(decoder, attention))
    _check_layers(decoder, attention, mixing)
    refusals.check_attention([*outer, decoder], attention)
    counts = embeddings.unreachable_positions(decoder) if not masks.position_embeddings(decoder) else ""
    if counts:
        raise UnsupportedModel(
            f"{type(decoder).__name__}.forward reads no position_ids in this version of Transformers, and positions "
            f"are embedded in {counts}: they would count on from one document into the next. Nothing was patched. "
            "Upgrade Transformers (DistilBERT takes them from 5.0 on), or train this model padded."
        )
    if any(layer.fused for layer in attention) and model.config._attn_implementation == "flash_attention_2":
        raise UnsupportedModel(
            f"{type(decoder).__name__} with flash_attention_2 takes padding out on its own in this version of "
            "Transformers, and nothing that it is handed says where documents start. Nothing was patched. Load it with "
            'attn_implementation="sdpa": fa2patch has its packed rows computed by flash attention all the same.'
        )
    if attention and not (
        architecture is not None or is_registered(decoder.config) or layers.claims_flash_attention(model, attention)
    ):
        raise UnsupportedModel(
            f"{type(model).__name__} does not claim flash attention (_supports_flash_attn): its attention may look at "
            "more than boundaries can say. Nothing was patched. If it is ordinary attention, say so: "
            f"fa2patch.register(fa2patch.Architecture({decoder.config.model_type!r}))."
        )
    sites = [_class_site("base_model", inner) for inner in [*outer[1:], decoder]]
    if outer:
        sites.append(_class_site("causal_lm", model))
    sites += dict.fromkeys(
        Site("mask", owner, name) for inner in [*outer, decoder] for owner, name in masks.sites(type(inner))
    )
    sites += [_class_site("positions", module) for module in masks.position_embeddings(decoder)]
    sites += dict.fromkeys(_class_site("embeddings", module) for module in embeddings.scaled_by_row(decoder))
    planned = [
        _Layer(layer.name, layer.seam, Site(*layer.replaced), tuple(Site(*other) for other in layer.others))
        for layer in [*attention, *mixing]
    ]
    sites += dict.fromkeys(site for layer in planned for site in (layer.site, *layer.others))
    scaled = rope.length_scaled(decoder.config)
    if scaled is not None and scaled.kind == "longrope":
        sites += dict.fromkeys(
            _class_site("rotary", module) for name, module in decoder.named_children() if name in rotary.NAMES
        )
    carrier = masks.MASK if attention else layers.carrier(decoder, mixing)
    both_ways = layers.see_both_ways(layer for layer in attention if layer.seam != "mixer")
    patch = Patch(model, row, kernel, planned, list(dict.fromkeys(sites)), carrier, both_ways, prove)
    patch.named = architecture
    return patch


def _check_layers(decoder: Any, attention: list[layers.Attention], mixing: list[layers.Attention]) -> None:
    covered = tuple(f"{layer.name}." for layer in mixing)
    mixers = {name: found for name, found in layers.mixers(decoder).items() if not f"{name}.".startswith(covered)}
    if mixers:
        (name, found), *others = mixers.items()
        raise UnsupportedModel(
            f"{type(decoder).__name__} carries state along the row outside attention, in {found} at {name}"
            f"{f' and {len(others)} more places' if others else ''}. Nothing that it is handed could tell it where "
            "documents start, so they would leak there. Nothing was patched. Train this model padded."
        )
    attention = [*attention, *mixing]
    without = layers.blocks_without(decoder, attention)
    if not attention or without:
        found = ", ".join(f"{name} ({cls})" for name, cls in list(without.items())[:4]) or "no layer at all"
        raise LayerNotPatchable(
            f"{type(decoder).__name__}: looked in every layer for attention with a seam (a module-level "
            f"{interface.REGISTRY}, or a ...FlashAttention2 class) and found {len(attention)} such layers; without "
            f"one: {found}. Nothing was patched. Train this model padded, and please report it with the Transformers "
            "version."
        )


def _class_site(kind: str, module: Any) -> Site:
    return Site(kind, layers.defining(type(module), "forward"), "forward")
