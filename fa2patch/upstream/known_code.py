"""Which code is that of torch and Transformers, as it came.

Code is known by the file that defines it: a ``__module__`` says nothing, because ``functools.wraps`` copies it.
"""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

from .._torch import constant
from ..errors import PackingNotIsolated
from . import inspecting

KNOWN = ("torch", "transformers", "fa2patch", "accelerate")
"""Packages whose code needs no proof. Accelerate's forwards and hooks move tensors between devices."""

SPLITTERS = ("deepspeed", "ring_flash_attn")
"""Packages whose attention functions split rows over processes, which ``parts/engines.py`` looks for by itself."""


def is_known(function: Any) -> bool:
    """Whether a function, and each one that it wraps, is of a package in :data:`KNOWN` or is compiled code."""
    return _is_below(function, (*_folders(KNOWN), functools.__file__))  # a decorator of functools says nothing itself


def is_of_model(function: Any, modeling: str) -> bool:
    """Whether a function is known, splits rows, or is defined where a model is, as remote code's own attention is.

    Args:
        function: the function.
        modeling: the name of the module that defines the model's layers.
    """
    home = getattr(sys.modules.get(modeling), "__file__", None)
    return _is_below(function, (*_folders((*KNOWN, *SPLITTERS)), *([home] if home else [])))


def require_of_model(function: Any, layer: Any) -> None:
    """Raise if a layer's dense batches are computed by attention of the user's own, which packed ones would drop.

    Raises:
        PackingNotIsolated: the function is not :func:`is_of_model`.
    """
    own = _of_the_user(function, type(layer).__module__)
    if own:
        raise PackingNotIsolated(
            f"{type(layer).__name__} computes attention with {own}, which was not there when the model was patched, "
            "and which a kernel would replace. Call fa2patch.apply(model) again: then each document of a packed batch "
            'is computed by itself, with your function. For speed, load the model with attn_implementation="sdpa", or '
            "make your function a kernel (fa2patch.kernels.register_kernel)."
        )


@constant
def _of_the_user(function: Any, modeling: str) -> str:
    """Where a function is defined that is not :func:`is_of_model`; empty if it is."""
    return "" if is_of_model(function, modeling) else described(function)


def described(function: Any) -> str:
    """Where a function or an object says that it is defined, for an error."""
    function = _plain(function)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or '?'}.{named.__qualname__}".replace(".forward", "")


def below_ours(function: Any) -> Any:
    """The function below what fa2patch has put around it."""
    while hasattr(function, "__wrapped__"):
        code = inspecting.own_code(function)
        if code is None or not code.co_filename.startswith(_folder("fa2patch")):
            break
        function = function.__wrapped__
    return function


def _is_below(function: Any, places: tuple[str, ...]) -> bool:
    function = _plain(function)
    code, below = inspecting.code_called(function), getattr(function, "__wrapped__", None)
    if code is None and below is None:
        return isinstance(function, (types.BuiltinFunctionType, types.MethodWrapperType)) or _is_operator(function)
    if code is not None and not code.co_filename.startswith(places):
        return False
    return below is None or _is_below(below, places)


def _plain(function: Any) -> Any:
    """The function below partials and bound methods."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _is_operator(function: Any) -> bool:
    """Whether this is an operator of torch (``torch.ops``), whose class is torch's."""
    return type(function).__module__.startswith("torch.")


@functools.cache
def _folder(package: str) -> str:
    file = getattr(sys.modules[package], "__file__", None) or ""
    return f"{Path(file).parent}/"


def _folders(packages: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_folder(package) for package in packages if package in sys.modules)
