"""Flash attention from the Hugging Face kernels hub (the package ``kernels``), or from a local build for it.

``auto`` does not use it, because it downloads and runs code. Its names are ``"hub"``, ``"hub:org/name"``,
``"hub:org/name@revision"``, ``"hub:/a/local/folder"`` and ``"hub:./a/local/folder"``. Only what begins like a path is
one: a folder ``org/name`` in the working directory must not take the place of the repository.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from pathlib import Path

from .._torch import is_no_verdict
from ..errors import NothingProven
from .varlen_func import Found, VarlenFunc, entry, once

DEFAULT = "kernels-community/flash-attn2"

_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*(@.+)?")


class Hub(VarlenFunc):
    """A build from the hub. ``DEVICES`` is None, because the device types depend on the build.

    Attributes:
        source: ``"org/name"``, ``"org/name@revision"``, or a folder that begins with ``/`` or ``./``.
    """

    name = "hub"
    what = "a build of the Hugging Face kernels hub"
    needs = "pip install kernels; kernel='hub:org/name' downloads it"
    DEVICES = None
    FEATURES = frozenset({"window", "softcap", "sinks", "alibi", "dropout", "deterministic", "trees", "spans"})

    def __init__(self, source: str = "") -> None:
        self.source = source or DEFAULT
        if source:
            self.name = f"hub:{source}"

    def found(self) -> Found:
        """The entry point of the build at ``source``, which the first call downloads."""
        try:
            return once(_found, self.source)
        except Exception as error:  # no network, no such repository, no build for this torch, a broken one
            if is_no_verdict(error):
                raise
            return Found(None, reason=f"{self.source} does not load ({type(error).__name__}: {error})")


def _found(source: str) -> Found:
    if importlib.util.find_spec("kernels") is None:
        return Found(None, reason="the package kernels is not installed")
    if Path(source).is_absolute() or source.startswith("./"):
        return entry(_in_folder(Path(source)))
    if not _REPOSITORY.fullmatch(source):
        return Found(
            None, reason=f"expected org/name, org/name@revision, or a folder that begins with / or ./, found {source!r}"
        )
    return entry(_of_hub(source))


def _in_folder(folder: Path) -> object:
    """The build in a local folder. It is not said that code may be trusted which the folder wants from the hub."""
    load = importlib.import_module("kernels").get_local_kernel
    named = "package_name" in inspect.signature(load).parameters
    return load(folder, **({"package_name": folder.name.replace("-", "_")} if named else {}))


def _of_hub(source: str) -> object:
    repository, _, revision = source.partition("@")
    loaded = importlib.import_module("kernels").get_kernel(repository, revision=revision or "main")
    if not revision:
        warnings.warn(
            f"kernel='hub:{repository}' names no revision: what its branch main holds today was loaded. It may be "
            "another build tomorrow, and nobody has tried it with fa2patch. Expected a revision: "
            f"kernel='hub:{repository}@revision', with a commit of the repository.",
            NothingProven,
            stacklevel=2,
        )
    return loaded
