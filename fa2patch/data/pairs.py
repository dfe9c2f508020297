"""Preference pairs (DPO) in packed rows: a collator, and log-probabilities per document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..documents.boundaries import Boundaries, document_of
from ..documents.find import boundaries
from ..documents.given_boundaries import require_no_first_labels
from ..documents.names import IGNORED_LABEL, PARENTS
from ..documents.prefixes import prefix_tree
from ..errors import BadBatch, CollatorError
from ..packing.sharing import in_common
from .collators import DataCollatorWithFlattening
from .columns import (
    Array,
    Columns,
    as_array,
    as_numbers,
    integer,
    present,
    require_same_keys,
    restarting,
    with_tokens,
)

_REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


@dataclass
class DataCollatorForPreferenceFlattening:
    """Concatenate the two documents of every preference pair into one row without padding.

    For n examples, documents 1 to n are prompt + chosen and documents n + 1 to 2n are prompt + rejected, both in the
    order of the examples. The padding that ``pad_to_multiple_of`` adds is one more document, as ``real_tokens`` say.

    With ``share_prompts``, the tokens of a prompt that both of its documents begin with are in the row once, as a
    segment that both continue. The last of these tokens belongs to each document's own segment, where it predicts the
    first token of the completion. The segments are prompt 1, chosen 1, prompt 2, chosen 2, ..., rejected 1, rejected 2,
    ..., and the documents stay those of above: a document is the path to a segment that no other one continues.

    Args:
        max_length: Truncate documents to this many tokens. None does not truncate.
        truncation_mode: The part that is kept, ``"keep_start"`` or ``"keep_end"``.
        share_prompts: Put each prompt into the row once. The batch then always has ``segment_parents``,
            ``cu_seq_lens_*`` and ``max_length_*``, and only a patched model computes it. Not with ``return_seq_idx``,
            which cannot say that a segment continues another one.
        return_flash_attn_kwargs, return_seq_idx, pad_to_multiple_of, pad_token_id, position_ids_start: See
            :class:`fa2patch.DataCollatorWithFlattening`.

    Attributes:
        empty: Number of pairs that it has left out because neither of their documents has tokens. Each worker of a
            DataLoader counts its own.

    Raises:
        CollatorError: An option is invalid.
    """

    max_length: int | None = None
    truncation_mode: str = "keep_start"
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    pad_to_multiple_of: int | str | None = None
    pad_token_id: int = 0
    position_ids_start: int = 0
    share_prompts: bool = False
    empty: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_length is not None and integer("max_length", self.max_length) < 1:
            raise CollatorError(f"max_length: expected a positive number or None, found {self.max_length}.")
        if self.truncation_mode not in ("keep_start", "keep_end"):
            raise CollatorError(
                f"truncation_mode: expected 'keep_start' or 'keep_end', found {self.truncation_mode!r}."
            )
        if self.share_prompts and self.return_seq_idx:
            raise CollatorError(
                "share_prompts and return_seq_idx: seq_idx cannot say that a segment continues another one. Leave "
                "return_seq_idx out; cu_seq_lens_q and segment_parents say where the segments are."
            )
        self._flatten()

    def __call__(self, features: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Concatenate the pairs of n examples into one packed row of T tokens.

        Args:
            features: Examples with TRL's columns of token ids: ``prompt_input_ids``, ``chosen_input_ids`` and
                ``rejected_input_ids`` (TRL 0.12 to 0.24), or ``prompt_ids``, ``chosen_ids`` and ``rejected_ids`` (since
                1.0). If there are ``chosen_labels`` and ``rejected_labels`` (up to 0.11), the ids include the prompt,
                whose labels are -100. ``ref_chosen_logps`` and ``ref_rejected_logps`` are optional, one number each.

        Returns:
            ``input_ids``, ``labels`` (-100 outside completions) and ``position_ids``: int64 ``[1, T]``.
            ``ref_chosen_logps`` and ``ref_rejected_logps``, if the examples have them: float32 ``[n]``. ``seq_idx``,
            ``cu_seq_lens_*`` and ``max_length_*``, if the options ask for them. With ``share_prompts``, these lengths
            are of segments, and ``segment_parents``, int32 ``[segments]``, has for each segment the number of the one
            that it continues, or -1.

        Raises:
            CollatorError: A column is missing or invalid, or only one document of a pair has tokens.
        """
        examples = present(features)
        require_same_keys([{key: None for key in _REFERENCE if key in example} for example in examples])
        pairs = [tuple(self._document(*each, side) for side in ("chosen", "rejected")) for each in enumerate(examples)]
        if pairs:
            kept = with_tokens([_tokens(index, *pair) for index, pair in enumerate(pairs)])
            self.empty += len(pairs) - len(kept)
            examples, pairs = [examples[at] for at in kept], [pairs[at] for at in kept]
        chosen, rejected = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        batch = self._shared(chosen, rejected) if self.share_prompts else self._flatten()([*chosen, *rejected])
        for key in _REFERENCE:
            if key in examples[0]:
                values = [as_numbers(index, key, example[key], "one number") for index, example in enumerate(examples)]
                batch[key] = torch.tensor(np.array(values, dtype=np.float32).reshape(len(examples)))
        return batch

    def _flatten(self) -> DataCollatorWithFlattening:
        return DataCollatorWithFlattening(
            return_flash_attn_kwargs=self.return_flash_attn_kwargs or self.share_prompts,
            return_seq_idx=self.return_seq_idx,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=self.pad_token_id,
            position_ids_start=self.position_ids_start,
        )

    def _document(self, index: int, example: Mapping[str, Any], side: str) -> Columns:
        ids = _ids_of_part(index, example, side)
        if f"{side}_labels" in example:
            labels = as_array(index, f"{side}_labels", example[f"{side}_labels"], integers=True)
        else:
            prompt = _ids_of_part(index, example, "prompt")
            labels = np.concatenate([np.full_like(prompt, IGNORED_LABEL), ids])
            ids = np.concatenate([prompt, ids])
        if self.max_length is not None:
            kept = slice(self.max_length) if self.truncation_mode == "keep_start" else slice(-self.max_length, None)
            ids, labels = ids[kept], labels[kept]
        return {"input_ids": ids, "labels": labels}

    def _shared(self, chosen: Sequence[Columns], rejected: Sequence[Columns]) -> dict[str, Any]:
        # What both documents of a pair begin with is in the row once, in front of the chosen one.
        documents, pairs = [*chosen, *rejected], len(chosen)
        lengths = [len(document["input_ids"]) for document in documents]
        side_by_side: list[tuple[int, int]] = []  # the last token that both share belongs to each of them
        for pair, (one, other) in enumerate(zip(chosen, rejected)):
            side_by_side += [(pair, 0), (pairs + pair, max(in_common(_prompt(one), _prompt(other)) - 1, 0))]
        segments, parts = prefix_tree(lengths, side_by_side, range(len(documents))).segments, []
        for each in segments:
            positions = restarting([lengths[each.sequence]], self.position_ids_start)
            columns = {**documents[each.sequence], "position_ids": positions}
            parts.append({name: values[each.start : each.stop] for name, values in columns.items()})
        batch = self._flatten()(parts)
        parents = [each.parent for each in segments]
        paddings = len(batch["cu_seq_lens_q"]) - 1 - len(parents)
        return {**batch, PARENTS: torch.tensor(parents + [-1] * paddings, dtype=torch.int32)}


