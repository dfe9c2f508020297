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
import threading
from collections.abc import Iterator
from typing import Any, Callable

import torch

from .._compile import compiling
from ..boundaries import (
    Boundaries,
    check_position_ids,
    from_cu_seqlens,
    largest,
    positions_of,
    recognise,
)
from ..errors import PackedWithCache, PackedWithDenseMask, PackingNotIsolated
from .layers import models
from .packed_mask import PackedMask, find
from .rotary import tagged

MARK = "_fa2patch"
"""Name of the instance attribute that says: this model is patched. It holds the model's ``Patch``."""

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords of Transformers' DataCollatorWithFlattening (return_flash_attn_kwargs, return_seq_idx)."""

_CARRIED = "_fa2patch_lengths"


class _Reached(threading.local):
    """What this thread has come through: tripwires, nothing is carried by them.

    Attributes:
        times: how often a base model's patched forward.
        inside: patches of the models around this point that have looked at a batch and found it not packed.
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
        lengths = {name: call[name] for name in LENGTHS if call.get(name) is not None}
        if lengths and not (calls.takes_any and compiling()):
            shape, device = batch_shape(call)
            call["position_ids"] = _with_lengths(call.get("position_ids"), lengths, shape, device)
        if patch.makes_masks or not calls.takes("position_ids"):
            mask = packed_mask(call, patch)
            if mask is not None:
                if not calls.takes("position_ids"):
                    del call["position_ids"]
                return _packed(calls, self, args, call, mask)
        if compiling():
            return calls.make(self, args, call)
        before = _reached.times
        with _looked(patch if patch.makes_masks else None):
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
        given = call.get("attention_mask")
        made_by_a_model = _is_dense(given) and (compiling() or any(patch is looked for looked in _reached.inside))
        packed_before = find(given.values() if isinstance(given, dict) else [given]) is not None
        if packed_before or made_by_a_model:
            return original(self, *args, **kwargs)
        mask = packed_mask(call, patch)
        if mask is not None:
            return _packed(calls, self, args, call, mask)
        with _looked(patch):
            return calls.make(self, args, call)

    return forward


@contextlib.contextmanager
def _looked(patch: Any) -> Iterator[None]:
    """While a model computes a batch that is not packed: the masks that models inside it get are its own."""
    if compiling():
        yield
        return
    _reached.inside.append(patch)
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
    if len(mask.calls) < len(patch.attention):
        raise PackingNotIsolated(
            f"of {len(patch.attention)} attention layers only {len(mask.calls)} were given the boundaries of this "
            "packed batch: some layer's attention was replaced after fa2patch.apply. See "
            "fa2patch.status(model).layers; apply fa2patch last."
        )
    return output


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
        if call.get(name) is not None:
            return (call[name].shape[0], call[name].shape[1]), call[name].device
    raise PackingNotIsolated("forward was given neither input_ids nor inputs_embeds.")


def packed_mask(call: dict[str, Any], patch: Any) -> PackedMask | None:
    """The mask of a packed batch, or None for every other batch; sees to ``call["position_ids"]`` too.

    A single document is packed only where lengths say so: else it is a dense row, computed as ever.
    """
    if call.get("input_ids") is None and call.get("inputs_embeds") is None:
        return None
    shape, device = batch_shape(call)
    position_ids = call.get("position_ids")
    lengths = {name: call[name] for name in LENGTHS if call.get(name) is not None}
    if not lengths and isinstance(position_ids, torch.Tensor):
        lengths = dict(getattr(position_ids, _CARRIED, {}))
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if isinstance(lengths.get(name), torch.Tensor):
            lengths[name] = lengths[name].to(device)
    given, cache = call.get("attention_mask"), call.get("past_key_values")
    mask = _two_dimensional(given, shape)
    if cache is not None and given is not None and mask is None:
        return None  # generate() with a static cache: the dense mask it made says who sees whom
    if position_ids is not None:
        check_position_ids(position_ids, shape)
    if mask is not None and "cu_seq_lens_q" in lengths and lengths["cu_seq_lens_q"].numel() == shape[0] + 1:
        del lengths["cu_seq_lens_q"]  # 4.54's generate(): one sequence in each padded row; the mask says the same
    if "cu_seq_lens_q" in lengths:
        found: Boundaries | None = from_cu_seqlens(
            lengths["cu_seq_lens_q"],
            lengths.get("max_length_q"),
            shape,
            cu_seqlens_k=lengths.get("cu_seq_lens_k"),
            position_ids=position_ids,
            attention_mask=mask,
            checked=not compiling(),
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
        patch.kernel,
        shape,
        shape[1] if positions is None else positions,
        call["position_ids"],
        patch.rotary,
        patch.architecture,
    )


def _two_dimensional(mask: Any, shape: tuple[int, int]) -> torch.Tensor | None:
    """The mask of this call's tokens ``[batch, length]``, where a mask ``[batch, cached + length]`` was given."""
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == shape[0] and mask.shape[1] >= shape[1]:
        return mask[:, -shape[1] :]
    return None


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
