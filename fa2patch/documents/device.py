"""What crosses between the host and a device: reads, and assertions that need none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from .._torch import compiling
from ..errors import PackingNotIsolated


def read(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's values on the host. Every read of boundaries from the device goes through this function.

    Raises:
        PackingNotIsolated: the tensor has no values, or several, because it stands for those of other batches.
    """
    try:
        return tensor.detach().cpu().numpy()
    except Exception as error:
        if _has_values(tensor):
            raise
        raise PackingNotIsolated(
            "a batch says where documents start, and its values cannot be read here: its tensors stand for others "
            f"({type(error).__name__} of a {type(tensor).__name__}), as under FakeTensorMode, aot_function and "
            "torch.func.vmap over batches. Take the patch off for this: fa2patch.revert(model). torch.compile looks at "
            "every batch."
        ) from error


def _has_values(tensor: torch.Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and not wrapped


LONGEST = 254
"""The characters that the message of an assertion on a CUDA device may have: torch raises an error for more."""

CUT = "... The same batch on a CPU says all."


def assert_async(held: torch.Tensor, message: str) -> None:
    """Assert on the device, without a synchronisation. The message has at most :data:`LONGEST` characters."""
    torch.ops.aten._assert_async.msg(held, message)


def fitting(messages: Iterable[str]) -> str:
    """Return the text of one assertion for several messages: all of them, or what fits of their first sentences."""
    different = list(dict.fromkeys(messages))
    whole = " Or: ".join(different)
    if len(whole) <= LONGEST:
        return whole
    first = " Or: ".join(message.partition(". ")[0].rstrip(".") + "." for message in different)
    return first if len(first) <= LONGEST else first[: LONGEST - len(CUT)] + CUT


def require(held: torch.Tensor, error: type[Exception], message: str, *numbers: int) -> None:
    """Raise ``error`` unless a bool tensor without dimensions is True.

    On a CPU it raises at once. On other devices, and in a compiled graph on every device, it becomes a device-side
    assertion.

    Args:
        held: what must be True.
        error: the error.
        message: its text, with ``{}`` in the place of each number.
        numbers: the numbers in the text.
    """
    require_all([Check(held, error, message, numbers)])


class Check(NamedTuple):
    """One condition of :func:`require_all`; the attributes are the arguments of :func:`require`."""

    held: torch.Tensor
    error: type[Exception]
    message: str
    numbers: tuple[int, ...] = ()


def require_all(checks: list[Check]) -> None:
    """Raise the error of the first condition that does not hold, on a CPU.

    On other devices, and in a compiled graph on every device, all conditions are one assertion, because each assertion
    is a launch. Its text names all conditions.
    """
    if compiling():  # a number in the message would become a constant of the graph
        texts = [check.message.format(*["(given)"] * len(check.numbers)) for check in checks]
    elif checks[0].held.device.type != "cpu":
        texts = [check.message.format(*check.numbers) for check in checks]
    else:
        for check in checks:
            if not bool(read(check.held)):
                raise check.error(check.message.format(*check.numbers))
        return
    held = [check.held for check in checks]
    assert_async(torch.stack(held).all() if len(held) > 1 else held[0], fitting(texts))
