"""Questions about functions and classes of Transformers, answered from signatures and code objects.

Code that cannot be read (a function in C, an object that is called) answers no to every question about its names.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any, Callable

import torch


def code_of(function: Any) -> CodeType | None:
    """The code of a function, below decorators that keep ``__wrapped__``; None where there is none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


def reads_name(function: Any, name: str) -> bool:
    """Whether a function's code uses a global name or an attribute of this name."""
    code = code_of(function)
    return code is not None and name in code.co_names


def has_constant(function: Any, value: Any) -> bool:
    """Whether a constant stands in a function's code."""
    code = code_of(function)
    return code is not None and value in code.co_consts


def has_variable(function: Any, name: str) -> bool:
    """Whether a function has a local variable or an argument of this name."""
    code = code_of(function)
    return code is not None and name in code.co_varnames


def names_read(function: Any) -> tuple[str, ...]:
    """Global names and attributes that a function's code uses, in the order of their first use."""
    code = code_of(function)
    return code.co_names if code is not None else ()


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function as its callers see them, ``self`` among them where it is not bound."""
    return list(inspect.signature(function).parameters.values())


def upstream_parameters(function: Callable[..., Any]) -> set[str]:
    """The names of the parameters of the innermost function, below our replacement and below decorators."""
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether a function takes ``**kwargs``."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters(function))


def is_of_torch(cls: type) -> bool:
    """Whether a class is one of torch's own modules, which look at one token at a time, or are known."""
    return cls.__module__.startswith("torch.")


def defining(cls: type, attribute: str) -> type:
    """The class, ``cls`` or one that it inherits from, that defines an attribute."""
    return next(base for base in cls.__mro__ if attribute in vars(base))


def forwards(cls: type) -> Iterator[tuple[type, Callable[..., Any]]]:
    """Every ``forward`` that a class has or inherits, with the class that defines it; torch's own are left out."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and not is_of_torch(base):
            yield base, forward


def forwards_that_run(cls: type) -> Iterator[Callable[..., Any]]:
    """A class's ``forward``, then the inherited ones that it goes on to through ``super().forward``."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and code_of(forward) is not None:
            yield forward
            if not reads_name(forward, "forward"):
                return


def has_own_forward(cls: type) -> bool:
    """Whether a class, or one that it inherits from, defines ``forward``."""
    return any("forward" in vars(base) for base in cls.__mro__)


def text_config(config: Any) -> Any:
    """The config of the text side of a model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def is_embedding(module: Any) -> bool:
    """Whether a module is a table of embeddings."""
    return isinstance(module, torch.nn.Embedding)
