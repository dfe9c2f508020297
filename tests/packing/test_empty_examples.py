"""Examples without tokens are in no row, pass or step, and are listed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa2patch.errors import PackingError
from fa2patch.packing import PackedBatchSampler, deal, passes, plan
from fa2patch.packing.strategies import STRATEGIES

LENGTHS = [0, 3, 5, 0, 2, 8, 1, 0]
EMPTY = [0, 3, 7]
FULL = [1, 2, 4, 5, 6]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "mini_batches"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_plan_lists_them(strategy: str, seed: int | None) -> None:
    budget = {"max_tokens": None, "batch_size": 2} if strategy == "mini_batches" else {"max_tokens": 8}
    found = plan(LENGTHS, strategy=strategy, seed=seed, **budget)
    without = plan([LENGTHS[one] for one in FULL], strategy=strategy, seed=seed, **budget)
    assert found.empty.tolist() == EMPTY
    assert len(without.empty) == 0
    assert [[FULL[one] for one in row] for row in without] == [row.tolist() for row in found]
    assert found.tokens.tolist() == without.tokens.tolist()
    assert (found.lower_bound, found.fill, found.tokens_left_out) == (without.lower_bound, without.fill, 0)
    for row in range(len(found)):
        assert found.pieces(row).tolist() == [[one, 0, LENGTHS[one]] for one in found[row]]
    assert "3 examples empty" in repr(found)


@pytest.mark.parametrize("too_long", ["drop", "truncate", "split"])
def test_a_plan_that_cuts_lists_them(too_long: str) -> None:
    found = plan(LENGTHS, 4, too_long=too_long)
    tokens = [sum(stop - start for at, start, stop in np.concatenate([found.pieces(row) for row in range(len(found))])
                  if at == one) for one in range(len(LENGTHS))]  # fmt: skip
    cut = {"drop": [0, 0], "truncate": [4, 4], "split": [5, 8]}[too_long]
    assert tokens == [0, 3, cut[0], 0, 2, cut[1], 1, 0]
    assert found.empty.tolist() == EMPTY
    assert (found.dropped.tolist(), found.truncated.tolist()) == (
        [2, 5] if too_long == "drop" else [],
        [2, 5] if too_long == "truncate" else [],
    )


def test_nothing_but_empty_examples() -> None:
    found = plan([0, 0], 8)
    assert (len(found), found.empty.tolist(), found.tokens_left_out) == (0, [0, 1], 0)
    dealt = deal([0, 0], 2, 8)
    assert [len(batch) for batch in dealt.batches] == [0, 0]


def test_a_negative_length_is_an_error() -> None:
    with pytest.raises(PackingError, match="found -1 in example 1"):
        plan([3, -1], 8)


def test_a_deal_lists_them() -> None:
    found = deal(LENGTHS, 2, 8)
    without = deal([LENGTHS[one] for one in FULL], 2, 8)
    assert found.empty.tolist() == EMPTY
    assert [batch.tolist() for batch in found.batches] == [[FULL[one] for one in batch] for batch in without.batches]
    assert [[each.tolist() for each in rank] for rank in found.passes] == [
        [[FULL[one] for one in each] for each in rank] for rank in without.passes
    ]
    assert found.costs.tolist() == without.costs.tolist()
    assert (found.fewest_passes, found.least_cost) == (without.fewest_passes, without.least_cost)
    assert "3 examples empty" in repr(found)


SAMPLERS: dict[str, dict[str, Any]] = {
    "rows": {"max_tokens": 8},
    "in order": {"max_tokens": 8, "strategy": "in_order"},
    "dropped": {"max_tokens": 5, "too_long": "drop"},
    "mini-batches": {"max_tokens": None, "strategy": "mini_batches", "batch_size": 1},
    "mini-batches with a budget": {"max_tokens": 5, "strategy": "mini_batches", "batch_size": 1, "too_long": "drop"},
}


@pytest.mark.parametrize("case", SAMPLERS)
def test_a_sampler_lists_them_and_no_step_holds_them(case: str) -> None:
    samplers = [PackedBatchSampler(LENGTHS, num_replicas=2, rank=rank, **SAMPLERS[case]) for rank in (0, 1)]
    seen = {one for sampler in samplers for row in sampler for one in row}
    kept = [one for one in FULL if one not in samplers[0].dropped]
    assert seen == set(kept)
    for sampler in samplers:
        assert sampler.empty.tolist() == EMPTY
        assert not set(sampler.repeated.tolist()) & set(EMPTY)
        assert (sampler.costs() > 0).all()
    state = samplers[0].state_dict(1)
    other = [length or 1 for length in LENGTHS]
    with pytest.raises(PackingError, match="other lengths"):
        PackedBatchSampler(other, num_replicas=2, rank=0, **SAMPLERS[case]).load_state_dict(state)


def test_passes_of_examples_leave_them_out() -> None:
    examples = [{"input_ids": list(range(length))} for length in LENGTHS]
    found = passes(examples, 8)
    assert sorted(one for units in found.units for one in units.tolist()) == FULL
    assert all(example["input_ids"] for batch in found for example in batch)
    assert found.shares.sum() == pytest.approx(1)
