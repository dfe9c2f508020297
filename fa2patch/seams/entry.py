"""The model's ``forward``: where a packed batch is recognised.

Two functions of a model are replaced, on the classes that define them, and do nothing for an instance that carries no
mark of ours. The causal LM's accepts the collator's lengths on every version; the base model's (``model.model``, the
one that loops over the layers, which also PEFT, TRL and accelerate end up calling) turns a packed batch's mask into a
:class:`PackedMask`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Iterator
from typing import Any, Callable

import torch

from .._compile import compiling
from ..boundaries import (
    Boundaries,
    check_cu_seqlens,
    check_position_ids,
    from_cu_seqlens,
    largest,
    positions_of,
    recognise,
)
from ..errors import BadBatch, BadCuSeqlens, PackedWithCache, PackedWithDenseMask, PackingNotIsolated
from . import pooling
from .layers import models
from .packed_mask import PackedMask, find
from .rotary import tagged

MARK = "_fa2patch"
"""Name of the instance attribute that says: this model is patched. It holds the model's ``Patch``."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords of Transformers' DataCollatorWithFlattening (return_flash_attn_kwargs, return_seq_idx)."""

LABELS = ("labels", "shift_labels")
"""Arguments that hold the tokens to predict; in ``shift_labels`` each stands where it is predicted."""

IGNORED = -100

_CARRIED = "_fa2patch_lengths"
_FOUND = "_fa2patch_mask"
_PREDICTS_THE_NEXT = re.compile("CausalLM|LMHead|ConditionalGeneration")


class _Reached(threading.local):
    """What this thread has come through: tripwires, nothing is carried by them.

    Attributes:
        times: how often a base model's patched forward.
        inside: patches of the models around this point that have looked at a batch and found it not packed, each with
            that batch's position_ids and mask.
    """

    times = 0

    def __init__(self) -> None:
        self.inside: list[Any] = []


_reached = _Reached()


def causal_lm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a causal LM's ``forward``: takes the collator's lengths, also where the original does not."""
    calls = _Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None:
            return original(self, *args, **kwargs)
        call = calls.named(args, kwargs)
        if pooling.ridden(call) is not None:  # through super(), from a class of which another model is patched
            return original(self, *args, **kwargs)
        lengths = _lengths(call)
        if lengths and not (calls.takes_any and compiling()):
            shape, device = batch_shape(call)
            call["position_ids"] = _with_lengths(call.get("position_ids"), lengths, shape, device)
        pools = pooling.pools_documents(self)
        # the **kwargs of Falcon's and Phi's token classifiers hand position_ids to nobody
        swallows = "position_ids" not in calls.names and not _predicts_the_next(self)
        looks_itself = patch.makes_masks or pools or swallows or not calls.takes("position_ids")
        labelled = [name for name in LABELS if call.get(name) is not None and _predicts_the_next(self)]
        looked = looks_itself or (labelled and not compiling())
        mask = packed_mask(call, patch) if looked else None
        cu = mask.boundaries.cu_seqlens if mask is not None else call.get("cu_seq_lens_q") if compiling() else None
        if labelled and cu is not None:
            shape, _ = batch_shape(call)
            call.update({name: _inside_documents(call[name], cu, name, shape) for name in labelled})
        if mask is not None and looks_itself:
            if not calls.takes("position_ids"):
                del call["position_ids"]
            if pools:
                call, ride = pooling.by_document(self, call, mask)
                output = _packed(calls, self, args, call, mask)
                pooling.require_arrived(self, ride)
                return output
            return _packed(calls, self, args, call, mask)
        if mask is not None:
            call["position_ids"] = _with_mask(call["position_ids"], mask)
        if compiling():
            return calls.make(self, args, call)
        before = _reached.times
        with _looked(patch if looked and mask is None else None, call):
            output = calls.make(self, args, call)
        if _reached.times == before and _runs_eagerly(self):
            raise PackingNotIsolated(
                "a batch did not come through the base model's patched forward: somebody has replaced it after "
                "fa2patch.apply. See fa2patch.status(model); apply fa2patch last."
            )
        return output

    if not calls.takes("position_ids"):  # OPT up to 4.45; Trainer drops columns that are not in the signature
        signature = inspect.signature(original)
        extra = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)
        extended = signature.replace(parameters=[*signature.parameters.values(), extra])
        setattr(forward, "__signature__", extended)  # noqa: B010 (mypy does not know the attribute)
    return forward


def _runs_eagerly(model: Any) -> bool:
    """Whether the base model's forward runs as Python: compiled on its own it passes no count on."""
    own = ("forward", "_orig_mod", "_compiled_call_impl")
    inner = models(model)[1:]
    return not any(vars(base).get(name) or base._modules.get(name) for base in inner for name in own)


