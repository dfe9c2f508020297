"""The ``fa2patch`` command line. It only parses arguments and prints results."""

from __future__ import annotations

# Commands need these packages beyond fa2patch's own requirements: the extra `cli`.
NEEDED = ("click", "packaging", "rich", "tomli", "uv")


def advice(error: ModuleNotFoundError) -> str:
    return (
        f"fa2patch's command line needs {error.name}, which is not installed: pip install 'fa2patch[cli]' "
        "(in a clone: pip install -e '.[cli]')"
    )
