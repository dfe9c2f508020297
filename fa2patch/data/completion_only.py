"""Collator for training on completions only.

It has the interface of the collator in TRL 0.10.1 to 0.19.1 and works with any TRL version or without TRL.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import torch

from ..documents.names import IGNORED_LABEL
from ..errors import CollatorError
from .collators import DataCollatorWithFlattening
from .flattening import Array, Columns, integer, read, require_same_keys

Template = Union[str, Sequence[int]]
_Span = tuple[int, int]


class DataCollatorForCompletionOnlyLM:
    """Concatenate examples into one row without padding, with labels only in the responses.

    A token is in the loss if it comes after a response template and before the next instruction template. Without
    ``instruction_template``, the tokens after an example's last response template are in the loss. A template given
    as text is searched for as token ids and as text, because a tokenizer may split it into different tokens in another
    context. A token that overlaps a template found in the text belongs to the template.

    Args:
        response_template: Start of a response, as text or as token ids.
        instruction_template: Start of the other side's turns, for examples of several turns.
        tokenizer: Needed for templates given as text. It must have ``encode(text, add_special_tokens=False)`` and
            ``decode(ids, clean_up_tokenization_spaces=False)``. Its ``pad_token_id`` is used for padding, and its
            ``padding_side`` for a padded batch.
        mlm: Must be False. The parameter exists only to match TRL's signature.
        ignore_index: Label of tokens that are not in the loss.
        padding_free: Return one packed row. If False, return a padded batch with an ``attention_mask``.
        pad_to_multiple_of: Pad the row, or the rows of a padded batch, to a multiple of this many tokens.
        return_tensors: ``"pt"`` or ``"np"``.
        return_flash_attn_kwargs, return_seq_idx: See :class:`fa2patch.DataCollatorWithFlattening`. Only for
            ``padding_free=True``.
        position_ids_start: See :class:`fa2patch.DataCollatorWithFlattening`.

    Raises:
        CollatorError: A template is empty, a template is text and there is no tokenizer, ``mlm`` is True, or another
            option is invalid.
    """

    def __init__(
        self,
        response_template: Template,
        instruction_template: Template | None = None,
        tokenizer: Any = None,
        mlm: bool = False,
        *,
        ignore_index: int = -100,
        padding_free: bool = True,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
        return_flash_attn_kwargs: bool = False,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
    ) -> None:
        if mlm:
            raise CollatorError("mlm=True masks tokens at random, which is not training on completions. Leave it out.")
        self.tokenizer = tokenizer
        self.response_template, self.instruction_template = response_template, instruction_template
        self.response_token_ids = self._encoded("response_template", response_template)
        self.instruction_token_ids = (
            self._encoded("instruction_template", instruction_template) if instruction_template is not None else None
        )
        self.ignore_index = integer("ignore_index", ignore_index)
        self.padding_free = padding_free
        pad = getattr(tokenizer, "pad_token_id", None)
        self.flatten = DataCollatorWithFlattening(
            return_tensors=return_tensors,
            separator_id=self.ignore_index,
            return_flash_attn_kwargs=return_flash_attn_kwargs,
            return_seq_idx=return_seq_idx,
            position_ids_start=position_ids_start,
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=0 if pad is None else pad,
        )

    def __call__(
        self, features: Iterable[Mapping[str, Any] | Sequence[int]], return_tensors: str | None = None
    ) -> dict[str, Any]:
        """Return one packed row of T tokens, or a padded batch ``[examples, longest]``.

        Args:
            features: Examples: mappings as for :class:`fa2patch.DataCollatorWithFlattening`, or lists of token ids.
                ``labels`` default to ``input_ids``. Labels that are ``ignore_index`` or -100 are not in the loss. An
                end-of-sequence token that is also the padding token stays in the loss (TRL leaves it out).
            return_tensors: Overrides the option ``return_tensors`` for this call.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids``: int64 ``[1, T]``, and the keys that the options add. The
            first label of each document is ``ignore_index``. With ``padding_free=False``: ``input_ids``,
            ``attention_mask`` and ``labels``, int64 ``[examples, longest]``. Other columns of the examples, with one
            number per token, are returned too.

        Raises:
            CollatorError: An example cannot be read, ``return_tensors`` is unknown, or a padded batch needs padding and
                the tokenizer has no ``pad_token_id``.

        Warns:
            UserWarning: A template is not found in an example, so none of the example's tokens are in the loss. The
                warning gives the example's index in the batch.
        """
        mappings = (f if isinstance(f, Mapping) else {"input_ids": f} for f in features)
        examples = [read(index, feature, self.flatten.position_ids_start) for index, feature in enumerate(mappings)]
        require_same_keys(examples)
        for index, example in enumerate(examples):
            example["labels"] = self._labels(index, example)
        if not self.padding_free:
            return self._padded(examples, self.flatten.framework(return_tensors))
        batch = self.flatten(examples, return_tensors)
        tokens = sum(len(example["input_ids"]) for example in examples)
        batch["labels"][:, tokens:] = self.ignore_index
        return batch

    def _encoded(self, name: str, template: Template) -> list[int]:
        if isinstance(template, str):
            if self.tokenizer is None:
                raise CollatorError(f"{name} is text: a tokenizer is needed, or the template's token ids.")
            ids = self.tokenizer.encode(template, add_special_tokens=False)
        else:
            ids = template
        found = [integer(name, one) for one in ids]
        if not found:
            raise CollatorError(f"{name}: expected text or token ids, found {template!r}, which holds no token.")
        return found

    def _labels(self, index: int, example: Columns) -> Array:
        ids = example["input_ids"]
        templates = self.response_template, self.instruction_template
        text = self._decode(ids) if any(isinstance(template, str) for template in templates) else ""
        responses = self._spans(ids, self.response_template, self.response_token_ids, text)
        if not responses:
            self._warn(index, "response_template", self.response_template, ids)
        learned = np.zeros(len(ids), dtype=bool)
        if self.instruction_template is None or self.instruction_token_ids is None:
            learned[responses[-1][1] if responses else len(ids) :] = True
        else:
            instructions = self._spans(ids, self.instruction_template, self.instruction_token_ids, text)
            if not instructions:
                self._warn(index, "instruction_template", self.instruction_template, ids)
                responses = []
            starts = np.array([start for start, _ in instructions], dtype=np.int64)
            for _, end in responses:
                following = starts[starts >= end]
                learned[end : following[0] if len(following) else len(ids)] = True
            for start, end in responses:
                learned[start:end] = False
        given = example.get("labels", ids)
        learned &= (given != self.ignore_index) & (given != IGNORED_LABEL)
        return np.where(learned, given, self.ignore_index)

    def _spans(self, ids: Array, template: Template, token_ids: list[int], text: str) -> list[_Span]:
        """Return the token spans ``(start, end)`` of the template in the ids, or in their text, in order."""
        length = len(token_ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids, length) if len(ids) >= length else ids[:0, None]
        spans = [(int(at), int(at) + length) for at in np.flatnonzero((windows == token_ids).all(axis=1))]
        if not isinstance(template, str) or text.count(template) <= len(spans):
            return spans
        return self._spans_in_text(ids, template, text)

    def _spans_in_text(self, ids: Array, template: str, text: str) -> list[_Span]:
        spans = []
        at = text.find(template)
        while at >= 0:
            end = at + len(template)
            # A token that overlaps the template belongs to it at both ends.
            spans.append((self._tokens_up_to(ids, at, inside=False), self._tokens_up_to(ids, end, inside=True)))
            at = text.find(template, end)
        return spans

    def _tokens_up_to(self, ids: Array, characters: int, inside: bool) -> int:
        """Count the tokens of the first ``characters``; ``inside`` counts a token that crosses the end of them too."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + (not inside)) // 2
            made = len(self._decode(ids[:middle]))
            if inside:
                low, high = (low, middle) if made >= characters else (middle + 1, high)
            else:
                low, high = (middle, high) if made <= characters else (low, middle - 1)
        return low

    def _decode(self, ids: Array) -> str:
        text: str = self.tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        return text

    def _warn(self, index: int, name: str, template: Template, ids: Array) -> None:
        begins = f", which begins {self._decode(ids)[:80]!r}" if self.tokenizer is not None else ""
        warnings.warn(
            f"example {index} of the batch ({len(ids)} tokens{begins}): {name} {template!r} not found, so none of its "
            "tokens are in the loss. Check that the text holds the template and is not truncated before it.",
            UserWarning,
            stacklevel=4,
        )

    def _padded(self, examples: Sequence[Columns], framework: str) -> dict[str, Any]:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        lengths = [len(example["input_ids"]) for example in examples]
        if not lengths:
            raise CollatorError("expected at least one example, found an empty batch.")
        if pad is None and len(set(lengths)) > 1:
            raise CollatorError("padding_free=False needs a tokenizer with a pad_token_id. Set tokenizer.pad_token.")
        multiple = self.flatten.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        fill = {"input_ids": 0 if pad is None else pad, "labels": self.ignore_index}
        left = getattr(self.tokenizer, "padding_side", "right") == "left"

        def padded(values: Array, value: int) -> Array:
            missing = width - len(values)
            return np.pad(values, (missing, 0) if left else (0, missing), constant_values=value)

        columns = [{"attention_mask": np.ones_like(example["input_ids"]), **example} for example in examples]
        order = ["input_ids", "attention_mask", "labels"]
        order += [key for key in columns[0] if key not in order]
        batch = {key: np.stack([padded(one[key], fill.get(key, 0)) for one in columns]) for key in order}
        return batch if framework == "np" else {key: torch.from_numpy(values) for key, values in batch.items()}
