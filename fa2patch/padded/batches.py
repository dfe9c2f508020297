"""Packed computation of padded batches, for trainers that make padded batches and expect padded outputs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import torch
from numpy.typing import NDArray

from .._torch import compiling, constant, numbered
from .._types import Args, Call
from ..documents.names import LABELS, LENGTHS, MEDIA, TOKENS
from ..errors import BadBatch, StaysPadded
from ..upstream import attached, caches
from ..upstream.calls import passed
from ..upstream.engines import row_part
from ..upstream.facts import Facts
from ..upstream.labels import up_to_the_last_label
from ..upstream.packed_mask import PackedMask
from ..upstream.step import MARK, PADDING, Patched, Tally
from ..upstream.transformers_names import ENCODED, ENCODED_MASK
from . import head_calls
from .rows import Layout, packed_row, read_rows, shared_prefixes, unshared

# The lock is held while a head is tried: no other thread may use what is still to be found.
_lock = threading.RLock()


class Padding(NamedTuple):
    left: bool  # whether any row has padding on that side
    right: bool
    predicts: bool  # whether a token of padding predicts a label


class _OneRow(NamedTuple):
    call: Call
    layout: Layout
    real: torch.Tensor  # bool [batch, length]
    padding: Padding


class _AsItCame(Exception):
    # The batch is computed with its padding. The text says why, and is empty for a batch without padding.
    pass


class PaddedBatches:
    # The model's replaced forward calls `computed`. Forward hooks would not do: sentence-transformers calls
    # model.forward(...), which runs none.

    def __init__(self, base: torch.nn.Module, share_prompts: bool = False, of_pairs: bool = False) -> None:
        self.base, self.share_prompts = base, share_prompts
        self._of_pairs = of_pairs  # a stack of an encoder-decoder, around which the call is noted
        self._pools = False
        self._warned: set[str] = set()
        self._batches: dict[Any, int] = {}
        self._reads: set[Any] = set()
        base.__dict__[PADDING] = self
        outermost = base.__dict__[MARK].model
        if outermost is not base and not of_pairs:
            outermost.__dict__[PADDING] = head_calls.Around()

    def remove(self) -> None:
        if self.base.__dict__.get(PADDING) is self:  # the model must still be patched
            self.base.__dict__[MARK].model.__dict__.pop(PADDING, None)
            self.base.__dict__.pop(PADDING, None)

    def computed(
        self, forward: Callable[[Any, Args, Call], Any], module: Any, args: Args, kwargs: Call, names: Sequence[str]
    ) -> Any:
        # `module` is the base model or, in data parallelism, a replica of it.
        if len(args) > len(names):
            return forward(module, args, kwargs)
        if compiling():
            call = {**dict(zip(names, args)), **kwargs}
            if not _exceeds(module, call):
                patch = module.__dict__.get(MARK)
                if patch is not None and call.get("attention_mask") is not None:
                    _say_compiled(patch.number)
                return forward(module, args, kwargs)
            from ..upstream.passes import outside_graphs  # a budget has imported it

            return outside_graphs(self.computed, forward, module, args, kwargs, names)
        head = head_calls.head_of(module)
        if self._of_pairs and head is None:  # generate() calls the encoder alone
            return forward(module, args, kwargs)
        row = self._one_row(module, {**dict(zip(names, args)), **kwargs}, head)
        tally = module.__dict__[MARK].tally if MARK in module.__dict__ else Tally()
        if isinstance(row, str):
            tally.why = tally.why or row
            warn_once(self._warned, self.base, row)
            return forward(module, args, kwargs)
        if head is None or not head.in_trial:
            tally.batches += 1
            tally.cells += row.real.numel()
            tally.tokens += len(row.layout.at)
        if head is None:
            output, noise = forward(module, (), row.call), False
        else:
            output, noise = head.of_base(lambda: forward(module, (), row.call)), head.noise_of is self
        if _pools_rows(output, len(row.real)):
            self._pools = True
            return self.computed(forward, module, args, kwargs, names)
        if isinstance(output, tuple):
            return row.layout.padded(output, noise)
        for name, value in list(output.items()):
            output[name] = row.layout.padded(value, noise)
        return output

    def _one_row(self, module: Any, call: Call, head: head_calls.HeadCall | None) -> _OneRow | str:
        try:
            row = _as_one_row(module, call, self.share_prompts, head)
            if head is not None:
                self._require_unread(row, head)
            if self._pools:
                raise _AsItCame("its base model makes a vector of each row by itself, and a packed row holds several")
        except _AsItCame as why:
            return str(why)
        return row

    def _require_unread(self, row: _OneRow, head: head_calls.HeadCall) -> None:
        # Whether the head reads hidden states of padding is tried with the first batch of a kind, and with batches 2,
        # 4, 8, ... of it. With start_positions, for example, a head computes a loss over the row.
        if head.in_trial:
            head.real[self] = row.real
            return
        given = frozenset(passed(head.call, head.call))
        kind = (row.padding, given, head.module.training, torch.is_grad_enabled())
        with _lock:
            if kind not in self._reads:
                self._batches[kind] = times = self._batches.get(kind, 0) + 1
                due, device = times & (times - 1) == 0, row.layout.cells.device
                if due and head_calls.reads_padding(head, self, device, row.padding.predicts):
                    self._reads.add(kind)
            if kind not in self._reads:
                return
        name = type(head.module).__name__
        if row.padding.predicts:
            raise _AsItCame(
                f"the loss of {name} counts labels that only padding predicts. To leave them out, give them -100"
            )
        raise _AsItCame(f"{name} reads hidden states of padding, and a packed row has none")

    def __enter__(self) -> PaddedBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def warn_once(warned: set[str], model: Any, why: str) -> None:
    if why and why not in warned:
        warned.add(why)
        warnings.warn(
            f"a batch of {type(model).__name__} is computed as it came, with its padding if it has any, and so are "
            f"others like it: {why}. The results are those without fa2patch.",
            StaysPadded,
            stacklevel=3,
        )


@constant
def _say_compiled(number: str) -> None:
    patch: Patched = numbered(number)
    why = (
        "a graph of torch.compile cannot choose by a batch's mask. Leave torch.compile out, or collate packed rows "
        "(fa2patch.DataCollatorWithFlattening), which compile"
    )
    warn_once({patch.tally.why}, patch.model, why)
    patch.tally.why = why


def _as_one_row(base: Any, call: Call, share: bool, head: head_calls.HeadCall | None) -> _OneRow:
    patch: Patched | None = base.__dict__.get(MARK)
    if patch is None:
        raise _AsItCame
    encoded = passed(call, (ENCODED, ENCODED_MASK))  # of the sources' rows
    call = {name: value for name, value in call.items() if name not in encoded}
    by_the_user = call
    if head is not None and head.pairs:  # a decoder is told of a cache that its config asks for
        call, by_the_user = _with_labels(call, head, bool(encoded)), head.call
    if patch.budget is not None:
        call = _with_mask(call)
    if not _may_be_padded(call, by_the_user.get("use_cache")):
        raise _AsItCame
    _require_readable(call)
    if row_part(base, call) is not None:
        raise _AsItCame("a row is shared by several processes")
    mask, tokens = call.pop("attention_mask"), next(iter(passed(call, TOKENS).values()))
    call = _for_each_row(call, mask.shape)
    given, real, first = call.get("position_ids"), mask != 0, patch.facts.first_position
    no = real.new_zeros(())
    predicts = no if head is None or (head.pairs and not encoded) else head_calls.padding_predicts(head, real)
    otherwise = _counted_otherwise(call, real, first) if given is None and first else no
    compared = _to_compare(call, mask.shape) if share and may_share(patch.facts) and not encoded else []
    asked = [predicts, otherwise, *_without_source(encoded.get(ENCODED), encoded.get(ENCODED_MASK))]
    rows = read_rows(mask, given, compared, asked)  # the only read from the device
    if rows is None:
        raise _AsItCame("each row of its mask must be zeros around one run of ones, on which its position ids count up")
    if rows.lengths.max() == 1:  # then outputs with one entry per row look like those per token
        raise _AsItCame
    right = bool((rows.starts + rows.lengths < mask.shape[1]).any())
    padding = Padding(bool(rows.starts.any()), right, rows.answers[0])
    if padding.left:
        _require_no_first_token(base, patch.facts, call)
    if rows.answers[1]:
        raise _AsItCame(
            f"its model counts as positions the ids that are not {first - 1}, and its mask shows other tokens"
        )
    if any(rows.answers[2:]):
        raise _AsItCame("a source has no token that its encoder_attention_mask shows")
    if rows.common is not None and may_share(patch.facts, rows.lengths):
        prefixes = shared_prefixes(rows.common, rows.lengths)
    else:
        prefixes = unshared(rows.lengths.tolist())
    if (rows.lengths == mask.shape[1]).all() and not prefixes.shared and patch.budget is None:
        raise _AsItCame
    described, layout = packed_row(mask.shape, rows, prefixes, tokens.device)
    packed = {name: layout.packed(v) if _per_token(v, mask.shape) else v for name, v in call.items()}
    if given is None:
        packed["position_ids"] = described["position_ids"] + first
    call = {**described, **packed, **encoded}
    if call.get("use_cache"):
        call["use_cache"] = False
    call["position_ids"] = attached.attach(call["position_ids"], attached.Piece(attached.PADDING, mask.numel()))
    return _OneRow(call, layout, real, padding)


def _with_labels(call: Call, head: head_calls.HeadCall, decodes: bool) -> Call:
    labels, tokens = head.call.get(LABELS[0]), next(iter(passed(call, TOKENS).values()), None)
    if not decodes or tokens is None or call.get("attention_mask") is not None:
        return call
    if not isinstance(labels, torch.Tensor) or labels.shape != tokens.shape[:2]:
        return call
    return {**call, "attention_mask": mask_of_labels(labels)}


def mask_of_labels(labels: torch.Tensor) -> torch.Tensor:
    # What is behind a target's last label is padding, which no token of the target sees. In front of the first one, all
    # tokens are seen. The result is int64 [batch, length].
    mask = up_to_the_last_label(labels)
    mask[:, 0] = True  # of a row without labels
    return mask.long()


def _without_source(states: Any, mask: Any) -> list[torch.Tensor]:
    # Whether a row's cross attention would see nothing: a bool tensor without dimensions, or nothing to ask.
    if not isinstance(states, torch.Tensor) or mask is None:
        return []
    if not isinstance(mask, torch.Tensor) or mask.shape != states.shape[:2]:
        raise _AsItCame(f"its encoder_attention_mask has another shape than {list(states.shape[:2])}, [batch, length]")
    return [(mask == 0).all(1).any()]


def _exceeds(base: Any, call: Call) -> bool:
    patch: Patched | None = base.__dict__.get(MARK)
    tokens = next(iter(passed(call, TOKENS).values()), None)
    if patch is None or patch.budget is None or tokens is None:
        return False
    return bool(tokens.shape[:2].numel() > patch.budget.max_tokens)


def _with_mask(call: Call) -> Call:
    # Rows without padding and without a mask are computed in passes, too. They get a mask of ones.
    tokens = next(iter(passed(call, TOKENS).values()), None)
    if tokens is None or passed(call, ("attention_mask", "position_ids")) or tokens.dim() < 2:
        return call
    return {**call, "attention_mask": tokens.new_ones(tokens.shape[:2], dtype=torch.long)}


def _may_be_padded(call: Call, use_cache: bool | None) -> bool:
    # No value is looked at, so nothing is read from the device.
    piece = getattr(call.get("position_ids"), attached.MASK, None)
    packed = passed(call, LENGTHS) or (piece is not None and piece.content is not None)
    decodes = call.get("cache_position") is not None and use_cache is not False
    cached = caches.held(call) or use_cache or decodes
    mask = call.get("attention_mask")
    given = mask is not None and not isinstance(mask, PackedMask)  # a stack is given one with packed pairs
    return not packed and not cached and given and bool(passed(call, TOKENS))


def _require_readable(call: Call) -> None:
    mask, given = call["attention_mask"], call.get("position_ids")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"has {mask.dim()} dimensions" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
        raise _AsItCame(f"its attention_mask {found}, and [batch, length] was expected")
    shape = next(iter(passed(call, TOKENS).values())).shape[:2]
    if len(shape) == 2 and mask.shape[1] > shape[1]:
        raise BadBatch(
            f"attention_mask: expected {list(shape)}, one for each token, found {list(mask.shape)} and no cache of "
            "earlier tokens. With padded_batches=True a padded batch fills a cache only if it is asked for: pass "
            "use_cache=True with the earlier tokens."
        )
    if shape != mask.shape:
        raise _AsItCame("its attention_mask has another shape than its tokens")
    if given is not None and given.dim() != 2:
        raise _AsItCame(f"its position_ids have {given.dim()} dimensions, and [batch, length] was expected")
    if call.get("cache_position") is not None:
        raise _AsItCame("a model around it made a cache_position, which counts places in padded rows")
    if call.get("output_attentions"):
        raise _AsItCame("it was called with output_attentions=True")


def _for_each_row(call: Call, shape: torch.Size) -> Call:
    # A tensor [1, length, ...] is given once for all rows. A packed row has other numbers of rows and tokens, so other
    # tensors that are broadcast over these are refused.
    found: Call = {}
    for name, value in call.items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == (1, shape[1]):
            value = value.expand(shape[0], *value.shape[1:])
        several = isinstance(value, torch.Tensor) and value.numel() > 1
        if several and not _per_token(value, shape) and name not in MEDIA:
            raise _AsItCame(f"its {name} has the shape {list(value.shape)}, and [batch, length] was expected")
        found[name] = value
    return found


def _require_no_first_token(base: Any, facts: Facts, call: Call) -> None:
    by_column = facts.by_column
    if facts.first_position and call.get("input_ids") is None:  # RoBERTa counts ids, if it has any
        by_column = True
    if by_column and call.get("position_ids") is None:
        raise _AsItCame(
            "it is padded on the left without position_ids, and its model counts padding then. Pad on the right, or "
            "pass position_ids"
        )
    if isinstance(getattr(base, "pooler", None), torch.nn.Module):
        raise _AsItCame("it is padded on the left, and its pooler reads each row's first token, which is padding")


def _counted_otherwise(call: Call, real: torch.Tensor, first: int) -> torch.Tensor:
    # RoBERTa and its kin count the ids that are not padding's, which may be a real token's, too.
    ids = call.get("input_ids")
    if ids is None:
        return real.new_zeros(())
    seen, real = ids != first - 1, real.to(ids.device)
    differ: torch.Tensor = (seen.cumsum(1) * seen != real.cumsum(1)) & real
    return differ.any()


def may_share(facts: Facts, lengths: NDArray[Any] | None = None) -> bool:  # lengths: of the rows, once known
    if facts.both_ways:  # a shared token would have to see several rows' later tokens
        return False
    if lengths is None or facts.rope is None or facts.rope.kind != "longrope":
        return True
    return len(set((lengths > facts.rope.limit).tolist())) == 1  # a prompt is rotated by each row's length


def _to_compare(call: Call, shape: torch.Size) -> list[torch.Tensor]:
    # Rows that share a token must be equal in all of these arguments. There are none if rows cannot share.
    found = [value for value in call.values() if _per_token(value, shape)]
    numbers = all(value.dim() == 2 and not value.is_floating_point() for value in found)
    return found if numbers and call.get("input_ids") is not None and shape[0] > 1 else []


def _per_token(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[:2] == shape


def _pools_rows(output: Any, rows: int) -> bool:
    # The base model has made a vector of the packed row. Its trait has taken that out, or it is in a tuple.
    if not isinstance(output, tuple):
        return "pooler_output" in output and output["pooler_output"] is None
    return rows > 1 and any(isinstance(each, torch.Tensor) and each.dim() == 2 and len(each) == 1 for each in output)
