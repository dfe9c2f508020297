"""What crosses between the host and a device: reads, and assertions that need none."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from .._compile import compiling


def read(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's values on the host. Every read of boundaries from the device goes through this function."""
    return tensor.detach().cpu().numpy()


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
