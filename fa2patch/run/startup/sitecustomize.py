"""What every Python under ``fa2patch run`` does first, found by ``site`` through PYTHONPATH: wait for Transformers.

Until somebody imports it nothing else is imported, and ``sys.path`` is as it would be. A sitecustomize that this one
hides is run as it would have been.
"""

from __future__ import annotations

import atexit
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
WAITED_FOR = "transformers"
WATCHED = ("transformers.modeling_utils", "transformers.trainer")


class _Waiting:
    """On ``sys.meta_path`` until Transformers is looked for; it finds nothing itself."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == WAITED_FOR and self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                import wrapt

                for watched in WATCHED:
                    wrapt.register_post_import_hook(_imported, watched)
            except Exception as error:
                _failed(error)


def _imported(module: object) -> None:
    try:
        _fa2patch()
        from fa2patch.run import hook

        hook.imported(module)
    except Exception as error:
        _failed(error)


def _fa2patch() -> None:
    """Import the fa2patch that is installed, or else the one that this file is part of."""
    import importlib.util

    if importlib.util.find_spec("fa2patch") is None:
        home = os.path.dirname(os.path.dirname(HERE))
        file = os.path.join(home, "__init__.py")
        spec = importlib.util.spec_from_file_location("fa2patch", file, submodule_search_locations=[home])
        assert spec is not None and spec.loader is not None, f"{file} is where the package is"
        package = sys.modules["fa2patch"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)


def _failed(error: Exception) -> None:
    """One line: somebody else's program goes on."""
    if sys.stderr is not None:
        what = f"{type(error).__name__}: {error}"
        print(f"fa2patch: no model is patched in this process, {sys.executable}: {what}", file=sys.stderr, flush=True)


@atexit.register  # the first that is registered is the last that is called
def _off() -> None:
    hook = sys.modules.get("fa2patch.run.hook")
    if hook is not None:
        hook.off()


def _run_the_hidden_one() -> None:
    mine = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, mine)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
sys.meta_path.insert(0, _Waiting())
if __name__ == "sitecustomize":
    _run_the_hidden_one()
