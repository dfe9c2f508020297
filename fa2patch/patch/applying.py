"""``apply``, ``revert`` and ``status``. ``apply`` replaces everything that a model needs, or nothing."""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from .. import entry_points, kernels
from .._types import Function, Model
from ..binding import changing, used_by
from ..errors import BadArgument, LayerNotPatchable, UnsupportedNumPy, UnsupportedTransformers
from ..upstream import other_code
from ..upstream.find_layers import ModelLayers
from ..upstream.find_models import stacks_of, takes_no_token_ids, transformers_model, walked_once
from ..upstream.step import MARK, Budgeted
from . import padding
from .model_plan import plan_model, plan_pairs
from .state import Patch

OLDEST = (4, 34)  # the first minor of Transformers with flash attention in its modeling files


def apply(
    model: object,
    *,
    kernel: str | kernels.Kernel | None = None,
    architecture: str | None = None,
    prove: bool | str | None = None,
    padded_batches: bool | None = None,
    max_tokens: int | None = None,
    too_long: str = "error",
) -> Patch:
    """Patch a model in place, so that it computes each document of a packed batch by itself.

    Example::

        model = transformers.AutoModelForCausalLM.from_pretrained(...)
        fa2patch.apply(model)
        trainer = transformers.Trainer(model, args, train_dataset=dataset,
                                       data_collator=fa2patch.DataCollatorWithFlattening())

    If the model is patched already, its patch is renewed and returned: modules that are new are patched too, and the
    arguments that are given replace those of the first call. ``apply(model, kernel="reference")`` switches to that
    kernel. An argument that is left out keeps its value. After an error, the model is as it was before the call.

    Args:
        model: a Transformers model, a wrapper of PEFT, accelerate, DDP, FSDP, DeepSpeed or ``torch.compile`` around
            one, or an object that holds one, such as a model of sentence-transformers.
        kernel: what computes attention on packed rows.

            - ``"auto"`` (for a new patch): for each layer the first of ``"flash_attn_3"``, ``"flash_attn"``,
              ``"flash_attn_4"``, ``"torch_varlen"``, ``"efficient"``, ``"flex"`` and ``"reference"`` that can compute
              it on this machine; on an Ascend NPU ``"ascend"``, with ROCm ``"aiter"`` before ``"torch_varlen"``.
            - One of these names: that kernel, or an error. ``fa2patch kernels`` shows which ones can run here.
            - ``"hub:org/name"``: a build of the Hugging Face kernels hub, which is downloaded. ``"hub"`` takes the
              default one.
            - The name of a registered kernel, or an instance of a subclass of :class:`fa2patch.kernels.Kernel`.
        architecture: the ``model_type`` of the registry row to use instead of that of ``config.model_type``.
        prove: whether packed batches are also run with other tokens in some documents, to prove that no module lets
            documents see each other: the first in each mode, those that are larger than all before, and batches 2, 4,
            8, .... ``"unknown"`` (for a new patch) does so if the model holds code that is neither torch's nor
            Transformers' own (remote code, a subclass, a wrapper around a layer, a hook that changes something), or if
            the matrix has no evidence of it.
        padded_batches: whether padded batches are computed packed too. The layers then compute no padding, and the head
            gets hidden states ``[batch, length, hidden]`` with zeros for padding. A head that makes one vector for each
            row (``BertForSequenceClassification``) can be used only so. If the head reads hidden states of padding, the
            batch stays padded. For a new patch, it is True if ``model`` holds a tokenizer, as the models of
            sentence-transformers do, because these make padded batches themselves. Each stack of an encoder-decoder
            computes its own rows so; without a ``decoder_attention_mask``, targets end with their last label.
        max_tokens: a budget of tokens. A packed batch with more tokens, or a padded one that is computed packed, is
            computed in as few passes of whole documents as fit, each a checkpoint: between forward and backward only
            its inputs and hidden states are kept, and the backward computes it once more. Whatever is around the base
            model, a head, a loss, a trainer, sees the whole batch, so that every loss is that of the whole batch. The
            encoder and the decoder of an encoder-decoder each have passes of their own. A batch that cannot be cut is
            computed at once, with a warning (``OverBudget``).
        too_long: what to do with a document that is longer than ``max_tokens``: ``"error"``, or ``"alone"`` to give it
            a pass of its own.

    Returns:
        The model's :class:`Patch`.

    Raises:
        UnsupportedTransformers: Transformers is older than 4.34, or does not import.
        UnsupportedNumPy: torch cannot exchange arrays with the installed NumPy.
        NotAModel: ``model`` holds no Transformers model, several, or one that takes no token ids.
        UnsupportedModel, LayerNotPatchable: the model cannot be trained packed.
        UnknownArchitecture: the registry has no row of this name.
        UnknownKernel, KernelUnavailable: there is no such kernel, or it cannot run on this machine.
        BadArgument: ``prove`` or ``padded_batches`` is none of its values.
        PackingError: ``max_tokens`` or ``too_long`` is none of its values.
    """
    _check_transformers()
    _check_numpy()
    entry_points.load()
    if kernel is not None:
        kernels.check_name(kernel)
    if not (prove is None or isinstance(prove, bool) or prove == "unknown"):
        raise BadArgument(f"prove={prove!r}: expected True, False or 'unknown'.")
    if not (padded_batches is None or isinstance(padded_batches, bool)):
        raise BadArgument(f"padded_batches={padded_batches!r}: expected True or False.")
    budget = None if max_tokens is None else budget_of(max_tokens, too_long)
    with changing(waits=True), walked_once():
        inner = transformers_model(model)
        patch = _applied(model, inner, kernel, architecture, prove, padded_batches)
    if budget is not None:
        patch.limit(budget)
    return patch


