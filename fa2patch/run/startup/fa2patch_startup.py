"""What ``sitecustomize`` starts in every Python of the environment of ``fa2patch run``.

It waits for the import of a package that is watched. Until then it imports nothing else, fa2patch neither.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType

# For each module that is watched, this names the kind of class that it defines and the class's name.
# models: class methods return Transformers models. trainers: objects train models. holders: objects hold one
# Transformers model and make batches for it, so fa2patch.apply is called with the object.
WATCHED = {
    "transformers.modeling_utils": ("models", "PreTrainedModel"),
    "transformers.trainer": ("trainers", "Trainer"),
    "sentence_transformers.SentenceTransformer": ("holders", "SentenceTransformer"),
    "sentence_transformers.cross_encoder.CrossEncoder": ("holders", "CrossEncoder"),
    "sentence_transformers.sparse_encoder.SparseEncoder": ("holders", "SparseEncoder"),
    "sentence_transformers.base.model": ("holders", "BaseModel"),
}

PACKAGES = {module.partition(".")[0] for module in WATCHED}


def begin() -> None:
    atexit.register(_off)  # registered first, so atexit calls it last
    sys.meta_path.insert(0, _ImportWatch())


class _ImportWatch:
    # The finder finds nothing, and stays on sys.meta_path until one of the packages is imported. It must see the first
    # of them: while sentence-transformers imports Transformers, its own modules are half imported.

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in PACKAGES and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                import wrapt

                for watched in WATCHED:
                    wrapt.register_post_import_hook(_imported, watched)
            except Exception as error:
                _failed(error)


def _imported(module: ModuleType) -> None:
    try:
        _fa2patch()
        from fa2patch.run import patcher

        patcher.of_this_process().watch(*WATCHED[module.__name__], module)
    except Exception as error:
        _failed(error)


def _fa2patch() -> None:
    # If fa2patch is not installed, the one that this file is part of is imported.
    import importlib.util

    if importlib.util.find_spec("fa2patch") is None:
        home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        file = os.path.join(home, "__init__.py")
        spec = importlib.util.spec_from_file_location("fa2patch", file, submodule_search_locations=[home])
        assert spec is not None and spec.loader is not None, f"{file} is where the package is"
        package = sys.modules["fa2patch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


def _failed(error: Exception) -> None:
    # The user's program must not fail here.
    if sys.stderr is not None:
        what = f"{type(error).__name__}: {error}"
        print(f"fa2patch: no model is patched in this process, {sys.executable}: {what}", file=sys.stderr, flush=True)


def _off() -> None:
    patcher = sys.modules.get("fa2patch.run.patcher")
    if patcher is not None:
        patcher.of_this_process().off()
