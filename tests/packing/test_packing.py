"""Rows hold every example once and stay within the budget, ranks get equal shares, and nothing is lost silently."""

import itertools
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from fa2patch import packing
from fa2patch.packing import PackedBatchSampler, PackingError, plan, strategies

DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=40)

BUDGETED = sorted(packing.STRATEGIES)
DECREASING = ("best_fit_decreasing", "first_fit_decreasing")
LENGTHS = st.lists(st.integers(1, 60), max_size=120)
FLAN_LIKE = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 3000).astype(int), 1, 4096)


def everything(rows):
    return sorted(itertools.chain.from_iterable(map(list, rows)))


# --- plan -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", BUDGETED)
@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 200), seed=st.none() | st.integers(0, 5))
def test_every_example_is_in_one_row_and_no_row_is_over_the_budget(strategy, lengths, room, seed):
    budget = max(lengths, default=1) + room
    planned = plan(lengths, budget, strategy, seed=seed)
    assert everything(planned) == list(range(len(lengths)))
    tokens = [sum(lengths[index] for index in row) for row in planned]
    assert tokens == planned.tokens.tolist() and all(0 < count <= budget for count in tokens)
    assert -(-sum(lengths) // budget) <= planned.lower_bound <= planned.bins == len(planned.rows) == len(tokens)
    assert planned.fill == (sum(lengths) / (budget * len(tokens)) if tokens else 1.0)
    assert planned.bins <= -(-2 * sum(lengths) // budget)  # two neighbouring rows together exceed the budget
    assert all(row.dtype == np.int64 for row in planned)


@pytest.mark.parametrize("descending", [False, True])
@DRAWN
@given(keys=st.lists(st.integers(0, 3) | st.sampled_from([2**31 - 2, 2**31 - 1]), max_size=20))
def test_the_order_by_key_is_a_stable_sorts(keys, descending):
    found = strategies.by_key(np.array(keys, np.int32), descending)
    assert found.tolist() == sorted(range(len(keys)), key=lambda place: -keys[place] if descending else keys[place])


@DRAWN
@given(lengths=LENGTHS, batch_size=st.integers(1, 9))
def test_mini_batches_keep_their_number(lengths, batch_size):
    planned = plan(lengths, None, "mini_batches", batch_size=batch_size)
    assert everything(planned) == list(range(len(lengths)))
    assert len(planned) == -(-len(lengths) // batch_size)
    assert [len(row) for row in planned[:-1]] == [batch_size] * (len(planned) - 1)
    assert planned.tokens.tolist() == [sum(lengths[index] for index in row) for row in planned]


def example_by_example(lengths, budget, best):
    # Textbooks pack so. Returned are the lengths in each bin.
    spaces, bins = [], []
    for length in sorted(lengths, reverse=True):
        fits = [at for at, space in enumerate(spaces) if space >= length]
        if not fits:
            fits = [len(spaces)]
            spaces.append(budget)
            bins.append([])
        at = min(fits, key=lambda at: spaces[at]) if best else fits[0]
        spaces[at] -= length
        bins[at].append(length)
    return sorted(map(tuple, bins))


@pytest.mark.parametrize("strategy", DECREASING)
@DRAWN
@given(lengths=st.lists(st.integers(1, 40), max_size=150), room=st.integers(0, 100))
def test_a_length_at_a_time_gives_what_an_example_at_a_time_gives(strategy, lengths, room):
    budget = max(lengths, default=1) + room
    planned = plan(lengths, budget, strategy)
    found = sorted(tuple(sorted((lengths[index] for index in row), reverse=True)) for row in planned)
    assert found == example_by_example(lengths, budget, best=strategy == "best_fit_decreasing")


def fewest_bins(lengths, budget):
    # Each example is put into every bin. Of bins with equal space one is tried.
    best = len(lengths)

    def place(at, spaces):
        nonlocal best
        if len(spaces) >= best:
            return
        if at == len(lengths):
            best = len(spaces)
            return
        for space in {space for space in spaces if space >= lengths[at]}:
            where = spaces.index(space)
            place(at + 1, [*spaces[:where], space - lengths[at], *spaces[where + 1 :]])
        place(at + 1, [*spaces, budget - lengths[at]])

    lengths = sorted(lengths, reverse=True)
    place(0, [])
    return best


@DRAWN
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), room=st.integers(0, 15))
def test_against_the_optimum(lengths, room):
    # The decreasing strategies need at most 1.5 times the fewest bins (Simchi-Levi 1994), next fit twice as many.
    budget = max(lengths) + room
    fewest = fewest_bins(lengths, budget)
    assert plan(lengths, budget).lower_bound <= fewest
    for strategy in BUDGETED:
        most = 2 if strategy in ("in_order", "sorted") else 1.5
        assert fewest <= len(plan(lengths, budget, strategy)) <= most * fewest


@pytest.mark.parametrize(
    ("lengths", "budget", "fewest"),
    [
        ([34, 50] * 50, 100, 50),  # between a third and a half of a row: two fit
        ([51] * 7 + [49] * 3, 100, 7),  # more than half a row: one fits
        ([90] * 8 + [10] * 8, 100, 8),
        ([26] * 30 + [24] * 8, 100, 12),  # four of 26 do not fit, so 24 and 26 share rows two by two, or not at all
        ([2**31 - 1] * 3 + [1], 2**31 - 1, 4),
        ([2**30] * 5, 2**31 - 1, 5),
        ([], 5, 0),
    ],
)
def test_the_bound_knows_that_examples_are_whole(lengths, budget, fewest):
    assert plan(lengths, budget).lower_bound == fewest == len(plan(lengths, budget))


def alike(mean, share, count=20_000):
    drawn = np.random.default_rng(0).normal(mean, mean * share, count)
    return np.clip(np.rint(drawn), 1, 4096).astype(np.int64)


@pytest.mark.parametrize(
    ("mean", "share"),
    [(200, 0.05), (256, 0.1), (300, 0.15), (400, 0.2), (512, 0.02), (512, 0.05), (700, 0.1), (1024, 0.3)],
)
def test_rows_of_lengths_that_are_alike_are_full(mean, share):
    lengths = alike(mean, share)
    planned = plan(lengths, 4096)
    assert planned.fill > 0.995 and everything(planned) == list(range(len(lengths)))
    assert plan(lengths, 4096, "best_fit_decreasing").fill < 0.992


@pytest.mark.parametrize(("mean", "share"), [(1000, 0.1), (1500, 0.15), (1650, 0.1), (1800, 0.1), (480, 0.02)])
def test_rows_that_cannot_be_full_are_nearly_as_few_as_possible(mean, share):
    planned = plan(alike(mean, share), 4096)
    assert planned.fill < 0.995 and planned.bins < 1.012 * planned.lower_bound


def test_the_time_for_a_plan_is_bounded(monkeypatch):
    # What is left after a try is planned again, and with it nothing may be planned more than four times in all.
    planned, fill = [], strategies._best_fit
    monkeypatch.setattr(strategies, "_best_fit", lambda sizes, *rest: planned.append(len(sizes)) or fill(sizes, *rest))
    for mean, share in ((1500, 0.15), (1650, 0.1), (1000, 0.3)):
        planned.clear()
        lengths = alike(mean, share)
        plan(lengths, 4096)
        assert len(lengths) < sum(planned) <= 4 * len(lengths)


def test_the_optimum_is_one():
    assert fewest_bins([4, 4, 4, 3, 3, 3, 3, 3, 3], 10) == 3
    assert fewest_bins([6, 5, 5, 4], 10) == 2


@pytest.mark.parametrize("strategy", DECREASING)
@pytest.mark.parametrize("budget", [4096, 8192, 32768, 65536])
def test_nearly_no_bin_too_many(strategy, budget):
    planned = plan(FLAN_LIKE, budget, strategy)
    assert planned.bins <= planned.lower_bound + 1


def test_in_order_keeps_order():
    planned = plan([3, 3, 3, 5, 1, 4], 6, "in_order", seed=7)
    assert [row.tolist() for row in planned] == [[0, 1], [2], [3, 4], [5]]


def test_sorted_rows_hold_examples_of_like_length():
    planned = plan(FLAN_LIKE, 4096, "sorted")
    spans = sorted((int(FLAN_LIKE[row].min()), int(FLAN_LIKE[row].max())) for row in planned)
    assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:]))
    assert [row.tolist() for row in plan([2, 5, 3, 1], 6, "sorted", seed=None)] == [[1], [0, 2, 3]]


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows_that_are_grouped_by_length_come_in_random_order(ranks):
    # Lengths that go down and up again in cycles show in the loss, so whole rows are shuffled after the grouping.
    sampler = PackedBatchSampler(FLAN_LIKE, 4096, ranks, 0, strategy="sorted")
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        lengths = [FLAN_LIKE[row] for row in sampler]
        spread = np.mean([each.max() / each.min() for each in lengths])
        means = np.log([each.mean() for each in lengths])
        assert spread < 1.3 and abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.35
        orders.append([sorted(each.tolist()) for each in lengths])
    assert len({str(order) for order in orders}) == 3


