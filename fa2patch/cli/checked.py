"""Options that are checked before a model is built, so that a mistake is one sentence."""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")
"""The attention implementations of every Transformers version from 4.36 on."""


def dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of this name.

    Raises:
        click.BadParameter: There is none, or it is not a floating-point dtype.
    """
    import torch

    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise click.BadParameter(f"looked for float32, bfloat16 or float16, found {name!r}.", param_hint="--dtype")
    return found


def device(name: str) -> torch.device:
    """The torch device of this name.

    Raises:
        click.BadParameter: torch knows no such device, or this machine does not have it.
    """
    import torch

    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except Exception as error:  # an AssertionError, a RuntimeError or a NotImplementedError, depending on the build
        has = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise click.BadParameter(
            f"looked for a device of this machine ({', '.join(['cpu', *has])}), found {name!r}: "
            f"{str(error).strip().splitlines()[0]}. torch is {torch.__version__}.",
            param_hint="--device",
        ) from None
    return found


def attention(name: str | None) -> str | None:
    """The name of an attention implementation that the installed Transformers has.

    Raises:
        click.BadParameter: It has none of this name.
    """
    if name is None or "/" in name:  # a kernel of the hub
        return name
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {})
    known = list(dict.fromkeys([*IMPLEMENTATIONS, *(key for key in functions if "|" not in key)]))
    if name in known:
        return name
    close = [one for one in known if one.startswith(name)] or get_close_matches(name, known, n=1, cutoff=0.4)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise click.BadParameter(
        f"looked for one of {', '.join(known)}, found {name!r}.{meant}", param_hint="--attn-implementation"
    )
