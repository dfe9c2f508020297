"""Options that several commands share, checked by click before a model is built, so that a mistake is one sentence.

A function that is an option's ``type`` raises ``click.BadParameter``, to which click adds the option's name.
"""

from __future__ import annotations

import importlib
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")
"""The attention implementations of every Transformers version from 4.36 on."""


def dtype(name: str) -> torch.dtype:
    """The floating-point dtype of torch with this name."""
    import torch

    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise click.BadParameter(f"looked for float32, bfloat16 or float16, found {name!r}.")
    return found


def device(name: str) -> torch.device:
    """The torch device of this name, which this machine must have."""
    import torch

    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except Exception as error:  # an AssertionError, a RuntimeError or a NotImplementedError, depending on the build
        has = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise click.BadParameter(
            f"looked for a device of this machine ({', '.join(['cpu', *has])}), found {name!r}: "
            f"{str(error).strip().splitlines()[0]}. torch is {torch.__version__}."
        ) from None
    return found


def implementation(name: str) -> str:
    """The name of an attention implementation that the installed Transformers has, or of a kernel of the hub."""
    if "/" in name:
        return name
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    functions = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", {})
    known = list(dict.fromkeys([*IMPLEMENTATIONS, *(key for key in functions if "|" not in key)]))
    if name in known:
        return name
    close = [one for one in known if one.startswith(name)] or get_close_matches(name, known, n=1, cutoff=0.4)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise click.BadParameter(f"looked for one of {', '.join(known)}, found {name!r}.{meant}")


def kernel(name: str) -> str:
    """The name of a kernel that can run here, or ``"auto"``."""
    from ..errors import KernelUnavailable, UnknownKernel
    from ..kernels import check_name

    try:
        check_name(name)
    except (UnknownKernel, KernelUnavailable) as error:
        raise click.BadParameter(str(error)) from None
    return name


class OutFile(click.Path):
    """A file to write, whose folder must exist; checked before anything takes time."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"looked for the folder {str(path.parent)!r} to write {path.name!r} to, found none.", param, ctx)
        return path


as_json_option = click.option("--json", "as_json", is_flag=True, help="For machines: JSON on stdout.")
remote_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the modeling code that comes with the model."
)
attention_option = click.option(
    "--attn-implementation",
    type=implementation,
    metavar="A",
    help="eager, sdpa or flash_attention_2. Default: the model's.",
)
pretrained_option = click.option(
    "--pretrained", is_flag=True, help="MODEL is a name on the hub, also without a slash (gpt2)."
)