def test_best_fit_and_first_fit_differ_where_they_should():
    lengths = [7, 8, 2, 3]  # 8 and 7 leave spaces of 2 and 3 for 3 and 2
    assert [row.tolist() for row in plan(lengths, 10, seed=None)] == [[1, 2], [0, 3]]
    lengths = [5, 8, 2]
    assert [row.tolist() for row in plan(lengths, 10, "best_fit_decreasing", seed=None)] == [[1, 2], [0]]
    lengths = [6, 7, 3, 1]
    assert [row.tolist() for row in plan(lengths, 11, "best_fit_decreasing", seed=None)] == [[1, 2, 3], [0]]
    assert [row.tolist() for row in plan(lengths, 12, "first_fit_decreasing", seed=None)] == [[1, 2, 3], [0]]


@pytest.mark.parametrize("strategy", [*BUDGETED, "mini_batches"])
def test_a_seed_gives_one_plan_and_seeds_differ(strategy):
    given = (None, strategy) if strategy == "mini_batches" else (1024, strategy)
    options = {"batch_size": 4} if strategy == "mini_batches" else {"too_long": "truncate"}
    one, same, other = (plan(FLAN_LIKE, *given, seed=seed, **options) for seed in (3, 3, 4))
    assert (one.indices == same.indices).all() and (one.offsets == same.offsets).all()
    assert (one.indices == other.indices).all() == (strategy == "in_order")
    assert sorted(one.tokens.tolist()) == sorted(other.tokens.tolist()) or strategy == "mini_batches"


