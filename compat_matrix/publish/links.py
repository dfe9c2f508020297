"""The addresses of the page, of its cells and of the files in the repository."""

from __future__ import annotations

REPOSITORY = "https://github.com/fa2patch/fa2patch"
FOLDER = f"{REPOSITORY}/blob/main/compat_matrix"
DOCS = "https://fa2patch.github.io/fa2patch"
PAGE = f"{DOCS}/matrix.html"


def address(architecture: str, environment: str) -> str:
    """The part of a cell's address after ``#``, for example ``llama-4.43.4``."""
    return f"{architecture}-{environment}"


def cell(architecture: str, environment: str) -> str:
    """The address of a cell on the published page."""
    return f"{PAGE}#{address(architecture, environment)}"
