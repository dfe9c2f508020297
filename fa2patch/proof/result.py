"""The result of :func:`fa2patch.verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """The findings about one document, or about one segment of a batch with ``segment_parents``.

    Attributes:
        row, start, length: The document's row, first token and number of tokens.
        moved: The largest change of its outputs when tokens outside it, and outside its ancestors, are replaced,
            relative to the largest output of the batch.
        moved_by: The number of the document that changed it most, counted from 1 as in ``str()``. 0 is padding; None if
            nothing changed it.
        gradient: The largest gradient of its outputs with respect to input embeddings outside it and its ancestors.
            None if it was left out by ``max_documents``.
        distance: The largest difference between its outputs in the batch and alone (a segment: at the end of its path
            alone), relative to the largest output of the batch. None if it was left out by ``max_documents``, or if the
            model fails on its one token alone.
        parent: The number of the segment that it continues, counted from 1 as in ``str()``; None if it continues none.
    """

    row: int
    start: int
    length: int
    moved: float = 0.0
    moved_by: int | None = None
    gradient: float | None = None
    distance: float | None = None
    parent: int | None = None


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify`.

    Attributes:
        ok: Whether nothing reaches another document and packed equals alone.
        documents: One :class:`Document` for each document, or segment, in order.
        first_leak: The name, in the Transformers model, of the first submodule whose output differs although its input
            is the same. None if nothing differs, or if the module cannot be found.
        leak_class: The name of that submodule's class.
        reason: What is wrong and what it means; empty if nothing is.
        moved_bound: The largest ``moved`` that is accepted: 0, or rounding in a mixture of experts.
        distance_bound: The largest ``distance`` that is accepted.
        patched: Whether the model was patched by fa2patch.
    """

    ok: bool
    documents: tuple[Document, ...]
    first_leak: str | None
    leak_class: str | None
    reason: str
    moved_bound: float
    distance_bound: float
    patched: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-compatible data."""
        return asdict(self)

    @property
    def word(self) -> str:
        """What the batch holds: ``"segment"`` if one of them has a parent, else ``"document"``."""
        return "document" if all(found.parent is None for found in self.documents) else "segment"

    def __str__(self) -> str:
        head = f"{'isolated' if self.ok else 'NOT ISOLATED'}: {len(self.documents)} {self.word}s"
        lines = [f"{head}{f'; {self.reason}' if self.reason else ''}"]
        for number, found in enumerate(self.documents, 1):
            gradient = "not asked" if found.gradient is None else f"{found.gradient:.1e}"
            distance = "not asked" if found.distance is None else f"{found.distance:.1e}"
            parent = "" if found.parent is None else f", continues {found.parent}"
            lines.append(
                f"  {self.word} {number} (row {found.row}, token {found.start}, {found.length} long{parent}): changed "
                f"by others {found.moved:.1e}, gradient to others {gradient}, from alone {distance}"
            )
        return "\n".join(lines)
