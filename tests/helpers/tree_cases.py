"""Random trees of segments as batches of a model, for tests."""

import torch

from compat_matrix import tiny_configs
from fa2patch.documents.trees import Tree


def a_tree(drawn, segments=7, longest=9):
    """Draw the lengths and the parents of up to so many segments with a ``random.Random``."""
    count = drawn.randint(1, segments)
    return [drawn.randint(1, longest) for _ in range(count)], [drawn.randint(-1, at - 1) for at in range(count)]


def tree_batch(lengths, parents, seed=0, labels=False):
    """Return the forward's arguments for one row of random tokens."""
    drawn = torch.Generator().manual_seed(seed)
    tree = Tree(lengths, parents, torch.device("cpu"))
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ids = torch.randint(3, tiny_configs.VOCABULARY, (1, sum(lengths)), generator=drawn)
    batch = {
        "input_ids": ids,
        "position_ids": tree.positions[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "segment_parents": torch.tensor(parents, dtype=torch.int32),
    }
    if labels:
        batch["labels"] = ids.index_fill(1, ends[:-1].long(), -100)
    return batch
