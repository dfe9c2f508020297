"""Questions about functions and classes of Transformers, answered from signatures and code objects.

For code that cannot be read (a C function, a callable object), every question about names is answered with no.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from .._types import Config, Function


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function below decorators that keep ``__wrapped__``, or None if it has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return code if isinstance(code, CodeType) else None


def reads_name(function: Any, name: str) -> bool:
    """Whether a function's code uses a global name or an attribute of this name."""
    code = code_of(function)
    return code is not None and name in code.co_names


def has_constant(function: Any, value: Any) -> bool:
    """Whether a function's code contains this constant."""
    code = code_of(function)
    return code is not None and value in code.co_consts


def has_variable(function: Any, name: str) -> bool:
    """Whether a function has a local variable or an argument of this name."""
    code = code_of(function)
    return code is not None and name in code.co_varnames


def names_read(function: Any) -> tuple[str, ...]:
    """Return the global names and attributes that a function's code uses, in the order of their first use."""
    code = code_of(function)
    return code.co_names if code is not None else ()


def parameters(function: Function) -> list[inspect.Parameter]:
    """Return the parameters of a function as its callers see them, with ``self`` if it is not bound."""
    return list(inspect.signature(function).parameters.values())


def upstream_parameters(function: Function) -> set[str]:
    """Return the parameter names of the innermost function, below our replacement and other decorators."""
    return set(inspect.signature(inspect.unwrap(function)).parameters)


def takes(function: Function, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def is_of_torch(cls: type) -> bool:
    """Whether a class is defined in torch. Such modules work token by token, or are recognised by their class."""
    return cls.__module__.startswith("torch.")


def defining(cls: type, attribute: str) -> type:
    """Return the class that defines an attribute: ``cls`` or one of its bases."""
    return next(base for base in cls.__mro__ if attribute in vars(base))


def forwards(cls: type) -> Iterator[tuple[type, Function]]:
    """Yield every ``forward`` that a class has or inherits, with the class that defines it, except torch's own."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and not is_of_torch(base):
            yield base, forward


def forwards_that_run(cls: type) -> Iterator[Function]:
    """Yield a class's ``forward``, then the inherited ones that it reaches through ``super().forward``."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if forward is not None and code_of(forward) is not None:
            yield forward
            if not reads_name(forward, "forward"):
                return


def has_own_forward(cls: type) -> bool:
    """Whether a class or one of its bases defines ``forward``."""
    return any("forward" in vars(base) for base in cls.__mro__)


def text_config(config: Config) -> Any:
    """Return the config of a model's text side, or the config itself if it has no such part."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
