"""What the commands of a clone print with: rich, or the message that names the extra with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Callable, TypeVar

try:
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
    from rich.table import Table
except ModuleNotFoundError as error:
    raise SystemExit(
        f"compat_matrix needs {error.name}, which is not installed. In a clone: pip install -e '.[matrix]'"
    ) from None

__all__ = ["Console", "Markdown", "Progress", "Table", "bars", "done", "track"]

Item = TypeVar("Item")
Found = TypeVar("Found")


def bars() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=Console(stderr=True))


def done(
    work: Callable[[Item], Found], items: Iterable[Item], at_a_time: int
) -> Iterator[tuple[Item, Found | Exception]]:
    # An error comes in the place of what was found.
    with ThreadPoolExecutor(at_a_time) as pool:
        started = {pool.submit(work, item): item for item in items}
        for future in as_completed(started):
            error = future.exception()
            yield started[future], error if isinstance(error, Exception) else future.result()
