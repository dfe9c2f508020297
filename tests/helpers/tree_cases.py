"""Trees of segments as batches of a model, for tests."""

import torch

from compat_matrix import tiny_configs


def a_tree(drawn, segments=7, longest=9):
    # ``drawn`` is a ``random.Random``. Lengths and parents are returned.
    count = drawn.randint(1, segments)
    return [drawn.randint(1, longest) for _ in range(count)], [drawn.randint(-1, at - 1) for at in range(count)]


def tree_batch(lengths, parents, seed=0, labels=False):
    """The forward's arguments for one row of random tokens."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny_configs.VOCABULARY, (1, sum(lengths)), generator=drawn)
    batch = rows_of_segments(list(zip(lengths, parents)), ids=ids)
    if labels:
        batch["labels"] = ids.index_fill(1, batch["cu_seq_lens_q"][:-1].long(), -100)
    return batch


def rows_of_segments(*rows, ids=None):
    # ``rows`` has for each row its segments in order: (length, the number of its parent in this row, or -1). ``ids``
    # are the tokens, [rows, length].
    lengths, parents = [], []
    positions = []
    for row in rows:
        base, offsets = len(lengths), [0] * len(row)
        for at, (length, parent) in enumerate(row):
            offsets[at] = offsets[parent] + row[parent][0] if parent >= 0 else 0
            lengths.append(length)
            parents.append(base + parent if parent >= 0 else -1)
        counted = zip(offsets, (length for length, _ in row))
        positions.append(torch.cat([torch.arange(offset, offset + length) for offset, length in counted]))
    position_ids = torch.stack(positions)
    if ids is None:
        ids = torch.randint(3, 90, position_ids.shape, generator=torch.Generator().manual_seed(1))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    said = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {
        "input_ids": ids, "position_ids": position_ids, **said,
        "segment_parents": torch.tensor(parents, dtype=torch.int32),
    }  # fmt: skip
