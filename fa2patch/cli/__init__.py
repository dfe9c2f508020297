"""The ``fa2patch`` command line. It only parses arguments and prints results."""

from __future__ import annotations

NEEDED = ("click", "packaging", "rich", "tomli", "uv")
"""The packages that commands need beyond fa2patch's own requirements: the extra ``cli``."""


def advice(error: ModuleNotFoundError) -> str:
    """The message about a package that was not found, with the command that installs it."""
    return (
        f"fa2patch's command line needs {error.name}, which is not installed: pip install 'fa2patch[cli]' "
        "(in a clone: pip install -e '.[cli]')"
    )
