"""What crosses between the host and a device: reads, and assertions that need none."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def read(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's values on the host. Every read of boundaries from the device goes through this function."""
    return tensor.detach().cpu().numpy()


def assert_async(held: torch.Tensor, message: str) -> None:
    """Assert on the device, without a synchronisation."""
    torch.ops.aten._assert_async.msg(held, message)
