"""``share``, which puts equal prefixes of sequences into a row once, and the :class:`Shared` that it returns."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..documents.names import IGNORED_LABEL, stated
from ..documents.prefixes import LEAST, prefix_tree
from ..errors import PackingError
from .budget import positive
from .strategies import Ints


@dataclass(frozen=True, eq=False, repr=False)
class Shared:
    """A packed row of sequences, and where each of them is in it.

    The row holds T tokens in segments. A segment continues its parent, and a sequence is a path from a root to a leaf.
    Every sequence ends in a leaf of its own, which has at least its last token, and the leaves are in the order of the
    sequences. The last token that sequences share belongs to each of their branches, so the first token that differs is
    predicted inside its branch.

    Attributes:
        batch: The arguments of the forward of a patched model: ``input_ids`` and ``position_ids``, int64 ``[1, T]``;
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 ``[segments + 1]``; ``max_length_q`` and ``max_length_k``,
            int; ``segment_parents``, int32 ``[segments]``.
        labels: Labels for the model's own shifted loss, int64 ``[1, T]``. If ``prompts`` were given, a label for every
            token behind a prompt, so the loss is that of the sequences without sharing. Otherwise a label for every
            token, except the first of each segment: what sequences share is counted once, and the last token that
            they share is not counted. Use :meth:`logps` for a loss that counts it for each sequence.
        lengths: The sequences' lengths in tokens.
    """

    batch: dict[str, Any]
    labels: torch.Tensor
    lengths: tuple[int, ...]
    _places: torch.Tensor
    _before: torch.Tensor

    def __repr__(self) -> str:
        return (
            f"<Shared: {len(self.lengths)} sequences of {self.tokens_before} tokens in {self.tokens} tokens, "
            f"{len(self.batch['segment_parents'])} segments>"
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in the row."""
        return int(self.labels.shape[1])

    @property
    def tokens_before(self) -> int:
        """Number of tokens of all sequences, which the row would hold without sharing."""
        return sum(self.lengths)

    @property
    def indices(self) -> tuple[torch.Tensor, ...]:
        """Where each sequence's tokens are in the row, int64 ``[length]``, in the order of the sequences."""
        return torch.split(self._places, list(self.lengths))

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return each sequence's part of something that the model made for each token of the row.

        Args:
            values: ``[1, T, ...]``, such as hidden states, or ``[T, ...]``.

        Returns:
            ``[length, ...]`` for each sequence, in the order of the sequences.

        Raises:
            PackingError: There is not one value for each token of the row.
        """
        rows = self._rows(values)
        return list(torch.split(rows[self._places.to(rows.device)], list(self.lengths)))

    def logps(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """Return the log-probability of each sequence's tokens, except its first, which nothing predicts.

        Gradients flow back into what is shared from every sequence that reads it.

        Args:
            logits: The model's output for ``batch``, ``[1, T, vocabulary]``, unshifted.

        Returns:
            float32 ``[length - 1]`` (float64 for float64 logits) for each sequence, in the order of the sequences. The
            entry ``t - 1`` belongs to token ``t``.

        Raises:
            PackingError: There are not logits for each token of the row.
        """
        rows = self._rows(logits)
        if rows.dim() != 2:
            raise PackingError(f"logps: expected logits [1, {self.tokens}, vocabulary], found {list(logits.shape)}.")
        before, ids = self._before.to(rows.device), self.batch["input_ids"][0].to(rows.device)
        precise = torch.float64 if rows.dtype == torch.float64 else torch.float32
        normalizers = rows.to(precise).logsumexp(-1)
        found = rows[before, ids].to(precise) - normalizers[before]
        return [own[1:] for own in self.split(found)]

    def to(self, device: torch.device | str) -> Shared:
        """Return the same row with its tensors on another device."""
        moved = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in self.batch.items()
        }
        labels, places, before = (each.to(device) for each in (self.labels, self._places, self._before))
        return replace(self, batch=moved, labels=labels, _places=places, _before=before)

    def _rows(self, values: torch.Tensor) -> torch.Tensor:
        shape = tuple(values.shape)
        if shape[:2] == (1, self.tokens):
            return values[0]
        if shape[:1] == (self.tokens,):
            return values
        raise PackingError(
            f"expected one value for each token of the row, [1, {self.tokens}, ...], found {list(shape)}. Pass what "
            "the model returns for all tokens of shared.batch."
        )


def share(
    sequences: Iterable[Any], *, prompts: Sequence[int] | torch.Tensor | None = None, least: int = LEAST
) -> Shared:
    """Put sequences into one packed row that holds what they begin with in common only once.

    Equal prefixes are found at any depth, such as a system prompt, prompts below it, and completions below each of
    these. In the row, the sequences' own parts keep the order of the sequences, and each prefix stands in front of the
    first sequence that begins with it. The work is done on the host.

    Args:
        sequences: Token ids of each sequence, without padding: a list, an array or a tensor ``[length]``.
        prompts: Number of tokens at the start of each sequence that may be shared, such as its prompt's length. What
            follows is in the row for each sequence, even if it is equal. None: every equal prefix may be shared.
        least: A prefix is shared only if this saves at least so many tokens, over all sequences that begin with it.
            1 shares every prefix. The default leaves out prefixes of a few tokens, such as a template's first ones:
            each would be one more sequence in the attention calls, and may add a call in each layer.

    Raises:
        PackingError: There are no sequences, a sequence is empty or is not ``[length]`` integers, or an option is
            invalid.
    """
    arrays = _sequences(sequences)
    lengths = [len(array) for array in arrays]
    limits = lengths if prompts is None else _limits_of(prompts, lengths)
    least = positive("least", least, "number of tokens (1 shares every prefix)")
    shareable = [array[:limit] for array, limit in zip(arrays, limits)]
    keys = [tokens.astype(">i8").tobytes() for tokens in shareable]  # bytes sort as their tokens, fast
    order = sorted(range(len(keys)), key=keys.__getitem__)  # those with a common prefix are neighbours
    # the last token that sequences share belongs to each of them
    shared = [max(in_common(shareable[one], shareable[other]) - 1, 0) for one, other in zip(order, order[1:])]
    prefixes = prefix_tree(lengths, zip(order, [0, *shared]), range(len(lengths)), least)

    segments, tree = prefixes.segments, prefixes.tree
    ids = np.concatenate([arrays[each.sequence][each.start : each.stop] for each in segments])
    ends = np.cumsum([0, *tree.lengths], dtype=np.int64)
    labels = ids.copy()
    labels[ends[:-1]] = IGNORED_LABEL
    before = np.arange(-1, len(ids) - 1, dtype=np.int64)
    for at, each in zip(ends.tolist(), segments):
        before[at] = ends[each.parent + 1] - 1 if each.parent >= 0 else at
        of_prompt = 0 if prompts is None else min(limits[each.sequence], each.stop) - each.start
        labels[at : at + max(of_prompt, 0)] = IGNORED_LABEL
    cu, longest = torch.from_numpy(ends.astype(np.int32)), max(tree.lengths)
    batch = {
        "input_ids": torch.from_numpy(ids)[None],
        "position_ids": tree.positions[None],
        **stated(cu, longest),
        "segment_parents": torch.tensor(tree.parents, dtype=torch.int32),
    }
    places = prefixes.places(lengths)
    return Shared(batch, torch.from_numpy(labels)[None], tuple(lengths), places, torch.from_numpy(before))


def in_common(one: Ints, other: Ints) -> int:
    """The number of tokens that two sequences begin with in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _sequences(sequences: Any) -> list[Ints]:
    try:
        given = None if isinstance(sequences, (str, bytes)) else list(sequences)
    except TypeError:
        given = None
    if not given:
        found = "none" if given == [] else repr(sequences)
        raise PackingError(f"share: expected at least one sequence of token ids, found {found}.")
    return [_checked_ids(index, sequence) for index, sequence in enumerate(given)]


