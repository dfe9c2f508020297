"""The packages that commands need beyond fa2patch's own requirements: the extra ``cli``."""

from __future__ import annotations

NEEDED = ("click", "packaging", "rich", "tomli", "uv")


def is_needed(error: ModuleNotFoundError) -> bool:
    """Whether the package that was not found is in the extra."""
    return (error.name or "").partition(".")[0] in NEEDED


def advice(error: ModuleNotFoundError) -> str:
    """The message about a package that was not found, with the command that installs it."""
    return (
        f"fa2patch's command line needs {error.name}, which is not installed: pip install 'fa2patch[cli]' "
        "(in a clone: pip install -e '.[cli]')"
    )
