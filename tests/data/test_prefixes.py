"""The tree of the prefixes that rows have in common, against a trie of their tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from fa2patch.documents.prefixes import LEAST, Prefixes
from fa2patch.padded import rows as subject
from fa2patch.padded.rows import common_prefixes, shared_prefixes, unshared


def rows_of(generator: random.Random) -> list[list[int]]:
    # Rows of few different tokens grow from each other, so that prefixes are nested, equal and whole rows.
    rows: list[list[int]] = []
    for _ in range(generator.randint(1, 9)):
        kept = generator.choice(rows)[: generator.randint(0, 12)] if rows and generator.random() < 0.8 else []
        rows.append([*kept, *(generator.randint(0, 2) for _ in range(generator.randint(0 if kept else 1, 6)))])
    return rows


def in_common(rows: list[list[int]]) -> np.ndarray:
    # In how many first columns rows are equal, in a batch that is padded on the right.
    length = max(map(len, rows))
    batch = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return common_prefixes([batch]).numpy()


def spelled(rows: list[list[int]], found: Prefixes) -> list[list[int]]:
    texts = []
    for row in range(len(rows)):
        path = [found.segments[number] for number in found.tree.path(found.last[row])]
        assert [each.start for each in path] == [0, *(each.stop for each in path[:-1])]
        whole = [token for each in path for token in rows[each.sequence][each.start : each.stop]]
        assert len(whole) - (path[-1].stop - path[-1].start) < len(rows[row])
        texts.append(whole[: len(rows[row])])
    return texts


def trie_size(rows: list[list[int]]) -> int:
    return len({tuple(row[: at + 1]) for row in rows for at in range(len(row))})


def tokens(found: Prefixes) -> int:
    return sum(each.stop - each.start for each in found.segments)


@pytest.mark.parametrize("seed", range(300))
def test_against_a_trie(seed: int) -> None:
    rows = rows_of(random.Random(seed))
    lengths = np.array([len(row) for row in rows])
    found = shared_prefixes(in_common(rows), lengths, least=1)
    assert all(each.start < each.stop for each in found.segments)
    assert all(each.parent < number for number, each in enumerate(found.segments))
    assert spelled(rows, found) == rows
    assert tokens(found) == trie_size(rows)
    assert found.shared == (trie_size(rows) < lengths.sum())
    for least in (4, LEAST):
        frugal = shared_prefixes(in_common(rows), lengths, least)
        assert spelled(rows, frugal) == rows
        assert all(each.start < each.stop for each in frugal.segments)
        for number, each in enumerate(frugal.segments):
            children = sum(other.parent == number for other in frugal.segments)
            assert not children or (children - 1) * (each.stop - each.start) >= least


def test_nested_prompts() -> None:
    # A system prompt of two groups, the prompt of each, and two tokens that are below LEAST.
    system, first, second = list(range(20)), list(range(100, 120)), list(range(200, 230))
    rows = [
        [*system, *first, 1, 3],
        [*system, *first, 2, 4, 5],
        [*system, *second, 6, 6, 6],
        [*system, *second, 6, 6, 7],
        [*system, *second, 8],
    ]
    found = shared_prefixes(in_common(rows), np.array([len(row) for row in rows]))
    assert [each.parent for each in found.segments] == [-1, 0, 1, 1, 0, 4, 4, 4]
    assert [each.stop - each.start for each in found.segments] == [20, 20, 2, 3, 30, 3, 3, 1]
    assert found.last == [2, 3, 5, 6, 7]


def test_rows_that_are_equal_or_begin_others_cost_nothing() -> None:
    rows = [[1, 2, 3], [1, 2], [1, 2, 3], [1], [9]]
    found = shared_prefixes(in_common(rows), np.array([3, 2, 3, 1, 1]))
    assert found.segments == [(0, 0, 3, -1), (4, 0, 1, -1)]
    assert found.last == [0, 0, 0, 0, 1]
    assert found.shared


def test_nothing_in_common() -> None:
    lengths = np.array([2, 3])
    found = shared_prefixes(np.array([[9, 0], [0, 9]]), lengths)
    assert found == unshared([2, 3])
    assert not found.shared


@pytest.mark.parametrize("at_once", [1, 40, 2**24])
def test_lengths_of_common_prefixes(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(subject, "AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, (7, 11), generator=generator)
    ids[3] = ids[1]
    kinds = torch.zeros_like(ids, dtype=torch.int8)
    kinds[3, 5] = 1
    for columns in ([ids], [ids, kinds]):
        found = common_prefixes(columns)
        for one in range(7):
            for other in range(7):
                equal = torch.stack([column[one] == column[other] for column in columns]).all(0)
                assert found[one, other] == int(equal.int().cumprod(0).sum())
    assert common_prefixes([ids, kinds])[1, 3] == 5
