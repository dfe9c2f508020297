"""What the commands of a clone print with: rich, or the message that names the extra with it."""

from __future__ import annotations

try:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(
        f"compat_matrix needs {error.name}, which is not installed. In a clone: pip install -e '.[matrix]'"
    ) from None

__all__ = ["Console", "Markdown", "Progress", "Table", "bars", "track"]


def bars() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))
