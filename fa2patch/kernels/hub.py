"""Flash attention from the Hugging Face kernels hub (the package ``kernels``), or from a local build for it.

``auto`` does not use it, because it downloads and runs code. Its names are ``"hub"``, ``"hub:org/name"``,
``"hub:org/name@revision"`` and ``"hub:/a/local/folder"``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path

from ..trying import says_nothing
from .varlen_func import Found, VarlenFunc, entry, once

DEFAULT = "kernels-community/flash-attn2"


class Hub(VarlenFunc):
    """A build from the hub. ``DEVICES`` is None, because the device types depend on the build.

    Attributes:
        source: ``"org/name"``, ``"org/name@revision"`` or a folder.
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
            if says_nothing(error):
                raise
            return Found(None, reason=f"{self.source} does not load ({type(error).__name__}: {error})")


def _found(source: str) -> Found:
    if importlib.util.find_spec("kernels") is None:
        return Found(None, reason="the package kernels is not installed")
    return entry(_loaded(source))


def _loaded(source: str) -> object:
    package = importlib.import_module("kernels")
    folder = Path(source)
    if folder.is_dir():
        parameters = inspect.signature(package.get_local_kernel).parameters
        named = {"package_name": folder.name.replace("-", "_")} if "package_name" in parameters else {}
        trusted = {"trust_remote_code": True} if "trust_remote_code" in parameters else {}
        return package.get_local_kernel(folder, **named, **trusted)
    repository, _, revision = source.partition("@")
    return package.get_kernel(repository, revision=revision or "main")