def test_rows_are_not_in_the_order_of_lengths():
    # Without a seed the rows with the longest examples come first. A seed shuffles the rows.
    longest = np.array([FLAN_LIKE[row].max() for row in plan(FLAN_LIKE, 4096)])
    unshuffled = np.array([FLAN_LIKE[row].max() for row in plan(FLAN_LIKE, 4096, seed=None)])
    place = np.arange(len(longest))
    assert np.corrcoef(place, unshuffled)[0, 1] < -0.7
    assert abs(np.corrcoef(place, longest)[0, 1]) < 0.2


def test_which_of_equals_share_a_row_is_drawn():
    partners = [{tuple(sorted(row.tolist())) for row in plan([5] * 20, 10, seed=seed)} for seed in (0, 1)]
    assert partners[0] != partners[1]


def test_plans_are_equal_across_processes():
    script = (
        "import json, numpy, fa2patch.packing as p; l = numpy.arange(1, 400) % 97 + 1;"
        "print(json.dumps([[r.tolist() for r in p.plan(l, 128, s, seed=5)] for s in sorted(p.STRATEGIES)]))"
    )
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    here = [[r.tolist() for r in plan(np.arange(1, 400) % 97 + 1, 128, s, seed=5)] for s in BUDGETED]
    assert json.loads(there) == here


def test_a_plan_is_a_sequence():
    planned = plan([3, 1, 2, 2], 4, seed=None)
    assert planned[-1].tolist() == planned[len(planned) - 1].tolist() == list(planned)[-1].tolist()
    assert [row.tolist() for row in planned[::-1]] == [row.tolist() for row in reversed(planned)]
    with pytest.raises(IndexError):
        planned[len(planned)]
    assert repr(planned) == "<Plan: 2 rows of at most 4 tokens, 100.00% full>"
    assert len(plan([], 4)) == 0 and plan([], 4).rows == [] and len(plan([], None, "mini_batches", batch_size=2)) == 0


@pytest.mark.parametrize(
    "lengths",
    [[1, 2], (1, 2), np.array([1, 2], np.int32), np.array([1, 2], np.uint8), torch.tensor([1, 2]), range(1, 3)],
)
def test_lengths_of_many_kinds(lengths):
    assert everything(plan(lengths, 3)) == [0, 1]