def budget_of(max_tokens: int, too_long: str, shapes: Any = None) -> Budgeted:  # shapes: a RowShape
    from ..upstream import passes  # and with it the packing, which few models need

    return passes.Budget(max_tokens, too_long, *([] if shapes is None else [shapes]))


def _applied(
    model: object,
    inner: Model,
    kernel: str | kernels.Kernel | None,
    architecture: str | None,
    prove: bool | str | None,
    padded_batches: bool | None,
) -> Patch:
    patch = status(inner)
    if padded_batches is None and patch is not None:
        padded_batches = patch.padded_batches
    padded = padding.wanted(model, inner, padded_batches)
    if patch is not None:
        patch.renew(kernel, architecture, prove, padded)
    else:
        stacks, told = stacks_of(inner), "unknown" if prove is None else prove
        if stacks is None:
            patch = _new(ModelLayers(inner, architecture), kernel, architecture, told, padded)
        else:
            patch = _new_for_pairs(ModelLayers(inner, architecture), stacks, kernel, architecture, told)
    padding.switch(inner, padded)
    patch.padded_batches = padded_batches
    if padded:
        for each in (patch, *patch.stacks):
            each.unpacked = None  # batches without padding say nothing of documents, and need not
    return patch


def _new(
    layers: ModelLayers,
    kernel: str | kernels.Kernel | None,
    architecture: str | None,
    prove: bool | str,
    padded: bool,
) -> Patch:
    patch = Patch(layers, plan_model(layers, padded), kernel or "auto", architecture, prove)
    replaced = (layer.module for layer in layers.layers if layer.site.attribute == "forward")
    _install(patch, [*layers.entered, *replaced])
    return patch


def _new_for_pairs(
    layers: ModelLayers,
    stacks: Sequence[Any],
    kernel: str | kernels.Kernel | None,
    architecture: str | None,
    prove: bool | str,
) -> Patch:
    # An encoder-decoder has three patches: of each stack, and of what is around them.
    planned = plan_pairs(layers)
    made: list[Patch] = []
    try:
        for stack in stacks:
            if not takes_no_token_ids(stack):  # an encoder of pictures or sounds stays as it is
                known = status(stack)
                of_stack = _applied(stack, stack, kernel, None, False, None)
                made += [of_stack] if known is None else []
        patch = Patch(layers, planned, kernel or "auto", architecture, prove)
        _install(patch, layers.entered)
    except BaseException:
        for of_stack in made:
            of_stack.revert()
        raise
    return patch


def _install(patch: Patch, replaced: Sequence[Any]) -> None:
    # Either every site of the patch is bound and its models are marked, or everything stays as it was. `replaced` are
    # the modules whose class's `forward` is replaced.
    for module in replaced:
        own = "forward" in module.__dict__ and module is not patch.model
        if own and not _held_under(module, type(module).forward):
            raise LayerNotPatchable(
                f"the forward of this {type(module).__name__} was replaced on the object itself, by "
                f"{getattr(module.__dict__['forward'], '__module__', 'something')}, which has caught the unpatched "
                "one. Nothing was patched. Call fa2patch.apply(model) before whatever replaces it."
            )
    originals = {module: type(module).forward for module in replaced}
    try:
        patch.bind()
        patch.mark()
        for module, original in originals.items():
            for name in _held_under(module, original):
                patch.rehooked.append((module, name, module.__dict__[name]))
                module.__dict__[name] = types.MethodType(type(module).forward, module)
    except BaseException:
        patch.revert()
        raise


def revert(model: object) -> None:
    """Remove the patch from a model. This is a no-op if the model is not patched.

    Attributes that no other patched model uses get their original values back. If other code has replaced such an
    attribute since, its replacement stays. The one of fa2patch below it then does nothing, and is removed when the
    other one is gone.

    Raises:
        NotAModel: there is no Transformers model in ``model``.
    """
    patch = status(model)
    if patch is not None:
        patch.revert()


def status(model: object) -> Patch | None:
    """The model's :class:`Patch`, or None if it is not patched.

    Raises:
        NotAModel: there is no Transformers model in ``model``.
    """
    patch: Patch | None = transformers_model(model).__dict__.get(MARK)
    return patch if patch is not None and used_by(patch) else None  # copy.copy(model) keeps the mark of a reverted one


def _held_under(module: torch.nn.Module, original: Function) -> list[str]:
    # The list names the instance attribute that holds the class's bound `forward`: "_old_forward" if accelerate has set
    # a `forward` that looks this name up when called (0.23 does not), or "forward" if that is the class's own
    # (Transformers 5.0 and 5.1 leave it there after output_attentions).
    own = module.__dict__.get("forward")
    if other_code.HOOKED in module.__dict__ and other_code.looks_up_hooked(own):
        return [other_code.HOOKED]
    return ["forward"] if own is not None and getattr(own, "__func__", None) is original else []


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


def _check_numpy() -> None:
    # torch only warns that it cannot use the installed NumPy, and the first packed batch would fail.
    try:
        torch.from_numpy(numpy.empty(0))
    except RuntimeError as error:
        raise UnsupportedNumPy(
            f"torch {torch.__version__} cannot exchange arrays with NumPy {numpy.__version__} ({error}). torch before "
            "2.3 is built for NumPy 1: pip install 'numpy<2', or a newer torch."
        ) from error
