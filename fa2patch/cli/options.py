"""Options that several commands share, checked by click before a model is built, so that a mistake is one sentence.

A function that is an option's ``type`` raises ``click.BadParameter``, to which click adds the option's name.
"""

from __future__ import annotations

import functools
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Callable

import click
import torch

from ..errors import KernelUnavailable, UnknownKernel
from ..kernels import check_name
from ..upstream.transformers_names import ATTENTION_FUNCTIONS, MODELING, imported
from .models import resolve
from .output import in_one_line

# Every Transformers version from 4.36 on has these.
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")


def dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise click.BadParameter(f"looked for float32, bfloat16 or float16, found {name!r}.")
    return found


def device(name: str) -> torch.device:
    try:
        found = torch.device(name)
        torch.empty(1, device=found)
    except Exception as error:  # an AssertionError, a RuntimeError or a NotImplementedError, depending on the build
        has = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise click.BadParameter(
            f"looked for a device of this machine ({', '.join(['cpu', *has])}), found {name!r}: {in_one_line(error)}. "
            f"torch is {torch.__version__}."
        ) from None
    return found


def implementation(name: str) -> str:
    # The installed Transformers has it, or it is a kernel of the hub.
    modeling: Any = imported(MODELING)
    functions = [key for table in ATTENTION_FUNCTIONS for key in getattr(modeling, table, ())]
    known = list(dict.fromkeys([*IMPLEMENTATIONS, *(key for key in functions if "|" not in key)]))
    if "/" in name or name in known:
        return name
    close = [one for one in known if one.startswith(name)] or get_close_matches(name, known, n=1, cutoff=0.4)
    meant = f" Did you mean {close[0]}?" if close else ""
    raise click.BadParameter(f"looked for one of {', '.join(known)}, found {name!r}.{meant}")


def kernel(name: str) -> str:
    try:
        check_name(name)
    except (UnknownKernel, KernelUnavailable) as error:
        raise click.BadParameter(str(error)) from None
    return name


def _has_folder(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path and not path.parent.is_dir():
        raise click.BadParameter(f"looked for the folder {str(path.parent)!r} to write {path.name!r} to, found none.")
    return path


# The folder of a file to write must exist. It is checked before anything takes time.
out_file: dict[str, Any] = {"type": click.Path(dir_okay=False, path_type=Path), "callback": _has_folder}

as_json_option = click.option("--json", "as_json", is_flag=True, help="For machines: JSON on stdout.")


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    # The command gets MODEL as a ModelArgument, and `as_json`.

    @click.argument("model")
    @click.option("--pretrained", is_flag=True, help="MODEL is a name on the hub, also without a slash (gpt2).")
    @click.option("--attn-implementation", type=implementation, metavar="A",
                  help="eager, sdpa or flash_attention_2. Default: the model's.")  # fmt: skip
    @click.option("--trust-remote-code", is_flag=True, help="Run the modeling code that comes with the model.")
    @as_json_option
    @functools.wraps(command)
    def resolved(
        model: str, pretrained: bool, attn_implementation: str | None, trust_remote_code: bool, **options: Any
    ) -> None:
        found = resolve(model, pretrained)
        found.attention, found.trust = attn_implementation, trust_remote_code
        command(found, **options)

    return resolved