def test_a_callers_array_is_left_alone():
    lengths = np.array([3, 9, 2])
    plan(lengths, 4, too_long="truncate")
    assert lengths.tolist() == [3, 9, 2]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (([3, -1], 4), "found -1 in example 1"),
        (([2**31], 4), "in example 0"),
        (([1.0], 4), "expected integers"),
        (([[1, 2], [3, 4]], 4), "expected integers"),
        (([[1], [2, 3]], 4), "lengths"),
        ((["a"], 4), "expected integers"),
        (([1], 0), "max_tokens"),
        (([1], 2.0), "max_tokens"),
        (([1], None), "max_tokens"),
        (([1], 4, "bfd"), "expected one of fewest_rows"),
        (([1], 4, "mini_batches"), "batch_size"),
        (([1], None, "mini_batches"), "batch_size"),
    ],
)
def test_rubbish_is_named(arguments, said):
    with pytest.raises(PackingError, match=said) as raised:
        plan(*arguments)
    assert isinstance(raised.value, fa2patch.Fa2PatchError)


def test_options_that_go_with_nothing_are_errors():
    with pytest.raises(PackingError, match="too_long"):
        plan([1], 2, too_long="cut")
    with pytest.raises(PackingError, match="batch_size"):
        plan([1], 2, batch_size=4)


# --- examples longer than the budget --------------------------------------------------------------------------

TOO_LONG = [10, 3, 4, 9, 1]


def test_too_long_is_an_error_that_names_the_example():
    with pytest.raises(PackingError, match="2 of 5 examples .* example 0 of 10 tokens"):
        plan(TOO_LONG, 4)


def test_dropped_examples_are_recorded():
    planned = plan(TOO_LONG, 4, too_long="drop")
    assert everything(planned) == [1, 2, 4]
    assert planned.dropped.tolist() == [0, 3] and planned.tokens_left_out == 19
    assert "2 examples dropped" in repr(planned)


def test_truncated_examples_are_recorded():
    planned = plan(TOO_LONG, 4, too_long="truncate")
    assert everything(planned) == [0, 1, 2, 3, 4]
    assert planned.truncated.tolist() == [0, 3] and planned.tokens_left_out == 11


@pytest.mark.parametrize("too_long", ["drop", "truncate", "split"])
@pytest.mark.parametrize("strategy", BUDGETED)
@DRAWN
@given(lengths=LENGTHS, budget=st.integers(1, 40))
def test_pieces_are_what_the_policy_leaves(strategy, too_long, lengths, budget):
    planned = plan(lengths, budget, strategy, too_long=too_long)
    pieces = [planned.pieces(row) for row in range(len(planned))]
    assert [piece[:, 0].tolist() for piece in pieces] == [row.tolist() for row in planned]
    assert [(piece[:, 2] - piece[:, 1]).sum() for piece in pieces] == planned.tokens.tolist()
    assert planned.tokens.max(initial=0) <= budget
    found = Counter(
        (index, token) for piece in pieces for index, start, stop in piece.tolist() for token in range(start, stop)
    )
    kept = {"drop": lambda n: n if n <= budget else 0, "truncate": lambda n: min(n, budget), "split": lambda n: n}
    expected = [(index, token) for index, n in enumerate(lengths) for token in range(kept[too_long](n))]
    assert sorted(found.elements()) == expected
    assert planned.tokens_left_out == sum(lengths) - len(expected)
    assert planned.dropped.tolist() == [i for i, n in enumerate(lengths) if n > budget and too_long == "drop"]


def test_examples_are_cut_as_planned():
    data = [{"input_ids": list(range(10 * n, 10 * n + length)), "labels": torch.arange(length), "id": n,
             "label": torch.tensor(n)}
            for n, length in enumerate(TOO_LONG)]  # fmt: skip
    planned = plan(TOO_LONG, 4, too_long="split", seed=None)
    rows = [planned.examples(data, row) for row in range(len(planned))]
    assert sorted(token for row in rows for example in row for token in example["input_ids"]) == sorted(
        token for example in data for token in example["input_ids"]
    )
    for example in itertools.chain.from_iterable(rows):
        first = example["input_ids"][0]
        assert example.pop("id") == example.pop("label") == first // 10
        assert example["labels"].tolist() == [token % 10 for token in example["input_ids"]]
    assert max(len(fa2patch.DataCollatorWithFlattening()(row)["input_ids"][0]) for row in rows) <= 4


def test_lengths_of_another_dataset_are_an_error():
    with pytest.raises(PackingError, match="planned as 3 tokens, but has 2"):
        plan([3], 4).examples([{"input_ids": [1, 2]}], 0)


