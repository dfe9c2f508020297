"""Sets up a process that runs in a version's environment and prints lines of JSON."""

from __future__ import annotations

import os
import warnings
from typing import TextIO


def lines(stand_in: bool) -> TextIO:
    """Return the file of the lines, which is the standard output. What libraries print there goes to standard error.

    Args:
        stand_in: whether flash-attn's stand-in is put in place of flash-attn. fa2patch must not be imported yet.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", USE_TF="0")
    warnings.simplefilter("ignore")
    if stand_in:
        from .stand_in import install

        install()
    return out
