"""The forward of an encoder-decoder: sources in one row, targets in another, source i with target i.

The outermost model finds where the documents of both rows start, and hands each stack a packed mask: the sources' as
``attention_mask``, the targets' as ``decoder_attention_mask``. The stacks are patched as models of their own
(``forward.py``), and the decoder makes the mask of its cross attention of both (``cross.py``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch

from .._types import Args, Call, Function
from ..documents.names import IGNORED_LABEL, LABELS, LENGTHS, OF_TARGETS, TOKENS
from ..documents.tensors import require
from ..errors import BadBatch, PackingNotIsolated
from . import inspecting, other_code
from .calls import Calls, passed
from .cross import require_pairs
from .engines import row_part
from .find_documents import packed_mask_of
from .labels import inside_documents, up_to_the_last_label
from .packed_mask import MASK, PackedMask
from .splitting import Documents
from .step import MARK, PADDING, ROLE, Patched
from .transformers_names import SHIFTS, SHIFTS_ITSELF

# The arguments that say where documents start.
SAYS = ("position_ids", *LENGTHS)

SAYS_ALL = (*SAYS, *[OF_TARGETS + name for name in SAYS])


def entered(original: Function) -> Function:
    """Return the replacement for the ``forward`` of an encoder-decoder."""
    calls, own_shift, hides = Calls(original), _own_shift(original), _hides_padding(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        padding = self.__dict__.get(PADDING)
        if padding is None:
            return patched(self, args, kwargs)
        return padding.computed(patched, self, args, kwargs, calls.positional or ["input_ids"])

    def patched(self: Any, args: Args, kwargs: Call) -> Any:
        patch = self.__dict__.get(MARK)
        outermost = patch is not None and self.__dict__[ROLE].outermost
        call = calls.named(args, kwargs) if outermost else None
        if call is None:  # a model inside is handed what the outermost one has found
            return original(self, *args, **kwargs)
        return calls.make(self, args, _with_masks(self, patch, call, own_shift, hides))

    other_code.ours(forward)  # its signature stays: 4.48's generate() would make position_ids if it had them
    return forward


def _with_masks(model: Any, patch: Patched, call: Call, own_shift: Shift | None, hides: int | None) -> Call:
    sources, targets = masks_of(model, call)
    if targets is not None:
        patch.examine(model, call, targets)
    call = {name: value for name, value in call.items() if name not in SAYS_ALL}
    if targets is None:
        return call
    if sources is not None:
        call[MASK] = sources
    call[OF_TARGETS + MASK] = targets
    call["use_cache"] = False
    labels = call.get(LABELS[0])
    if labels is not None and not passed(call, [OF_TARGETS + name for name in TOKENS]):
        shifted = call[OF_TARGETS + TOKENS[0]] = _shifted(model, labels, targets, own_shift)
        if hides is not None:
            _require_none_hidden(model, labels, shifted, targets, hides)
    if labels is not None and patch.facts.shifts_in_its_loss:  # as VisionEncoderDecoder in 4.57
        call[LABELS[0]] = inside_documents(labels, targets.boundaries, LABELS[0], targets.shape, None)
    return call


def masks_of(model: Any, call: Call) -> tuple[PackedMask | None, PackedMask | None]:
    """The packed masks of the sources and of the targets. Those of sounds and pictures are None."""
    training = model.training and torch.is_grad_enabled()
    of_sources = passed(call, (*TOKENS, MASK, *SAYS))
    encoded = call.get("encoder_outputs")
    if encoded is not None:  # sources that were encoded before
        of_sources[TOKENS[1]] = encoded[0]
    of_targets = {name: call.get(OF_TARGETS + name) for name in (*TOKENS, MASK, *SAYS)}
    if not passed(of_targets, TOKENS):  # the model makes them of labels
        of_targets[TOKENS[0]] = call.get(LABELS[0])
    says = passed(call, SAYS_ALL)
    if says:  # a part may look dense, or like ids that are refused
        _refuse_part(model, call)
    encoder, decoder = map(model.get_submodule, vars(model)[MARK].facts.stacks)
    sources = _mask_of(encoder, of_sources, training)
    targets = _mask_of(decoder, of_targets, training)
    if targets is None and sources is None:
        return None, None
    if not says:
        _refuse_part(model, call)
    if targets is None or (sources is None and passed(of_sources, TOKENS)):
        there, missing, prefix = ("targets", "sources", "") if sources is None else ("sources", "targets", OF_TARGETS)
        raise BadBatch(
            f"the {there} of this batch are packed and its {missing} are not: expected {prefix}position_ids that "
            f"restart with each document, or {prefix}cu_seq_lens_q. Source i belongs to target i, in one row each."
        )
    if sources is not None:
        require_pairs(sources.boundaries, targets.boundaries)
    return sources, targets


def _refuse_part(model: Any, call: Call) -> None:
    part = row_part(model, call)
    if part is not None:
        raise PackingNotIsolated(
            f"{part.engine} splits rows over {part.of} processes, and {type(model).__name__} has two rows, of sources "
            "and of targets, of which a process would need more than its parts. Train it with whole rows."
        )


def _mask_of(stack: Any, call: Call, training: bool) -> PackedMask | None:
    # None: the batch is dense, or the stack reads no tokens (pictures, sounds).
    patch = vars(stack).get(MARK)
    return None if patch is None or not passed(call, TOKENS) else packed_mask_of({**call}, patch, training=training)


class Shift(NamedTuple):
    """A function of a modeling file that makes a decoder's inputs of labels."""

    function: Function
    settings: tuple[str, ...]  # the names of its arguments behind the labels, which the config has


