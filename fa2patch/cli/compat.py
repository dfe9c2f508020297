"""The only place where the command line imports ``compat_matrix``."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def compat(name: str) -> Any:
    """Import a module of ``compat_matrix``, for example ``"user_models.matrix"``.

    The wheel holds the package as ``fa2patch.compat_matrix``. In a clone it is the folder beside fa2patch.

    Raises:
        ModuleNotFoundError: A package that the module needs is not installed; ``output.Commands`` reports it.
    """
    installed = f"{__name__.partition('.')[0]}.compat_matrix"
    home = installed if importlib.util.find_spec(installed) else "compat_matrix"
    return importlib.import_module(f"{home}.{name}")
