"""Which segments of a batch the proof exchanges together, so that whatever another one lets through changes."""

from __future__ import annotations

from collections.abc import Iterator

from ..documents.trees import Tree


def exchanges(tree: Tree) -> Iterator[list[bool]]:
    """For each run of the proof, whether a segment is exchanged.

    Of the segments that continue the same one, the even ones are exchanged in one run and the odd ones in another, with
    all that continues them. This is done at each depth: first for the roots, so for whole trees, then for their
    children. So two neighbours are kept apart in one run at least, and what is not exchanged sees nothing that is. Runs
    that exchange everything or nothing are left out. Documents are roots without children.

    Args:
        tree: the segments of a batch.
    """
    segments = [segment for segment, length in enumerate(tree.lengths) if length]
    born: dict[int, int] = {}
    place = [0] * len(tree.lengths)
    for segment in segments:
        parent = tree.parents[segment]
        place[segment] = born[parent] = born.get(parent, -1) + 1
    for depth in range(max(len(tree.path(segment)) for segment in segments)):
        for parity in (0, 1):
            chosen = [
                len(path) > depth and place[path[depth]] % 2 == parity for path in map(tree.path, range(len(place)))
            ]
            if len({chosen[segment] for segment in segments}) == 2:
                yield chosen