# --- sampler --------------------------------------------------------------------------------------------------


def samplers(lengths, max_tokens, ranks, **options):
    return [PackedBatchSampler(lengths, max_tokens, ranks, rank, **options) for rank in range(ranks)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("strategy", [*BUDGETED, "mini_batches"])
@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 100), ranks=st.integers(1, 5), epoch=st.integers(0, 2))
def test_ranks_share_an_epoch(strategy, drop_last, lengths, room, ranks, epoch):
    budget = max(lengths, default=1) + room
    given = (None, {"batch_size": 3}) if strategy == "mini_batches" else (budget, {})
    parts = samplers(lengths, given[0], ranks, strategy=strategy, drop_last=drop_last, **given[1])
    rows = []
    for part in parts:
        part.set_epoch(epoch)
        rows.append(list(part))
        assert len(part) == len(rows[-1]) == len(rows[0])
        assert all(rows[-1]), "an empty row"
        assert given[0] is None or all(sum(lengths[i] for i in row) <= budget for row in rows[-1])
    seen = Counter(index for part in rows for row in part for index in row)
    assert set(seen) | set(parts[0].left_out.tolist()) == set(range(len(lengths)))
    assert not set(seen) & set(parts[0].left_out.tolist())
    assert sorted((seen - Counter(set(seen))).elements()) == parts[0].repeated.tolist()
    if not drop_last:
        assert not len(parts[0].left_out)
        rows_planned = len(plan(lengths, given[0], strategy, **given[1]))
        can_be_shared_out = len(lengths) >= (ranks if strategy == "mini_batches" else -(-rows_planned // ranks) * ranks)
        assert can_be_shared_out == (not len(parts[0].repeated)) or strategy == "mini_batches"
    together = PackedBatchSampler(lengths, given[0], ranks, "all", strategy=strategy, drop_last=drop_last, **given[1])
    together.set_epoch(epoch)
    assert list(together) == [row for step in zip(*rows) for row in step]
    assert len(together) == ranks * len(parts[0])


@pytest.mark.parametrize("ranks", [2, 8])
def test_nothing_is_repeated_where_there_are_examples_enough(ranks):
    for seed in range(20):
        parts = samplers(FLAN_LIKE[: 300 + seed], 4096, ranks, seed=seed)
        assert not len(parts[0].repeated) and not len(parts[0].left_out)


def test_examples_longer_than_the_budget_are_named_or_recorded():
    with pytest.raises(PackingError, match="example 1 of 9"):
        PackedBatchSampler([3, 9, 2], 4)
    sampler = PackedBatchSampler([3, 9, 2], 4, too_long="drop")
    assert everything(sampler) == [0, 2] and sampler.dropped.tolist() == [1]
    with pytest.raises(PackingError, match="Cut the dataset"):
        PackedBatchSampler([3, 9, 2], 4, too_long="split")


def test_an_epoch_is_planned_once(monkeypatch):
    made = []

    def planned(*given, seed, **options):
        made.append(seed)
        return plan(*given, seed=seed, **options)

    monkeypatch.setattr("fa2patch.packing.samplers.plan", planned)
    sampler = PackedBatchSampler(FLAN_LIKE[:200], 4096, seed=3, rank=0, num_replicas=2)
    for epoch in (0, 0, 1):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == len(sampler.costs()) and sampler.left_out is not None
    assert made == [(3, 0), (3, 1)]


@pytest.mark.parametrize("strategy", [*BUDGETED, "mini_batches"])
def test_epochs_differ_and_come_again(strategy):
    options = {"batch_size": 4} if strategy == "mini_batches" else {}
    sampler = PackedBatchSampler(FLAN_LIKE, None if options else 4096, 2, 0, strategy=strategy, **options)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[2]
    assert (epochs[0] == epochs[1]) == (strategy == "in_order")
    assert len(epochs[0]) == len(epochs[1])


def test_in_order_keeps_order_over_steps_and_ranks():
    for count in range(1, 40):
        rows = list(PackedBatchSampler([3] * count, 7, 4, "all", strategy="in_order"))
        flat = list(itertools.chain.from_iterable(rows))
        assert flat[:count] == list(range(count))


@pytest.mark.parametrize("strategy", ["best_fit_decreasing", "mini_batches"])
def test_goes_on_in_the_middle_of_an_epoch(strategy):
    options = {"strategy": strategy, **({"batch_size": 4} if strategy == "mini_batches" else {})}
    given = (FLAN_LIKE, None if strategy == "mini_batches" else 4096, 2, 1)
    sampler = PackedBatchSampler(*given, **options)
    sampler.set_epoch(2)
    expected = list(sampler)
    rows = iter(sampler)
    taken = [next(rows) for _ in range(7)]
    state = json.loads(json.dumps(sampler.state_dict()))

    other = PackedBatchSampler(*given, **options)
    other.load_state_dict(state)
    other.set_epoch(2)  # a training loop calls it again after loading
    assert other.state_dict() == state
    assert [*taken, *other] == expected
    assert list(other) == expected, "only the first iteration goes on"
    other.load_state_dict(sampler.state_dict(steps=3))
    assert list(other) == expected[3:]
    other.load_state_dict(state)
    other.set_epoch(3)
    assert len(list(other)) == len(other)


def test_looking_at_the_first_batch_moves_nothing():
    sampler = PackedBatchSampler(FLAN_LIKE, 4096)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first and len(list(sampler)) == len(sampler)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"max_tokens": 8192}, {"num_replicas": 3}, {"window": 2}, {"lengths": FLAN_LIKE[::-1]},
     {"strategy": "sorted"}, {"attention_cost": 0.0}, {"drop_last": True}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_state_of_another_sampler_is_refused(change):
    given = {"lengths": FLAN_LIKE, "max_tokens": 4096, "num_replicas": 2, "rank": 0}
    state = PackedBatchSampler(**given).state_dict()
    PackedBatchSampler(**{**given, "rank": 1}).load_state_dict(state)
    with pytest.raises(PackingError, match="other lengths, ranks, seed or options"):
        PackedBatchSampler(**{**given, **change}).load_state_dict(state)


def dealt_in_turn(lengths, rows, ranks):
    costs = np.array([packing.example_costs(lengths[row]).sum() for row in rows])
    return costs[: len(costs) // ranks * ranks].reshape(-1, ranks)


def test_ranks_are_balanced_by_cost():
    lengths = np.random.default_rng(1).integers(1, 4097, 4000)
    sampler = PackedBatchSampler(lengths, 8192, 8, 0)
    unaware = packing.imbalance(dealt_in_turn(lengths, plan(lengths, 8192), 8))
    assert packing.imbalance(sampler.costs()) < 1.005 < 1.015 < unaware
    assert sampler.costs().sum() == pytest.approx(packing.example_costs(lengths).sum())


def test_mini_batches_are_the_same_steps_dealt_more_evenly():
    sampler = PackedBatchSampler(FLAN_LIKE, None, 8, "all", strategy="mini_batches", batch_size=4)
    rows = list(sampler)
    assert [sum(map(len, rows[step : step + 8])) for step in range(0, len(rows) - 8, 8)] == [32] * (len(rows) // 8 - 1)
    in_turn = packing.imbalance(dealt_in_turn(FLAN_LIKE, plan(FLAN_LIKE, None, "mini_batches", batch_size=4), 8))
    costs = sampler.costs()
    longest = np.array([[packing.example_costs(FLAN_LIKE[row]).max() for row in rows]]).reshape(-1, 8).max(axis=1)
    assert packing.imbalance(costs) < 1.3 < 1.7 < in_turn
    unavoidable = np.maximum(longest, costs.mean(axis=1))
    assert (costs.max(axis=1) <= 4 / 3 * unavoidable).all()  # the bound of longest processing time first (Graham 1969)


def test_ranks_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    sampler = PackedBatchSampler(FLAN_LIKE, 4096)
    assert (sampler.num_replicas, sampler.rank) == (4, 3)
    assert list(sampler) == list(PackedBatchSampler(FLAN_LIKE, 4096, 4, 3))
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), world_size=1, rank=0)
    try:
        sampler = PackedBatchSampler(FLAN_LIKE, 4096)
    finally:
        distributed.destroy_process_group()
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    for rank in (4, -1, "some"):
        with pytest.raises(PackingError, match="rank"):
            PackedBatchSampler([1], 4, 4, rank)


def test_fewer_examples_than_ranks_and_none():
    parts = samplers([3, 3], 4, 5)
    assert all(len(list(part)) == len(part) == 1 for part in parts) and len(parts[0].repeated) == 3
    assert list(PackedBatchSampler([], 4, 2, 0)) == [] and len(PackedBatchSampler([], 4, 2, 0)) == 0
    assert PackedBatchSampler([], 4, 2, 0).costs().shape == (0, 2)


# --- with the ecosystem ---------------------------------------------------------------------------------------


def dataset(count):
    lengths = np.random.default_rng(3).integers(2, 30, count)
    return [{"input_ids": ids.tolist()} for ids in rows.documents(*lengths.tolist())], lengths


def mean_loss(model, examples):
    # The mean is over all labels, with each example run alone.
    losses = [
        model(input_ids=torch.tensor([e["input_ids"]]), labels=torch.tensor([e["input_ids"]])).loss for e in examples
    ]
    counts = torch.tensor([len(e["input_ids"]) - 1.0 for e in examples])
    return float((torch.stack(losses) * counts).sum() / counts.sum())


@torch.no_grad()
def test_an_epoch_on_two_ranks_is_the_dataset_end_to_end():
    examples, lengths = dataset(24)
    model = tiny_models.build("llama", "sdpa").eval()
    expected = mean_loss(model, examples)
    collate = fa2patch.DataCollatorWithFlattening()
    loss = labels = 0.0
    with fa2patch.apply(model):
        for rank in range(2):
            sampler = PackedBatchSampler(lengths, 64, 2, rank)
            loader = DataLoader(examples, batch_sampler=sampler, collate_fn=collate)
            assert len(loader) == len(sampler)
            for batch in loader:
                assert batch["input_ids"].shape[1] <= 64
                count = int((batch["labels"] != -100).sum())
                loss, labels = loss + float(model(**batch, use_cache=False).loss) * count, labels + count
    assert loss / labels == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_accelerate_deals_what_the_ranks_would_take(processes):
    # Accelerate splits the rows of all ranks itself and sets the epoch. Each rank gets the sampler's own rows.
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader

    examples, lengths = dataset(50)
    for rank in range(processes):
        sampler = PackedBatchSampler(lengths, 64, processes, "all")
        loader = DataLoader(
            examples, batch_sampler=sampler, collate_fn=lambda rows: [len(row["input_ids"]) for row in rows]
        )
        prepared = prepare_data_loader(
            loader, torch.device("cpu"), processes, rank, put_on_device=False, even_batches=False
        )
        assert isinstance(prepared, DataLoaderShard)
        own = PackedBatchSampler(lengths, 64, processes, rank)
        for epoch in range(2):
            prepared.set_epoch(epoch)
            own.set_epoch(epoch)
            expected = [[int(lengths[index]) for index in row] for row in own]
            prepared.rng_types = None  # the other processes do not exist, so nothing is synchronised
            assert list(prepared) == expected and len(prepared) == len(own)


def test_trainer_takes_the_sampler_and_goes_on_where_it_was(tmp_path):
    from transformers import Trainer, TrainingArguments

    examples, lengths = dataset(40)
    seen = []

    class Packed(Trainer):
        def get_train_dataloader(self):
            sampler = PackedBatchSampler(lengths, 64, self.args.world_size, "all")
            made = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return self.accelerator.prepare(made)

        def training_step(self, model, inputs, *rest):
            seen.append(inputs["input_ids"].flatten().tolist())
            return super().training_step(model, inputs, *rest)

    def train(resume=None, **options):
        seen.clear()
        model = tiny_models.build("llama", "sdpa")
        fa2patch.apply(model)
        arguments = TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, num_train_epochs=2, disable_tqdm=True, logging_strategy="no",
            learning_rate=1e-4, **options,
        )  # fmt: skip
        trainer = Packed(model, arguments, train_dataset=examples, data_collator=fa2patch.DataCollatorWithFlattening())
        trainer.train(resume_from_checkpoint=resume)
        return list(seen), trainer.state.global_step

    steps = len(PackedBatchSampler(lengths, 64, 1, 0))
    rows, taken = train(save_strategy="steps", save_steps=steps + 3, save_total_limit=1)
    assert taken == len(rows) == 2 * steps
    tokens = sorted(itertools.chain.from_iterable(example["input_ids"] for example in examples))
    assert sorted(itertools.chain.from_iterable(rows[:steps])) == tokens
    assert sorted(itertools.chain.from_iterable(rows[steps:])) == tokens and rows[:steps] != rows[steps:]
    again, _ = train(resume=True, save_strategy="no")
    assert again == rows[len(rows) - len(again) :] and len(again) < steps
