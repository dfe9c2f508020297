"""Position ids on several axes (mRoPE): whether a model takes its tokens' own count as one more, in front."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def takes_text_axis(decoder: Any) -> bool:
    """Whether a decoder takes ids ``[4, batch, length]``, the text's axis first: from 4.54 on most do.

    Those that do compare the number of axes with 4 in their forward, and nothing else tells them from the others,
    which compute with the first three of any four without a word.
    """
    return _has_a_four(type(decoder).forward)


def _has_a_four(forward: Any) -> bool:
    return 4 in getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_consts", ())


def without_text_axis(model: Any, forward: Any, position_ids: Any) -> Any:
    """Four axes' ids less the first, for a decoder that rotates by three and does not take four; others as they are."""
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() != 3 or len(position_ids) != 4:
        return position_ids
    loops = isinstance(model._modules.get("layers"), torch.nn.ModuleList)
    return position_ids[1:] if loops and _rotates_by_three(model.config) and not _has_a_four(forward) else position_ids


def _rotates_by_three(config: Any) -> bool:
    settings = [getattr(config, name, None) for name in ("rope_scaling", "rope_parameters")]
    return any(len(found["mrope_section"]) == 3 for found in settings if found and "mrope_section" in found)
