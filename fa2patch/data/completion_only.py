"""Collator for training on completions only.

It has the interface of the collator in TRL up to 0.19.1 and works with any TRL version or without TRL.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Union

import numpy as np

from ..documents.names import IGNORED_LABEL
from ..documents.row_shape import rounded_up
from ..errors import CollatorError
from .collators import DataCollatorWithFlattening, of_framework
from .columns import Array, Columns, integer, present, read_examples, shown
from .loss_weights import check_columns, weighted

Template = Union[str, Sequence[int]]
Example = Union[Mapping[str, Any], Sequence[int]]
Span = tuple[int, int]  # the first token of a template, and the token behind its last one


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
        mlm: Must be False.
        ignore_index: Label of tokens that are not in the loss.
        padding_free: Return one packed row. By default a padded batch with an ``attention_mask`` is returned.
        pad_to_multiple_of: Pad the row, or the rows of a padded batch, to a multiple of this many tokens, or by the
            rules ``"power"`` and ``"eighth"`` of :class:`fa2patch.DataCollatorWithFlattening`.
        return_tensors: ``"pt"`` or ``"np"``.
        return_flash_attn_kwargs: Whether ``padding_free=True`` returns ``cu_seq_lens_*`` and ``max_length_*``. None
            returns ``cu_seq_lens_*`` as TRL 0.16 to 0.19 does, int32 ``[1, documents + 1]``. True returns them as
            :class:`fa2patch.DataCollatorWithFlattening` does, int32 ``[documents + 1]``, which flash attention takes.
        return_seq_idx, position_ids_start: See :class:`fa2patch.DataCollatorWithFlattening`. Only for
            ``padding_free=True``.
        loss_weights: See :class:`fa2patch.DataCollatorWithFlattening`. Labels outside the loss are then -100.
        mlm_probability, mask_replace_prob, random_replace_prob, whole_word_mask, seed, tf_experimental_compile: TRL's
            class accepts them too. They have no effect, because ``mlm`` is False.

    Attributes:
        empty: See :class:`fa2patch.DataCollatorWithFlattening`.

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
        padding_free: bool = False,
        pad_to_multiple_of: int | str | None = None,
        return_tensors: str = "pt",
        return_flash_attn_kwargs: bool | None = None,
        return_seq_idx: bool = False,
        position_ids_start: int = 0,
        mlm_probability: float | None = 0.15,
        mask_replace_prob: float = 0.8,
        random_replace_prob: float = 0.1,
        whole_word_mask: bool = False,
        seed: int | None = None,
        tf_experimental_compile: bool = False,
        loss_weights: str | None = None,
    ) -> None:
        if mlm:
            raise CollatorError("mlm=True masks tokens at random, which is not training on completions. Leave it out.")
        for name, template in (
            ("response_template", response_template),
            ("instruction_template", instruction_template),
        ):
            if _is_tokenizer(template):
                raise CollatorError(
                    f"{name}: expected text or token ids, found a tokenizer ({type(template).__name__}). Are the "
                    "arguments the other way round? Templates come first, and the tokenizer is named: "
                    'DataCollatorForCompletionOnlyLM("Answer:", tokenizer=tokenizer).'
                )
        self.tokenizer = tokenizer
        self.response_template, self.instruction_template = response_template, instruction_template
        self.response_token_ids = self._encoded("response_template", response_template)
        self.instruction_token_ids = (
            self._encoded("instruction_template", instruction_template) if instruction_template is not None else None
        )
        self.ignore_index, self.loss_weights = integer("ignore_index", ignore_index), loss_weights
        self.padding_free, self.pad_to_multiple_of = padding_free, pad_to_multiple_of
        self.return_tensors, self.return_flash_attn_kwargs = return_tensors, return_flash_attn_kwargs
        self.return_seq_idx, self.position_ids_start = return_seq_idx, position_ids_start
        # TRL's class and its subclasses have these attributes
        self.mlm, self.mlm_probability, self.whole_word_mask, self.seed = False, mlm_probability, whole_word_mask, seed
        self.mask_replace_prob, self.random_replace_prob = mask_replace_prob, random_replace_prob
        self.tf_experimental_compile = tf_experimental_compile
        self.empty = 0
        self._flatten()

    def __call__(self, features: Iterable[Example], return_tensors: str | None = None) -> MutableMapping[str, Any]:
        """Return one packed row of T tokens, or a padded batch ``[examples, longest]``.

        Args:
            features: Examples: mappings as for :class:`fa2patch.DataCollatorWithFlattening`, or lists of token ids.
                ``labels`` default to ``input_ids``. Labels that are ``ignore_index`` or -100 are not in the loss. An
                end-of-sequence token that is also the padding token stays in the loss (TRL leaves it out).
            return_tensors: Overrides the option ``return_tensors`` for this call.

        Returns:
            A dict, or a ``BatchEncoding`` of Transformers if there is a tokenizer and the batch has no lengths. By
            default: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[examples, longest]``. With
            ``padding_free=True``: ``input_ids``, ``labels`` and ``position_ids``, int64 ``[1, T]``, and the keys that
            the options add. The first label of each document is then ``ignore_index``. Other columns of the examples,
            with one number per token, are returned too.

        Raises:
            CollatorError: An example cannot be read, ``return_tensors`` is unknown, or a padded batch needs padding and
                the tokenizer has no ``pad_token_id``.

        Warns:
            UserWarning: A template is not found in an example, so none of the example's tokens are in the loss. The
                warning gives the example's index in the batch.
        """
        framework = self._flatten().framework(return_tensors)
        return self.torch_call(features) if framework == "pt" else self.numpy_call(features)

    def torch_call(self, examples: Iterable[Example]) -> MutableMapping[str, Any]:
        """Return the batch as torch tensors. A subclass of TRL's collator may override this method."""
        return self._batch(examples, "pt")

    def numpy_call(self, examples: Iterable[Example]) -> MutableMapping[str, Any]:
        """Return the batch as numpy arrays."""
        return self._batch(examples, "np")

    def tf_call(self, examples: Iterable[Example]) -> MutableMapping[str, Any]:
        """Raise :class:`CollatorError`. TRL's class has this method for TensorFlow."""
        raise CollatorError("tf_call: expected torch_call or numpy_call, because fa2patch makes no TensorFlow tensors.")

    def _flatten(self) -> DataCollatorWithFlattening:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return DataCollatorWithFlattening(
            return_tensors=self.return_tensors,
            separator_id=self._ignored,
            return_flash_attn_kwargs=self.return_flash_attn_kwargs is not False,
            return_seq_idx=self.return_seq_idx,
            position_ids_start=self.position_ids_start,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_token_id=0 if pad is None else pad,
            loss_weights=self.loss_weights,
        )

    @property
    def _ignored(self) -> int:
        return IGNORED_LABEL if self.loss_weights else self.ignore_index

    def _batch(self, features: Iterable[Example], framework: str) -> MutableMapping[str, Any]:
        given = present(features, bare_ids=True)
        flat = read_examples(given, self.position_ids_start)
        check_columns(flat, self.loss_weights)
        examples = flat.examples()
        self.empty += len(given) - len(examples)
        for index, example in zip(flat.kept, examples):
            example["labels"] = self._labels(index, example)
        if self.padding_free:
            batch = self._flatten()(examples, framework)
            batch["labels"][:, sum(flat.lengths) :] = self._ignored
            if self.return_flash_attn_kwargs is None:
                batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = batch["cu_seq_lens_q"][None]
        else:
            batch = self._padded(examples, framework)
        return batch if self.tokenizer is None else _as_encoding(batch)

    def _encoded(self, name: str, template: Template) -> list[int]:
        if isinstance(template, str):
            if self.tokenizer is None:
                raise CollatorError(f"{name} is text: a tokenizer is needed, or the template's token ids.")
            if not _is_tokenizer(self.tokenizer):
                raise CollatorError(
                    f"tokenizer: expected an object with encode and decode, found {shown(self.tokenizer)}. "
                    "AutoTokenizer.from_pretrained(name) makes one."
                )
            ids = self.tokenizer.encode(template, add_special_tokens=False)
        elif isinstance(template, Iterable):
            ids = template
        else:
            raise CollatorError(f"{name}: expected text or token ids, found {shown(template)}.")
        found = [integer(name, one) for one in ids]
        if not found:
            raise CollatorError(f"{name}: expected text or token ids, found {template!r}, which holds no token.")
        return found

    def _labels(self, index: int, example: Columns) -> Array:
        ids = example["input_ids"]
        both = self.response_template, self.instruction_template
        text = self._decode(ids) if any(isinstance(template, str) for template in both) else ""
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
        return np.where(learned, given, self._ignored)

    def _spans(self, ids: Array, template: Template, token_ids: Sequence[int], text: str) -> list[Span]:
        # A tokenizer may split a template into different tokens in another context. If the text holds the template more
        # often than the ids do, it is searched for in the text. A token that overlaps it belongs to it.
        length = len(token_ids)
        windows = np.lib.stride_tricks.sliding_window_view(ids, length) if len(ids) >= length else ids[:0, None]
        spans = [(int(at), int(at) + length) for at in np.flatnonzero((windows == token_ids).all(axis=1))]
        if not isinstance(template, str) or text.count(template) <= len(spans):
            return spans
        spans, at = [], text.find(template)
        while at >= 0:
            end = at + len(template)
            spans.append((self._up_to(ids, at, False), self._up_to(ids, end, True)))
            at = text.find(template, end)
        return spans

    def _up_to(self, ids: Array, characters: int, inside: bool) -> int:
        # This counts the tokens of the first `characters`. With `inside`, a token that crosses their end counts, too.
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
            stacklevel=6,
        )

    def _padded(self, examples: Sequence[Columns], framework: str) -> dict[str, Any]:
        columns = [{**one, "attention_mask": np.ones_like(one["input_ids"])} for one in examples]
        lengths = [len(one["input_ids"]) for one in columns]
        pad, width = getattr(self.tokenizer, "pad_token_id", None), rounded_up(max(lengths), self.pad_to_multiple_of)
        if pad is None and min(lengths) < width:
            raise CollatorError("padding_free=False needs a tokenizer with a pad_token_id. Set tokenizer.pad_token.")
        left, fill = getattr(self.tokenizer, "padding_side", "right") == "left", {"labels": self._ignored}
        fill["input_ids"] = 0 if pad is None else pad

        def filled(key: str, values: Array) -> Array:
            missing = width - len(values)
            sides = (missing, 0) if left else (0, missing)
            return np.pad(values, sides, constant_values=fill.get(key, 0))

        keys = dict.fromkeys(["input_ids", "attention_mask", "labels", *columns[0]])
        batch = {key: np.stack([filled(key, one[key]) for one in columns]) for key in keys}
        if self.loss_weights:
            flat = {key: values.flatten() for key, values in batch.items()}
            found = weighted(flat, [width] * len(columns), self.loss_weights)
            batch.update({key: values.reshape(-1, width) for key, values in found.items()})
        return of_framework(framework, batch)


def _is_tokenizer(given: object) -> bool:
    # Text has `encode` too, and bytes have `decode`.
    return all(callable(getattr(given, name, None)) for name in ("encode", "decode"))


def _as_encoding(batch: dict[str, Any]) -> MutableMapping[str, Any]:
    # A BatchEncoding has to(device). A batch with lengths holds integers, which `to` rejects up to Transformers 4.42,
    # so it stays a dict.
    if any(isinstance(value, int) for value in batch.values()):
        return batch
    try:
        from transformers import BatchEncoding
    except ImportError:
        return batch
    encoding: MutableMapping[str, Any] = BatchEncoding(batch)
    return encoding
