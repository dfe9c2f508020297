"""What crosses between the host and a device: reads, and assertions that need none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from .._compile import compiling
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


def assert_async(held: torch.Tensor, message: str) -> None:
    """Assert on the device, without a synchronisation."""
    torch.ops.aten._assert_async.msg(held, message)


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
    if compiling():  # a number in the message would become a constant of the graph
        assert_async(held, message.replace("{}", "(what was given)"))
    elif held.device.type != "cpu":
        assert_async(held, message.format(*numbers))
    elif not bool(read(held)):
        raise error(message.format(*numbers))


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
    if not compiling() and checks[0].held.device.type == "cpu":
        for check in checks:
            require(check.held, check.error, check.message, *check.numbers)
        return
    held = torch.stack([check.held for check in checks]).all()
    text = " Or: ".join(check.message for check in checks)
    require(held, Exception, text, *(number for check in checks for number in check.numbers))