def _own_shift(forward: Function) -> Shift | None:
    name = next((name for name in SHIFTS if inspecting.reads_name(forward, name)), None)
    if name is None:
        return None
    function = vars(sys.modules[inspect.unwrap(forward).__module__])[name]
    return Shift(function, tuple(inspecting.parameter_names(function)[1:]))


def _shifted(model: Any, labels: torch.Tensor, targets: PackedMask, own: Shift | None) -> torch.Tensor:
    # The model itself makes a decoder's inputs of labels, here of each document, as rows that are padded right.
    shift = next((getattr(model, name) for name in SHIFTS_ITSELF if hasattr(model, name)), None)
    if shift is None and own is not None:
        settings = [getattr(model.config, name) for name in own.settings]
        shift = functools.partial(_call, own.function, settings)
    if shift is None:
        raise BadBatch(
            f"{type(model).__name__} does not say how it makes decoder_input_ids of labels: expected decoder_input_ids "
            "beside labels that are packed, shifted in each document."
        )
    documents = Documents(targets.boundaries, targets.shape)
    calls = documents.in_batches([range(len(documents))], labels.device).calls
    (rows,) = calls.split(labels.flatten(), labels.new_full((calls.size,), IGNORED_LABEL))
    # the last document may be padding, in which mBART would look for the last label
    a_token = int(getattr(model.config, "pad_token_id", None) == 0)
    last = torch.where((rows[-1:] == IGNORED_LABEL).all(), a_token, rows[-1:])
    shifted: torch.Tensor = calls.join([shift(torch.cat([rows[:-1], last]))])
    return shifted.view(targets.shape)


def _hides_padding(forward: Function) -> int | None:
    # Some models hide the inputs that they make of labels where these are the padding's token, from the first input of
    # each target on, or from the second (Pix2Struct).
    mask = OF_TARGETS + MASK
    if not (inspecting.sets(forward, mask) and inspecting.reads_name(forward, "pad_token_id")):
        return None
    return int(inspecting.sets(forward, mask, within=True))


def _require_none_hidden(
    model: Any, labels: torch.Tensor, inputs: torch.Tensor, targets: PackedMask, first: int
) -> None:
    padding = model.config.pad_token_id
    learns = up_to_the_last_label(labels)  # behind it may be a document of padding
    hidden = (inputs == padding) & learns & (targets.boundaries.positions_of(targets.rows) >= first)
    require(
        ~hidden.any(),
        PackingNotIsolated,
        f"{type(model).__name__} makes decoder_input_ids of labels and hides those that are pad_token_id={padding} "
        f"from attention, and this batch has some (decoder_start_token_id is {model.config.decoder_start_token_id}). A "
        "packed row would show them. Set model.config.decoder_start_token_id to another token, such as the "
        "tokenizer's cls_token_id, leave that token out of the labels, or give decoder_input_ids.",
    )


def _call(function: Function, settings: list[Any], labels: torch.Tensor) -> Any:
    return function(labels, *settings)
