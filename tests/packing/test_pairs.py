"""Plans of pairs: a row of sources and a row of targets, each within a budget of its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fa2patch
from fa2patch.packing import PackedBatchSampler, PackingError, plan

BUDGETS = (64, 24)
PAIRS = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 24)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.sampled_from(["fewest_rows", "in_order"]), st.integers(0, 3))
def test_every_pair_is_in_one_row_and_no_row_is_over_a_budget(pairs, strategy, seed):
    lengths = np.array(pairs, np.int64).reshape(-1, 2)
    planned = plan(lengths, BUDGETS, strategy, seed=seed)
    without = {at for at, pair in enumerate(pairs) if 0 in pair}
    held = Counter(at for row in planned for at in row.tolist())
    assert held == Counter({*range(len(pairs))} - without) and planned.empty.tolist() == sorted(without)
    for row, tokens in zip(planned, planned.tokens):
        assert (lengths[row].sum(axis=0) <= BUDGETS).all() and tokens == lengths[row].sum()
    assert planned.max_tokens == sum(BUDGETS) and planned.of_pairs and 0 <= planned.fill <= 1


def test_both_budgets_are_filled():
    drawn = np.random.default_rng(0)
    sources = np.clip(drawn.lognormal(5.2, 0.7, 5000), 1, 4000).astype(int)
    lengths = np.stack([sources, np.clip(sources * drawn.lognormal(0, 0.25, 5000), 1, 4000).astype(int)], axis=1)
    bound = (lengths.sum(axis=0) / 4096).max()
    assert len(plan(lengths, (4096, 4096))) < 1.04 * bound
    assert len(plan(lengths, (4096, 4096), "in_order")) > len(plan(lengths, (4096, 4096)))


def test_in_order_keeps_the_order():
    planned = plan([(10, 2), (40, 2), (30, 2), (4, 23), (4, 2)], BUDGETS, "in_order")
    assert [row.tolist() for row in planned] == [[0, 1], [2], [3], [4]]


def test_a_seed_gives_one_plan_and_seeds_differ():
    lengths = np.random.default_rng(1).integers(1, 24, (200, 2))
    rows = [[row.tolist() for row in plan(lengths, BUDGETS, seed=seed)] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_gives_each_rank_rows_within_both_budgets(ranks, drop_last):
    lengths = np.random.default_rng(2).integers(1, 24, (200, 2))
    lengths[7] = 0, 5
    held, steps = Counter(), set()
    for rank in range(ranks):
        sampler = PackedBatchSampler(lengths, BUDGETS, ranks, rank, drop_last=drop_last)
        rows = [*sampler]
        steps.add(len(rows))
        assert all((lengths[row].sum(axis=0) <= BUDGETS).all() for row in rows)
        held.update(at for row in rows for at in row)
    assert len(steps) == 1 and sampler.empty.tolist() == [7]
    expected = Counter(range(200)) - Counter([7, *sampler.left_out.tolist()]) + Counter(sampler.repeated.tolist())
    assert held == expected
    assert sampler.costs().shape == (len(rows), ranks)


def test_rows_of_a_sampler_have_shapes_that_stand_still():
    drawn = np.random.default_rng(3)
    examples = [{"input_ids": [5] * drawn.integers(1, 20), "labels": [6] * drawn.integers(1, 9)} for _ in range(60)]
    lengths = [(len(each["input_ids"]), len(each["labels"])) for each in examples]
    collate = fa2patch.DataCollatorForSeq2Seq(
        pad_to_multiple_of=BUDGETS, max_documents=24, longest_source=64, longest_target=24
    )
    sampler = PackedBatchSampler(lengths, BUDGETS)
    shapes = {
        tuple((name, tuple(value.shape) if hasattr(value, "shape") else value) for name, value in batch.items())
        for batch in DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
    }
    assert len(shapes) == 1 and dict(next(iter(shapes)))["input_ids"] == (1, 64)
    assert dict(next(iter(shapes)))["labels"] == (1, 24)


@pytest.mark.parametrize(
    ("lengths", "budgets", "more", "said"),
    [
        ([(3, 4), (65, 2)], BUDGETS, {}, "1 of 2 pairs .* example 1 of 65 source and 2 target tokens"),
        ([3, 4], BUDGETS, {}, r"integers \[examples, 2\]"),
        ([(3, 4)], (64,), {}, "budgets of a row of sources and of targets"),
        ([(3, 4)], (64, 0), {}, "max_tokens"),
        ([(3, -4)], BUDGETS, {}, "found -4 in example 0"),
        ([(3, 4)], BUDGETS, {"strategy": "sorted"}, "expected fewest_rows or in_order"),
        ([(3, 4)], BUDGETS, {"too_long": "split"}, "'error' or 'drop'"),
    ],
)
def test_bad_input_is_an_error(lengths, budgets, more, said):
    for asked in (plan, PackedBatchSampler):
        with pytest.raises(PackingError, match=said):
            asked(lengths, budgets, **more)


def test_pairs_that_are_too_long_are_dropped():
    lengths = [(3, 4), (65, 2), (0, 3), (5, 25)]
    planned = plan(lengths, BUDGETS, too_long="drop")
    assert planned.dropped.tolist() == [1, 3] and planned.empty.tolist() == [2]
    assert PackedBatchSampler(lengths, BUDGETS, too_long="drop").dropped.tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(4))
def test_the_last_step_keeps_both_budgets(seed):
    # rows of 84 tokens in all would hold 80 of targets
    drawn = np.random.default_rng(seed)
    lengths = drawn.permutation(np.array([(1, 20)] * 8 + [(60, 1)] * drawn.integers(1, 5)))
    for ranks in (2, 3):
        sampler = PackedBatchSampler(lengths, BUDGETS, ranks, "all")
        assert all((lengths[row].sum(axis=0) <= BUDGETS).all() for row in sampler)