def base_model(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement for a base model's ``forward``: a packed batch gets a :class:`PackedMask`; others go as they came."""
    calls = _Calls(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch = self.__dict__.get(MARK)
        if patch is None:
            return original(self, *args, **kwargs)
        if not compiling():
            _reached.times += 1
        call = calls.named(args, kwargs)
        ride = pooling.ridden(call)
        if ride is not None:
            return ride.pooled(forward(self, **{**call, **ride.whole}))
        if not compiling():
            _refuse_split_rows(self)
        given = call.get("attention_mask")
        around = [] if compiling() else [(ids, mask) for looked, ids, mask in _reached.inside if looked is patch]
        made_by_a_model = _is_dense(given) and (compiling() or around)
        if any(ids is call.get("position_ids") and mask is given for ids, mask in around):
            return calls.make(self, args, call)
        found_before = find(given.values() if isinstance(given, dict) else [given])
        if found_before is not None and call.get("position_ids") is None and "position_ids" in calls.names:
            call["position_ids"] = found_before.position_ids
            return calls.make(self, args, call)
        if found_before is not None or made_by_a_model:
            return original(self, *args, **kwargs)
        mask = packed_mask(call, patch)
        if mask is not None:
            return _packed(calls, self, args, call, mask)
        with _looked(patch, call):
            return calls.make(self, args, call)

    return forward


def _predicts_the_next(model: Any) -> bool:
    """Whether a token's label is what the token before it predicts (not so in a token classifier)."""
    return _PREDICTS_THE_NEXT.search(type(model).__name__) is not None


def _inside_documents(labels: Any, cu_seqlens: torch.Tensor, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Labels ``[batch, length]`` without those that one document's last token would predict of the next one's first.

    As the padding run has it, where no token predicts a row's first.
    """
    if not isinstance(labels, torch.Tensor) or (labels.dim() <= 2 and labels.numel() != shape[0] * shape[1]):
        found = f"{list(labels.shape)}" if isinstance(labels, torch.Tensor) else type(labels).__name__
        raise BadBatch(f"{name}: expected a tensor [{shape[0]}, {shape[1]}], one for each token, found {found}.")
    cu = cu_seqlens.flatten()
    at = cu[:-1] if name == "labels" else (cu[1:] - 1).clamp(min=0)
    if labels.dim() > 2:
        return labels
    padded = torch.nn.functional.pad(labels.flatten(), (0, 1))  # documents without tokens may start behind the last
    return padded.index_fill(0, at.to(labels.device, torch.int64), IGNORED)[:-1].view_as(labels)


@contextlib.contextmanager
def _looked(patch: Any, call: dict[str, Any]) -> Iterator[None]:
    """While a model computes a batch that is not packed: the masks that models inside it get are its own."""
    if compiling():
        yield
        return
    _reached.inside.append((patch, call.get("position_ids"), call.get("attention_mask")))
    try:
        yield
    finally:
        _reached.inside.pop()


def _is_dense(mask: Any) -> bool:
    """A mask for every query, or a dictionary of such for the kinds of layers."""
    return isinstance(mask, dict) or (isinstance(mask, torch.Tensor) and mask.dim() > 2)


def _packed(calls: _Calls, model: Any, args: tuple[Any, ...], call: dict[str, Any], mask: PackedMask) -> Any:
    """The result of a packed batch, if every attention layer was given its boundaries."""
    patch = vars(model)[MARK]
    call["attention_mask"] = mask
    if "use_cache" in {*calls.names, *call} and not patch.needs_cache:
        call["use_cache"] = False
    try:
        output = calls.make(model, args, call)
    except TypeError as error:
        if PackedMask.__name__ not in str(error):
            raise
        raise PackingNotIsolated(
            f"{type(model).__name__} used the mask of a packed batch in a way that fa2patch does not know, or a "
            f"layer of it is not patched any more ({error}). See fa2patch.status(model).layers; please report it."
        ) from error
    if compiling():
        missed = len(mask.calls) < len(patch.attention)
    else:
        known = None not in mask.calls  # 4.47's and 4.48's GPT-NeoX hands its function everything but the layer
        missed = len(mask.calls) < len(patch.attention)
        missed = missed or (known and not patch.vouched and bool(_not_given(patch, mask, model)))
        patch.vouched = not missed
    if missed:
        names = _not_given(patch, mask, model)
        raise PackingNotIsolated(
            f"of {len(patch.attention)} attention layers only {len(patch.attention) - len(names)} were given the "
            f"boundaries of this packed batch; not {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}. Their "
            "attention was replaced after fa2patch.apply: apply fa2patch last. See fa2patch.status(model).layers."
        )
    return output


def _not_given(patch: Any, mask: PackedMask, model: Any) -> list[str]:
    """The attention layers, by name and class, that have not seen a packed batch's boundaries.

    Of the model that was called: a replica (``DataParallel``) carries the patch of the one that it was made of.
    """
    given = {id(module) for module in mask.calls}
    decoder = models(model)[-1]
    modules = [(layer.name, decoder.get_submodule(layer.name)) for layer in patch.attention]
    return [f"{name} ({type(module).__name__})" for name, module in modules if id(module) not in given]


class _Calls:
    """How one ``forward`` is called: its arguments by name, and back again."""

    def __init__(self, original: Callable[..., Any]) -> None:
        parameters = list(inspect.signature(original).parameters.values())[1:]
        self.original = original
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = {p.name for p in parameters}
        self.takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Behind somebody's ``*args`` the first is ``input_ids``; more than that is refused."""
        rest = args[len(self.positional) :]
        if len(rest) > 1 or (rest and self.positional):
            raise PackingNotIsolated(
                f"{len(args)} arguments without names came to a forward that was replaced by one with *args: which "
                "of them are position_ids is not known. Call the model with keywords."
            )
        first = {"input_ids": rest[0]} if rest else {}
        return {**first, **dict(zip(self.positional, args)), **kwargs}

    def make(self, model: Any, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
        """The original's result, without those of the collator's lengths that it has no place for."""
        call = {name: value for name, value in call.items() if name not in LENGTHS or self.takes(name)}
        rest = [call.pop("input_ids")] if len(args) > len(self.positional) else []
        return self.original(model, *rest, **call)


def batch_shape(call: dict[str, Any]) -> tuple[tuple[int, int], torch.device]:
    """``(batch, length)`` and the device of a forward's inputs."""
    for name in ("input_ids", "inputs_embeds"):
        given = call.get(name)
        if given is not None:
            if not isinstance(given, torch.Tensor) or given.dim() < 2:
                found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
                raise BadBatch(f"{name}: expected a tensor [batch, length, ...], found {found}.")
            return (given.shape[0], given.shape[1]), given.device
    raise PackingNotIsolated("forward was given neither input_ids nor inputs_embeds.")


def packed_mask(call: dict[str, Any], patch: Any) -> PackedMask | None:
    """The mask of a packed batch, or None for every other batch; sees to ``call["position_ids"]`` too.

    A single document is packed only where lengths say so: else it is a dense row, computed as ever.
    """
    tokens = call["input_ids"] if call.get("input_ids") is not None else call.get("inputs_embeds")
    position_ids = call.get("position_ids")
    if tokens is None or (position_ids is None and getattr(tokens, "ndim", 0) < 2 and not _lengths(call)):
        return None  # GPT-2 takes one row of ids without a batch
    shape, device = batch_shape(call)
    found_before: PackedMask | None = getattr(position_ids, _FOUND, None)
    if found_before is not None and found_before.shape == shape:
        return found_before
    lengths = _lengths(call)
    if not lengths and isinstance(position_ids, torch.Tensor):
        lengths = dict(getattr(position_ids, _CARRIED, {}))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(lengths.get(name), torch.Tensor):
            lengths[name] = lengths[name].to(device)
    given, cache = call.get("attention_mask"), call.get("past_key_values")
    mask = _two_dimensional(given, shape, cached=cache is not None)
    if cache is not None and given is not None and mask is None:
        return None  # generate() with a static cache: the dense mask it made says who sees whom
    if position_ids is not None:
        check_position_ids(position_ids, shape)
    if mask is not None and "cu_seq_lens_q" in lengths and lengths["cu_seq_lens_q"].numel() == shape[0] + 1:
        del lengths["cu_seq_lens_q"]  # 4.54's generate(): one sequence in each padded row; the mask says the same
    if (lengths or shape[1] > 1) and not compiling():
        _refuse_capture(device)
    if "cu_seq_lens_q" in lengths:
        found: Boundaries | None = from_cu_seqlens(
            lengths["cu_seq_lens_q"],
            lengths.get("max_length_q"),
            shape,
            cu_seqlens_k=lengths.get("cu_seq_lens_k"),
            position_ids=position_ids,
            attention_mask=mask,
        )
    elif shape[1] == 1:
        return None
    else:
        seq_idx = lengths.get("seq_idx")
        if position_ids is None and seq_idx is None and (mask is None or mask.dtype == torch.bool):
            return None
        found = recognise(shape, device, position_ids=position_ids, attention_mask=mask, seq_idx=seq_idx)
    if found is None:
        return None
    _refuse_what_cannot_be_packed(call, given, mask)
    if position_ids is None:
        call["position_ids"] = positions_of(found.cu_seqlens.to(device), shape)
    positions = found.positions
    if patch.rotary is not None:
        positions = largest(call["position_ids"]) + 1 if positions is None else positions
        patch.rotary.check(positions)
        call["position_ids"] = tagged(call["position_ids"], found)
    return PackedMask(
        found,
        patch.picks,
        shape,
        shape[1] if positions is None else positions,
        call["position_ids"],
        patch.rotary,
        patch.architecture,
    )


def _refuse_split_rows(model: Any) -> None:
    """DeepSpeed's Ulysses stands in an attention function's place: each process has a part of every row."""
    from transformers import modeling_utils

    table = getattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS", {})
    name = getattr(model.config, "_attn_implementation", None)
    function = table[name] if isinstance(name, str) and name in table else None
    if getattr(function, "__module__", "").startswith("deepspeed.runtime.sequence_parallel"):
        raise PackingNotIsolated(
            "DeepSpeed's sequence parallelism (sp_size) is on: this process holds only a part of every row, so "
            "documents that are cut would be computed wrong. Train without it, or revert the patch and train padded."
        )


def _refuse_capture(device: torch.device) -> None:
    """A graph replays the longest length and the number of documents that it was captured with, whatever comes."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise PackingNotIsolated(
            "a CUDA graph is being captured: it would keep this batch's documents and compute others wrong. Capture "
            'nothing around a patched model; torch.compile(model, mode="reduce-overhead") looks at every batch.'
        )


def _lengths(call: dict[str, Any]) -> dict[str, Any]:
    """The collator's lengths among the arguments; those of keys count for queries, where only they were given."""
    lengths = {name: call[name] for name in LENGTHS if call.get(name) is not None}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if name in lengths:
            check_cu_seqlens(lengths[name])
            tokens = next((call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None), None)
            if lengths[name].device.type == "meta" and getattr(tokens, "device", None) != lengths[name].device:
                raise BadCuSeqlens("cu_seq_lens: expected a tensor with values, found one on the meta device.")
    if "cu_seq_lens_k" in lengths and "cu_seq_lens_q" not in lengths:
        lengths["cu_seq_lens_q"] = lengths["cu_seq_lens_k"]
        lengths["max_length_q"] = lengths.get("max_length_k")
    return lengths


def _two_dimensional(mask: Any, shape: tuple[int, int], cached: bool) -> torch.Tensor | None:
    """The mask of this call's tokens ``[batch, length]``; of a mask ``[batch, cached + length]`` its end."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0]:
        return None
    if mask.shape[1] == shape[1]:
        return mask
    return mask[:, -shape[1] :] if cached and mask.shape[1] > shape[1] else None


def _refuse_what_cannot_be_packed(call: dict[str, Any], given: Any, mask: torch.Tensor | None) -> None:
    if given is not None and mask is None:
        found = f"{list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        raise PackedWithDenseMask(
            f"a packed batch came with an attention_mask {found}: expected none, or [batch, length] with zeros for "
            "padding. Leave it out: position_ids already say where documents start."
        )
    if call.get("past_key_values") is not None:
        raise PackedWithCache(
            "a packed batch came with past_key_values. What a cache holds belongs to no one document of the row. "
            "Leave the cache out (use_cache=False), or pass documents one by one."
        )
    if call.get("output_attentions"):
        raise PackingNotIsolated(
            "output_attentions=True was asked of a packed batch: flash attention makes no weights to return. "
            "Leave it out, or pass documents one by one."
        )


def _with_mask(position_ids: torch.Tensor, mask: PackedMask) -> torch.Tensor:
    """The ids, a view of their own, on which what was found of them rides to the base model."""
    carrying = position_ids.view_as(position_ids)
    vars(carrying).update(vars(position_ids), **{_FOUND: mask})
    return carrying


def _with_lengths(
    position_ids: torch.Tensor | None, lengths: dict[str, Any], shape: tuple[int, int], device: torch.device
) -> torch.Tensor | None:
    """The ids, a view of their own, on which the lengths ride from the causal LM to its base model."""
    if position_ids is None:
        cu = lengths.get("cu_seq_lens_q")
        if cu is None:
            found = recognise(shape, device, seq_idx=lengths.get("seq_idx"))
            if found is None:
                return None
            cu = found.cu_seqlens
        position_ids = positions_of(cu.to(device), shape)
    position_ids = position_ids.view_as(position_ids)
    setattr(position_ids, _CARRIED, lengths)
    return position_ids
