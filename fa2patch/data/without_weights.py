"""A model's class and settings, with which methods that read no weights are called."""

from __future__ import annotations

from typing import Any

import torch


class WithoutWeights:
    """A module's class, config and plain attributes. It is small when pickled.

    Args:
        module: the module.

    Attributes:
        cls: its class.
        config: its config.
    """

    def __init__(self, module: Any) -> None:
        self.cls, self.config = type(module), module.config
        self._plain = {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str))}

    def made(self) -> Any:
        """Return an object of the class that has these attributes and no weights."""
        made: Any = object.__new__(self.cls)
        torch.nn.Module.__init__(made)
        made.__dict__.update(self._plain, config=self.config)
        return made
