"""The only place where the command line imports ``compat_matrix``."""

from __future__ import annotations

import importlib
from typing import Any

import click


def compat(name: str) -> Any:
    """Import a module of ``compat_matrix``, for example ``"user_models.matrix"``.

    Raises:
        click.ClickException: A package that it needs is not installed.
    """
    try:
        return importlib.import_module(f"compat_matrix.{name}")
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"this command needs {error.name}, which is not installed: pip install 'fa2patch[cli]'"
        ) from None
