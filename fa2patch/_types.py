"""Types of what travels through fa2patch: Transformers' models and configs, calls and functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Protocol

import torch

Call = dict[str, Any]
"""A forward's arguments by name."""

Args = tuple[Any, ...]
"""A forward's arguments without names."""

Function = Callable[..., Any]
"""A function of Transformers, or its replacement. Its signature differs between versions."""


class Config(Protocol):
    """A Transformers config. Everything but the model type differs between models and versions."""

    model_type: str

    def __getattr__(self, name: str) -> Any:
        """Any other setting."""


class Model(Protocol):
    """A Transformers model: a ``PreTrainedModel`` of any version.

    Attributes:
        config: the model's config.
        training: whether the model is in training mode.
        base_model_prefix: the name under which a model with a head holds its base model.
        loss_function: the loss that the model's forward calls (4.46 on).
    """

    config: Config
    training: bool
    base_model_prefix: str
    loss_function: Any
    _modules: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def modules(self) -> Iterator[torch.nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]: ...
    def children(self) -> Iterator[torch.nn.Module]: ...
    def named_children(self) -> Iterator[tuple[str, torch.nn.Module]]: ...
    def eval(self) -> Any: ...
    def buffers(self) -> Iterator[torch.Tensor]: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...
    def get_submodule(self, target: str) -> torch.nn.Module: ...
    def get_input_embeddings(self) -> Any: ...
    def get_output_embeddings(self) -> Any: ...