def _tokens(index: int, chosen: Columns, rejected: Columns) -> int:
    # A row cannot hold a document without tokens beside the other one of its pair.
    counts = {"chosen": len(chosen["input_ids"]), "rejected": len(rejected["input_ids"])}
    for side, count in counts.items():
        if not count and any(counts.values()):
            raise CollatorError(f"example {index}: no token in prompt and {side}. Remove it from the dataset.")
    return sum(counts.values())


def _prompt(document: Columns) -> Any:
    # The prompt is what stands in front of the first label.
    learned = document["labels"] != IGNORED_LABEL
    return document["input_ids"][: int(learned.argmax()) if learned.any() else len(learned)]


def _ids_of_part(index: int, example: Mapping[str, Any], part: str) -> Array:
    for key in (f"{part}_input_ids", f"{part}_ids"):
        if key in example:
            return as_array(index, key, example[key], integers=True)
    raise CollatorError(
        f"example {index}: expected {part}_input_ids or {part}_ids, found {', '.join(map(str, example)) or 'no keys'}."
    )


def per_document_logps(
    logits: torch.Tensor,
    labels: torch.Tensor,
    documents: Boundaries | torch.Tensor,
    real_tokens: torch.Tensor | None = None,
    ignore_index: int = IGNORED_LABEL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the log-probabilities of the labels over each document of a packed batch.

    In a batch with ``segment_parents``, a document is the path to a segment that no other one continues. Documents are
    in the order of these segments, and the labels of a shared segment count for each document that begins with it.

    Args:
        logits: ``[batch, length, vocabulary]``, unshifted: the logits at a token predict the next token.
        labels: int64 ``[batch, length]``, unshifted. Labels of -100 and the first label of each document are ignored.
        documents: The batch's ``position_ids``, or its :class:`fa2patch.Boundaries`. With
            ``Boundaries(batch["cu_seq_lens_q"], batch["max_length_q"])``, boundaries are not read from the device. A
            batch with shared prompts needs ``parents=batch["segment_parents"]`` too, which is read once.
        real_tokens: The batch's ``real_tokens``, which collators with ``pad_to_multiple_of`` return: ``[batch,
            length]``, 0 in the padding. Documents of padding have no sum. It is read once.
        ignore_index: A label that is ignored, too, as ``DataCollatorForCompletionOnlyLM`` takes it.

    Returns:
        The sums, float32 ``[documents]`` (float64 for float64 logits), and the numbers of tokens in them, int64
        ``[documents]``. A sum divided by its number is the mean that IPO uses.

    Raises:
        BadBatch: The shapes do not match, the first token of a segment with a parent has a label, or the last document
            has no label and there are no ``real_tokens``, so that it may be padding.
        BadPositionIds: ``documents`` are not valid position ids.
    """
    if logits.dim() != 3 or tuple(labels.shape) != tuple(logits.shape[:2]):
        raise BadBatch(
            f"expected logits [batch, length, vocabulary] and labels [batch, length], found {list(logits.shape)} and "
            f"{list(labels.shape)}."
        )
    for name, numbers in (("position_ids", documents), ("real_tokens", real_tokens)):
        if isinstance(numbers, torch.Tensor) and numbers.numel() != labels.numel():
            raise BadBatch(f"expected {name} {list(labels.shape)}, found {list(numbers.shape)}.")
    found = documents if isinstance(documents, Boundaries) else boundaries(documents)
    sums, counts, starts = _sums(logits, labels.flatten().to(logits.device), found, ignore_index)
    if real_tokens is not None:
        real = real_tokens.flatten().to(starts.device)[starts.clamp(max=labels.numel() - 1)] != 0
        return sums[real], counts[real]
    if not int(counts[-1]):  # it is padding, or a completion of which nothing was kept
        raise BadBatch(
            f"per_document_logps: the last of {len(counts)} documents has no label, so it may be the padding of "
            "pad_to_multiple_of, which is no document. Pass real_tokens: batch['real_tokens'] as the collator made "
            "them, or torch.ones_like(labels) if the row has no padding."
        )
    return sums, counts


def _sums(
    logits: torch.Tensor, labels: torch.Tensor, found: Boundaries, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # `starts` are the first tokens of the documents' last segments.
    cu = found.cu_seqlens.to(logits.device, torch.int64)
    token, starts = torch.arange(len(labels), device=logits.device), cu[:-1]
    segment = document_of(cu, len(labels))
    learned = (labels != IGNORED_LABEL) & (labels != ignore_index) & (token != cu[segment])
    (at,) = learned.nonzero(as_tuple=True)
    chosen = logits.flatten(0, 1)[at - 1]
    chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
    logps = -torch.nn.functional.cross_entropy(chosen, labels[at], reduction="none")
    sums = logps.new_zeros(len(found)).index_add(0, segment[at], logps)
    counts = torch.zeros_like(starts).index_add(0, segment[at], torch.ones_like(at))
    if found.parents is None:
        return sums, counts, starts
    padded = torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)
    require_no_first_labels(padded[:, None], starts, found.parents)
    assert found.tree is not None
    leaves = found.tree.leaves
    paths = [(number, above) for number, leaf in enumerate(leaves) for above in found.tree.path(leaf)]
    document, above = torch.tensor(paths).T.to(logits.device)
    sums, counts = (of.new_zeros(len(leaves)).index_add(0, document, of[above]) for of in (sums, counts))
    return sums, counts, starts[leaves]
