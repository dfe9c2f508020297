"""Pass a whole row to a mixer in one call if its kernels keep documents apart by ``seq_idx`` and ``cu_seq_lens_q``.

The kernels of causal-conv1d, mamba-ssm and flash-linear-attention can do so. It depends on the version whether the
keywords reach them, and many mixers accept the keywords and ignore them silently. Therefore each mixer is tried on the
first packed row of each kind of call.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Callable

import torch

from ..._types import Function
from ...documents.boundaries import Boundaries
from ...trying import out_of_reach, says_nothing, without_gradients
from .. import inspecting

NEVER_ON = ("cpu", "meta")
"""Devices for which none of these packages has a kernel."""

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference by dtype, relative to the largest absolute value; 3e-2 in half precision. Leaks are exact."""


def keywords(forward: Function, boundaries: Boundaries, tokens: int) -> dict[str, Any]:
    """Return the collator lengths of a row that a mixer's ``forward`` accepts.

    ``seq_idx`` is int32 ``[1, tokens]``, ``cu_seq_lens_*`` int32 ``[documents + 1]``, ``max_length_*`` an int.
    """
    cu = boundaries.cu_seqlens
    number = torch.arange(len(cu) - 1, device=cu.device, dtype=torch.int32)
    every = {
        "seq_idx": number.repeat_interleave(cu.diff().long(), output_size=tokens)[None],
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), cu),
        **dict.fromkeys(("max_length_q", "max_length_k"), boundaries.max_seqlen),
    }
    return {name: every[name] for name in inspecting.accepted(forward, every)}


def may_be(forward: Function, module: torch.nn.Module, hidden: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Whether a trial can be made: kernels may exist, the row has several documents, and ``forward`` takes lengths.

    DeepSpeed's ZeRO-3 is left out, because it would take a trial's backward for the training's.
    """
    if hidden.device.type in NEVER_ON or len(lengths) < 2:
        return False
    takes = inspecting.accepted(forward, ("seq_idx", "cu_seq_lens_q"))
    return bool(takes) and not any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def keeps_apart(
    whole: Callable[[torch.Tensor], Any],
    each: Callable[[torch.Tensor], Any],
    hidden: torch.Tensor,
    lengths: Sequence[int],
) -> tuple[bool, str]:
    """Try whether a mixer keeps documents apart when it gets a whole row.

    Outputs and gradients must agree within :data:`TOLERANCE`. One document must send no gradient into the others, and
    its output must not change by a bit when the others change.

    Args:
        whole: computes a row with the mixer in one call.
        each: computes a row with the mixer document by document.
        hidden: the hidden states ``[batch, length, width]``.
        lengths: the documents' lengths, in tokens.

    Returns:
        Whether the mixer passes, and the reason if it does not.

    Raises:
        Exception: an error that says nothing about the mixer (:func:`~fa2patch.trying.says_nothing`).
    """
    try:
        with out_of_reach(hidden.device):
            why = _difference(whole, each, hidden, lengths)
    except Exception as error:  # unknown keywords or a kernel that does not build: documents are computed one by one
        if says_nothing(error):
            raise
        why = f"fails: {type(error).__name__}: {error}".splitlines()[0]
    return not why, f"tried on this machine with a whole row, it {why}" if why else ""


def _difference(
    whole: Callable[[torch.Tensor], Any],
    each: Callable[[torch.Tensor], Any],
    hidden: torch.Tensor,
    lengths: Sequence[int],
) -> str:
    ends = [*accumulate(lengths)]
    start, end = max(zip(ends, ends[1:]), key=lambda span: span[1] - span[0])  # not the first: nothing precedes it
    inside = torch.zeros(ends[-1], dtype=torch.bool, device=hidden.device)
    inside[start:end] = True
    inside = inside.view(hidden.shape[:2])
    given = hidden.detach().clone().requires_grad_()
    near = TOLERANCE.get(hidden.dtype, 3e-2)
    found, expected = _first(whole(given)), _first(each(given))
    if not _close(found, expected, near):
        return "computes something else than on the documents one by one"
    found_grad, expected_grad = (
        torch.autograd.grad(output[inside].float().square().sum(), given)[0] for output in (found, expected)
    )
    if found_grad[~inside].any():
        return "sends gradients from one document into another"
    if not _close(found_grad, expected_grad, near):
        return "has other gradients than on the documents one by one"
    with without_gradients():
        among_others = _first(whole(torch.where(inside[..., None], given, given.flip(1) * 2 + 1)))
    if not torch.equal(among_others[inside], found[inside]):
        return "changes a document when the others change"
    return ""


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    if found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())
