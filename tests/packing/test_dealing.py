"""Ranks make equally many passes within the budget, the costliest has little to do, and epochs go on on any ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa2patch import packing
from fa2patch.packing import PackedBatchSampler, PackingError, deal, example_costs, plan

DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=100)

ALIKE = st.integers(15, 22)
LENGTHS = st.lists(st.integers(1, 60), max_size=60) | st.lists(ALIKE, max_size=60)
FLAN_LIKE = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 4096).astype(int), 1, 4096)


def lists(arrays):
    return [each.tolist() for each in arrays]


# --- one global batch -----------------------------------------------------------------------------------------


@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 60), ranks=st.integers(1, 7), alone=st.booleans())
def test_every_example_is_in_one_pass_and_ranks_make_equally_many(lengths, room, ranks, alone):
    lengths = np.array(lengths, np.int64)
    budget = max(1, (40 if alone else int(lengths.max(initial=1))) + room)
    dealt = deal(lengths, ranks, budget, too_long="alone" if alone else "error")
    assert sorted(itertools.chain(*itertools.chain(*dealt.passes))) == list(range(len(lengths)))
    assert [len(passes) for passes in dealt.passes] == [len(dealt)] * ranks and dealt.fewest_passes <= len(dealt)
    for passes, batch, costs in zip(dealt.passes, dealt.batches, dealt.costs):
        assert sorted(batch) == sorted(itertools.chain(*passes))
        assert all(lengths[each].sum() <= budget or len(each) == 1 for each in passes)
        assert sum(len(each) > 0 for each in passes) == min(len(dealt), len(batch))
        assert costs.tolist() == [pytest.approx(example_costs(lengths[each]).sum()) for each in passes]
        assert costs.tolist() == sorted(costs.tolist(), reverse=True)
    assert dealt.least_cost <= dealt.costs.sum(axis=1).max() * (1 + 1e-12)
    again = deal(lengths, ranks, budget, too_long="alone" if alone else "error")
    assert list(map(lists, again.passes)) == list(map(lists, dealt.passes))


@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 60), ranks=st.integers(1, 7), more=st.integers(0, 2))
def test_a_rank_cuts_its_batch_into_the_passes_that_were_planned(lengths, room, ranks, more):
    lengths = np.array(lengths, np.int64)
    budget = int(lengths.max(initial=1)) + room
    number = len(deal(lengths, ranks, budget)) + more
    dealt = deal(lengths, ranks, budget, passes=number)
    assert len(dealt) == number
    for passes, batch in zip(dealt.passes, dealt.batches):
        cut = deal(lengths[batch], 1, budget, passes=number)
        assert lists(batch[each] for each in cut.passes[0]) == lists(passes)
        assert cut.batches[0].tolist() == list(range(len(batch)))


@pytest.mark.parametrize(("mean", "ranks"), [(1000, 4), (1400, 3)])
def test_full_passes_of_lengths_that_are_alike(mean, ranks):
    # Longest first does not fill these passes: the rows of ``fewest_rows`` are dealt, which are fewer.
    lengths = np.random.default_rng(0).normal(mean, mean / 20, 20 * ranks * (4096 // mean)).astype(int)
    best = len(plan(lengths, 4096, "best_fit_decreasing"))
    rows = len(plan(lengths, 4096))
    dealt = deal(lengths, ranks, 4096)
    assert len(dealt) == -(-rows // ranks) < -(-best // ranks)
    for passes, batch in zip(dealt.passes, dealt.batches):
        cut = deal(lengths[batch], 1, 4096, passes=len(dealt))
        assert lists(batch[each] for each in cut.passes[0]) == lists(passes)


@DRAWN
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), room=st.integers(0, 20), ranks=st.integers(1, 3))
def test_against_the_optimum(lengths, room, ranks):
    lengths, budget = np.array(lengths), max(lengths) + room
    ways = np.array(list(itertools.product(range(ranks), repeat=len(lengths))))
    costs = example_costs(lengths)
    cheapest = min(np.bincount(way, costs, ranks).max() for way in ways)
    dealt = deal(lengths, ranks, 10**6)
    most = dealt.costs.sum(axis=1).max()
    assert dealt.least_cost <= cheapest * (1 + 1e-12) and most <= 4 / 3 * cheapest + 1e-9  # Graham 1969
    bounded = deal(lengths, ranks, budget)
    for fewer in range(1, bounded.fewest_passes):
        into = itertools.product(range(ranks * fewer), repeat=len(lengths))
        assert all(np.bincount(way, lengths).max() > budget for way in into)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("budget", [4096, 8192])
def test_neither_a_step_nor_its_passes_wait_for_one_rank(ranks, budget):
    dealt = deal(FLAN_LIKE[: 32 * ranks], ranks, budget)
    totals, waits = dealt.costs.sum(axis=1), dealt.costs.max(axis=0).sum()
    assert len(dealt) == dealt.fewest_passes
    assert totals.max() <= 1.005 * dealt.least_cost, "ranks that wait at the end of a step"
    assert waits <= 1.04 * totals.mean(), "ranks that wait in each pass"


def test_ranks_of_a_few_examples_exchange_some():
    lengths = np.random.default_rng(0).normal(400, 150, 64).clip(1).astype(int)
    dealt = deal(lengths, 8, 8192)
    assert dealt.costs.sum(axis=1).max() <= 1.003 * dealt.least_cost, "0.8 percent where each goes to the cheapest rank"


def test_few_long_examples_are_with_few_others():
    dealt = deal([4000, 4000, *[100] * 120], 4, 4096)
    assert (len(dealt), dealt.fewest_passes) == (2, 2)
    totals = dealt.costs.sum(axis=1)
    assert totals.max() <= 1.03 * dealt.least_cost
    waits = dealt.costs.max(axis=0).sum()
    assert waits <= 1.1 * totals.mean(), "the passes beside the long ones are full, too"


def test_attention_counts_as_much_as_it_costs():
    lengths = [3000, *[10] * 600]
    by_tokens, by_cost = (deal(lengths, 2, 10**4, attention_cost=cost) for cost in (0, 1e-3))
    assert by_tokens.costs.tolist() == [[4500], [4500]]
    assert min(len(batch) for batch in by_cost.batches) == 1, "the long one costs more than all others"


def test_fewer_examples_than_passes():
    dealt = deal([9, 9, 9, 9, 9], 4, 9)
    assert [[len(each) for each in passes] for passes in dealt.passes] == [[1, 1], [1, 0], [1, 0], [1, 0]]
    assert lists(deal([], 2, 9).passes[0]) == [[]] and len(deal([], 2, 9, passes=3)) == 3
    assert repr(dealt) == "<Deal: 4 ranks, 2 passes each (at least 2), costliest rank 18 (at least 18)>"


def test_examples_that_are_too_long():
    with pytest.raises(PackingError, match="1 of 3 examples are longer than max_tokens=5: the first is example 1 of 9"):
        deal([1, 9, 2], 1, 5)
    assert lists(deal([1, 9, 2], 1, 5, too_long="alone").passes[0]) == [[1], [0, 2]]
    with pytest.raises(PackingError, match="expected 'error' or 'alone', found 'split'"):
        deal([1], 1, 5, too_long="split")


@pytest.mark.parametrize(
    "given, said",
    [
        ({"ranks": 0}, "ranks: expected a positive number, found 0"),
        ({"ranks": True}, "ranks: expected a positive number, found True"),
        ({"passes": 1.5}, "passes: expected a positive number, found 1.5"),
        ({"passes": 2}, "expected as many as hold the examples, but 1 ranks need 3 passes of at most 9 tokens"),
        ({"max_tokens": 0}, "max_tokens: expected a positive number of tokens"),
        ({"attention_cost": -1}, "attention_cost: expected a number from 0"),
        ({"lengths": [-1]}, "lengths: expected from 0 to"),
    ],
)
def test_rubbish_is_named(given, said):
    with pytest.raises(PackingError, match=said):
        deal(**{"lengths": [9, 9, 9], "ranks": 1, "max_tokens": 9, **given})


# --- an epoch -------------------------------------------------------------------------------------------------


def of_ranks(lengths, ranks, **options):
    options = {"max_tokens": None, "strategy": "mini_batches", **options}
    return [PackedBatchSampler(lengths, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def global_batches(samplers):
    return [sorted(itertools.chain(*step)) for step in zip(*samplers)]


@DRAWN
@given(
    lengths=st.lists(st.integers(1, 60), max_size=80),
    room=st.integers(0, 60),
    ranks=st.integers(1, 5),
    alone=st.booleans(),
    drop_last=st.booleans(),
)
def test_all_ranks_cut_their_batch_into_the_passes_of_the_step(lengths, room, ranks, alone, drop_last):
    lengths = np.array(lengths, np.int64)
    budget = max(1, (40 if alone else int(lengths.max(initial=1))) + room)
    too_long = "alone" if alone else "error"
    options = {"global_batch_size": 12, "too_long": too_long, "drop_last": drop_last}
    parts = of_ranks(lengths, ranks, max_tokens=budget, **options)
    steps = list(zip(*parts))
    assert len(steps) == len(parts[0]) == len(parts[0].passes)
    for step, number in zip(steps, parts[0].passes.tolist()):
        found = [deal(lengths[batch], 1, budget, passes=number, too_long=too_long) for batch in step]
        assert all(step), "an empty batch"
        for batch, cut in zip(step, found):
            assert all(lengths[batch][each].sum() <= budget or len(each) == 1 for each in cut.passes[0])
    unbounded = of_ranks(lengths, ranks, global_batch_size=12, drop_last=drop_last)
    assert global_batches(parts) == global_batches(unbounded), "a budget changes no step"
    assert unbounded[0].passes.tolist() == [1] * len(steps)


@DRAWN
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=80),
    ranks=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    epoch=st.integers(0, 2),
)
def test_an_epoch_goes_on_anywhere_with_any_number_of_ranks(lengths, ranks, stops, epoch):
    whole = of_ranks(lengths, 1, global_batch_size=6)
    whole[0].set_epoch(epoch)
    expected, seen = global_batches(whole), []
    for number, stop in zip(ranks, [*stops[: len(ranks) - 1], len(expected)]):
        parts = of_ranks(lengths, number, global_batch_size=6, max_tokens=60 + number)
        for part in parts:
            part.load_state_dict(whole[0].state_dict(steps=len(seen)))
        seen += global_batches(parts)[:stop]
    assert seen[:-1] == expected[:-1]
    assert set(seen[-1]) >= set(expected[-1]), "those of the last step, and repeated ones where ranks are more"
    assert len(seen[-1]) <= max(len(expected[-1]), *ranks)


def test_batch_size_and_ranks_make_the_global_batch():
    one, other = of_ranks(FLAN_LIKE, 4, batch_size=8)[0], of_ranks(FLAN_LIKE, 8, batch_size=4)[0]
    assert one.global_batch_size == other.global_batch_size == 32
    one.load_state_dict(other.state_dict(steps=3))
    assert next(iter(one)) and one.state_dict()["step"] == 4
    with pytest.raises(PackingError, match="steps hold 32 examples, and these 24: pass global_batch_size=32"):
        of_ranks(FLAN_LIKE, 3, batch_size=8)[0].load_state_dict(one.state_dict())
    budget = of_ranks(FLAN_LIKE, 4, batch_size=8, max_tokens=256, too_long="drop")[0]
    assert budget.dropped.tolist() == np.flatnonzero(FLAN_LIKE > 256).tolist()
    with pytest.raises(PackingError, match="other lengths, ranks, seed or options"):
        budget.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    "options, said",
    [
        ({}, "expected batch_size, the examples of a rank, or global_batch_size, those of all 4 ranks"),
        ({"batch_size": 2, "global_batch_size": 8}, "found batch_size=2 and global_batch_size=8"),
        ({"batch_size": 0}, "found batch_size=0"),
        ({"global_batch_size": 3}, "at least one for each of them, found batch_size=None and global_batch_size=3"),
        ({"batch_size": 2, "too_long": "split"}, "expected 'error' or 'drop' or 'alone', found 'split'"),
        ({"batch_size": 2, "max_tokens": 0}, "max_tokens: expected a positive number of tokens"),
        ({"batch_size": 2, "max_tokens": 9}, "examples are longer than max_tokens=9"),
        ({"strategy": "sorted", "max_tokens": 8192, "global_batch_size": 8}, "only mini_batches take it"),
        ({"strategy": "sorted", "max_tokens": 8192, "too_long": "alone"}, "expected 'error' or 'drop', found 'alone'"),
    ],
)
def test_options_that_go_with_nothing_are_errors(options, said):
    with pytest.raises(PackingError, match=said):
        of_ranks(FLAN_LIKE, 4, **options)


def test_rows_filled_to_a_budget_are_one_pass():
    sampler = PackedBatchSampler(FLAN_LIKE, 4096, 4, 0)
    assert sampler.passes.tolist() == [1] * len(sampler) and sampler.global_batch_size is None
    dropped = PackedBatchSampler(FLAN_LIKE, 4096, 4, 0, drop_last=True)
    assert dropped.passes.tolist() == [1] * len(dropped) and packing.imbalance(dropped.costs()) < 1.1
