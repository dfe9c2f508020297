"""Plugins of other training programs that patch their models, one module for each program. Nothing imports them here.

The names of modules and classes are what users write into their configurations.
"""

from __future__ import annotations

from typing import Any


def patched(model: Any) -> None:
    """Patch a model as every plugin does, and say so on stderr.

    Raises:
        Fa2PatchError: a class of its errors, if the model cannot be patched.
    """
    from ..patch.applying import apply  # not above: to print the path of a plugin takes no torch
    from ..run.start import say

    say(f"{apply(model, prove=True, padded_batches=True)!r}. Its padded batches are computed packed.")