def _checked_ids(index: int, sequence: Any) -> Ints:
    try:
        found = np.asarray(sequence.detach().cpu() if isinstance(sequence, torch.Tensor) else sequence)
        shape, dtype = list(found.shape), found.dtype
    except (TypeError, ValueError, RuntimeError) as error:
        raise PackingError(f"sequence {index}: expected token ids [length], found {error}.") from error
    if shape == [0]:
        raise PackingError(f"sequence {index}: no tokens. Leave it out.")
    if len(shape) != 1 or dtype.kind not in "iu":
        raise PackingError(
            f"sequence {index}: expected token ids, integers [length] without padding, found "
            f"{type(sequence).__name__} of {dtype} {shape}."
        )
    return found.astype(np.int64)


def _limits_of(prompts: Any, lengths: Sequence[int]) -> list[int]:
    try:
        limits = [operator.index(each) for each in prompts]
    except TypeError as error:
        raise PackingError(f"prompts: expected one integer for each sequence, found {prompts!r}.") from error
    if len(limits) != len(lengths):
        raise PackingError(
            f"prompts: expected one number for each of {len(lengths)} sequences, found {len(limits)}. Repeat a "
            "prompt's length for each of its completions."
        )
    for index, (limit, length) in enumerate(zip(limits, lengths)):
        if not 0 <= limit <= length:
            raise PackingError(
                f"prompts: sequence {index} has {length} tokens, so its prompt has 0 to {length}, found {limit}."
            )
    return limits
