"""The modules of compat_matrix that commands use: ``from .matrix_modules import matrix``.

The wheel holds them as ``fa2patch.compat_matrix``. In a clone they are in the folder ``compat_matrix`` beside fa2patch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compat_matrix import environments as environments
    from compat_matrix import tiny_models as tiny_models
    from compat_matrix.user_models import matrix as matrix
    from compat_matrix.user_models import models as models
    from compat_matrix.user_models import report as report
else:
    _MODULES = {
        "environments": "environments",
        "tiny_models": "tiny_models",
        "matrix": "user_models.matrix",
        "models": "user_models.models",
        "report": "user_models.report",
    }

    def __getattr__(name: str) -> Any:
        """Import a module when a command first uses it.

        Raises:
            ModuleNotFoundError: A package that the module imports is not installed.
        """
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        installed = f"{__name__.partition('.')[0]}.compat_matrix"
        home = installed if importlib.util.find_spec(installed) else "compat_matrix"
        return importlib.import_module(f"{home}.{_MODULES[name]}")
