"""Streams give every example once, whoever reads them, go on where they were, and hold no more than their buffer."""

import copy
import itertools
import json
import os
import pickle
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import fa2patch
from fa2patch.packing import PackingError, plan, stream

DRAWN = settings(deadline=None, derandomize=True, database=None, max_examples=40)
LENGTHS = st.lists(st.integers(1, 60), max_size=120)
FLAN_LIKE = np.clip(np.random.default_rng(0).lognormal(5.3, 0.9, 3000).astype(int), 1, 4096)
EXAMPLES = [{"input_ids": [number + 3] * (number % 5 + 2)} for number in range(40)]


def everything(rows):
    return sorted(itertools.chain.from_iterable(map(list, rows)))


def tokens_of(lengths):
    return [[number] * length for number, length in enumerate(lengths)]


@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 100), buffer=st.integers(1, 50))
def test_a_stream_gives_every_example_once(lengths, room, buffer):
    budget = max(lengths, default=1) + room
    rows = list(stream(tokens_of(lengths), budget, buffer))
    assert everything([[example[0] for example in row] for row in rows]) == list(range(len(lengths)))
    assert all(0 < sum(map(len, row)) <= budget for row in rows)


@DRAWN
@given(lengths=LENGTHS, room=st.integers(0, 100))
def test_a_stream_that_fits_the_buffer_is_a_plan(lengths, room):
    budget = max(lengths, default=1) + room
    rows = [[example[0] for example in row] for row in stream(tokens_of(lengths), budget, max(1, len(lengths)))]
    assert sorted(rows) == sorted(row.tolist() for row in plan(lengths, budget, seed=None))


def test_no_example_waits_for_more_rows_than_the_buffer_holds():
    lengths = [7] + [10] * 300
    rows = list(stream(tokens_of(lengths), 10, 20))
    assert [0] * 7 in rows[0]
    waited = [row for row, examples in enumerate(rows) for example in examples if example[0] == 150]
    assert waited[0] <= 150 + 20


def test_a_stream_fills_rows():
    rows = list(stream(tokens_of(FLAN_LIKE), 4096, 500))
    assert FLAN_LIKE.sum() / (4096 * len(rows)) > 0.98
    assert len(rows) < 1.01 * len(plan(FLAN_LIKE, 4096)) < len(plan(FLAN_LIKE, 4096, "in_order"))


def test_a_stream_starts_before_the_examples_end():
    rows = iter(stream(({"input_ids": [1] * 6} for _ in itertools.count()), 10, 3))
    assert next(rows) == [{"input_ids": [1] * 6}]


def test_a_streams_policies():
    lengths = [10, 3, 4]
    with pytest.raises(PackingError, match="longer than max_tokens=4: the first is example 0 of 10 tokens"):
        list(stream(tokens_of(lengths), 4))
    for policy, tokens, counts in (("drop", 7, (1, 0)), ("truncate", 11, (0, 1)), ("split", 17, (0, 0))):
        rows = stream(tokens_of(lengths), 4, too_long=policy)
        for _ in range(2):  # each iteration counts from zero
            assert sum(len(example) for row in rows for example in row) == tokens
            assert (rows.dropped, rows.truncated) == counts
    with pytest.raises(PackingError, match="buffer"):
        stream([], 4, 0)


def test_a_stream_in_a_dataloader():
    class Examples(IterableDataset):
        def __iter__(self):
            return iter({"input_ids": [number + 1] * 5} for number in range(9))

    rows = stream(Examples(), 16, 4)
    batches = list(DataLoader(rows, batch_size=None, collate_fn=fa2patch.DataCollatorWithFlattening()))
    assert sorted(torch.cat([batch["input_ids"][0] for batch in batches]).tolist()) == sorted([*range(1, 10)] * 5)
    assert all(batch["input_ids"].shape[1] <= 16 for batch in batches)


def test_examples_without_tokens_are_left_out_and_counted():
    rows = stream([[1], [], [2, 2], []], 4)
    for _ in range(2):
        assert list(rows) == [[[1], [2, 2]]]
        assert (rows.empty, rows.dropped, rows.rows, rows.tokens, rows.fill) == (2, 0, 1, 3, 0.75)


def test_the_fill_is_that_of_the_rows_so_far():
    rows = stream(tokens_of([3, 4, 1, 4]), 4, 2)
    assert rows.fill == 1.0
    assert [rows.fill for _ in rows] == [1.0, 1.0, 1.0]
    rows = stream(tokens_of([3, 3]), 4)
    assert [rows.fill for _ in rows] == [0.75, 0.75]


# --- memory ---------------------------------------------------------------------------------------------------


class Document(list):
    # A list that can be counted.

    __hash__ = object.__hash__


@pytest.mark.parametrize("saves", [False, True])
def test_no_more_is_held_than_the_buffer(saves):
    alive, states = weakref.WeakSet(), weakref.WeakSet()

    class State(dict):
        __hash__ = object.__hash__

    class Many(Saved if saves else Whole):
        def __iter__(self):
            for self.at in range(20_000):
                made = Document([self.at] * (self.at * 7919 % 60 + 1))
                alive.add(made)
                yield made

        def state_dict(self):
            states.add(made := State(at=self.at))
            return made

    held = [(len(alive), len(states)) for _ in stream(Many(), 64, 50)]
    # a row, the buffer, and the one that the generator has made
    assert max(documents for documents, _ in held) <= 50 + 64 + 2
    assert max(kept for _, kept in held) <= (12 if saves else 0), "states from which nothing is read again"


# --- workers and ranks ----------------------------------------------------------------------------------------


class Whole(IterableDataset):
    # The examples are the same in every worker and rank.

    def __iter__(self):
        yield from EXAMPLES


class SplitByWorker(IterableDataset):
    # Every worker gives its own part of the examples, as those of datasets do.

    def __iter__(self):
        worker = get_worker_info()
        yield from EXAMPLES if worker is None else EXAMPLES[worker.id :: worker.num_workers]


class SplitByRank(IterableDataset):
    # Every rank gives its own part of the examples, and every worker of it one of its own.

    def __iter__(self):
        worker = get_worker_info()
        own = EXAMPLES[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
        yield from own if worker is None else own[worker.id :: worker.num_workers]


def loaded(rows, workers, loader=DataLoader, **options):
    fork = {"multiprocessing_context": "fork"} if workers else {}
    return loader(rows, batch_size=None, num_workers=workers, **fork, **options)


def first_tokens(rows):
    return Counter(example["input_ids"][0] for row in rows for example in row)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("examples", "split"), [(EXAMPLES, "split"), (Whole(), "split"), (SplitByWorker(), "split"), (SplitByRank(), "all")]
)
def test_every_example_once(examples, split, workers, ranks, process):
    found = Counter()
    for rank in range(ranks):
        process(ranks, rank)
        own = first_tokens(loaded(stream(examples, 16, 5, ranks=split), workers))
        assert sum(own.values()) in range(40 // ranks - 4, 40 // ranks + 5), "a rank with hardly any examples"
        found += own
    assert found == Counter(range(3, 43))


def test_a_rank_of_a_device_mesh():
    parts = [first_tokens(stream(EXAMPLES, 16, 5, ranks=(rank, 3))) for rank in range(3)]
    assert sum(parts, Counter()) == Counter(range(3, 43))
    assert [sum(part.values()) for part in parts] == [14, 13, 13]


def test_ranks_that_nothing_is_known_of_are_refused(process):
    process(2, 0)
    with pytest.raises(PackingError, match=r"read by 2 ranks.*ranks='split'.*ranks='all'.*dispatch_batches"):
        next(iter(stream(EXAMPLES, 16)))
    for wrong in ("both", 0, (0,), (0.0, 2), ("0", "2"), [0, 2]):
        with pytest.raises(PackingError, match="ranks: expected 'split', 'all'"):
            stream(EXAMPLES, 16, ranks=wrong)
    with pytest.raises(PackingError, match="rank 2 of 2"):
        stream(EXAMPLES, 16, ranks=(2, 2))


def test_what_datasets_has_split_is_not_split_again(process):
    process(2, 1)

    class Examples(Whole):
        _distributed = "of split_dataset_by_node"

    assert first_tokens(stream(Examples(), 16)) == Counter(range(3, 43))
    for ranks in ("split", (1, 2)):
        with pytest.raises(PackingError, match="split_dataset_by_node has split the examples already"):
            iter(stream(Examples(), 16, ranks=ranks))


@pytest.mark.parametrize("file", ["accelerate.data_loader", "transformers.trainer_pt_utils"])
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_are_dealt_to_ranks_are_not_split(file, workers, process):
    # The last rows may be repeated, so that all ranks have as many.
    shard = pytest.importorskip(file).IterableDatasetShard
    rows, found = stream(EXAMPLES, 16, 5), Counter()
    for rank in range(2):
        process(2, rank)
        found += first_tokens(loaded(shard(rows, 1, num_processes=2, process_index=rank), workers))
        for ranks in ("split", (rank, 2)):
            with pytest.raises(PackingError, match="accelerate .or Trainer. gives each rank some of the rows"):
                list(shard(stream(EXAMPLES, 16, ranks=ranks), 1, num_processes=2, process_index=rank))
    assert found.keys() == set(range(3, 43)) and found.total() <= 40 + 8


def test_a_file_that_is_open_is_not_read_by_several_workers(tmp_path):
    (tmp_path / "lines").write_text("some words\n" * 9)
    with open(tmp_path / "lines") as lines:
        for examples in (lines, (line for line in lines), map(str.split, lines)):
            with pytest.raises(PackingError, match="read by 2 workers.*open already.*num_workers=1"):
                list(loaded(stream(examples, 99), 2))


def test_a_worker_that_is_started_anew_knows_its_rank(monkeypatch):
    # Such a worker has no group of processes, and the environment need not say its rank.
    rows = stream(EXAMPLES, 16, 5, ranks="split")
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        patched.setattr(torch.distributed, "get_world_size", lambda: 2)
        patched.setattr(torch.distributed, "get_rank", lambda: 1)
        sent = pickle.dumps(rows)
        expected = list(rows)
    assert list(pickle.loads(sent)) == expected
    assert first_tokens(expected) == Counter(range(4, 43, 2))


# --- resuming -------------------------------------------------------------------------------------------------


class Saved(Whole):
    # The examples save their position, as an IterableDataset of datasets does: a loaded one stays loaded.

    def __init__(self, examples=EXAMPLES, shuffled=0):
        self.examples, self.shuffled = examples, shuffled
        self.at = self.read = self.begin = 0

    def __iter__(self):
        self.at, waiting = self.begin, []
        for example in self.examples[self.begin :]:
            self.at += 1
            self.read += 1
            waiting.append(example)
            if len(waiting) > self.shuffled:
                yield waiting.pop(self.at * 7919 % len(waiting))
        yield from waiting

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin = state["at"]


def made(lengths):
    return [{"input_ids": [number] * length} for number, length in enumerate(lengths)]


MAKERS = {"a list": list, "state": Saved, "a shuffle buffer": lambda examples: Saved(examples, 7)}


@pytest.mark.parametrize("examples", MAKERS)
@pytest.mark.parametrize("too_long", ["drop", "truncate", "split"])
@DRAWN
@given(
    lengths=st.lists(st.integers(0, 30), max_size=150),
    buffer=st.integers(1, 20),
    part=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
)
def test_a_resume_at_any_row_gives_the_rows_of_an_uninterrupted_run(examples, too_long, lengths, buffer, part):
    def new():
        return stream(MAKERS[examples](made(lengths)), 20, buffer, too_long=too_long, ranks=part)

    def counts(rows):
        return rows.dropped, rows.truncated, rows.empty, rows.rows, rows.fill

    rows, states = new(), []
    reading = iter(rows)
    states.append(rows.state_dict())
    whole = [(row, states.append(json.loads(json.dumps(rows.state_dict()))))[0] for row in reading]
    for place, state in enumerate(states):
        resumed = new()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert list(resumed) == whole[place:]
        assert counts(resumed) == counts(rows)
        assert list(resumed) == whole, "the next epoch begins at the beginning"


def test_examples_with_a_state_are_read_from_there():
    examples = made(np.random.default_rng(0).integers(1, 20, 5000).tolist())
    rows = stream(Saved(examples), 20, 50)
    reading = iter(rows)
    for _ in range(700):
        next(reading)
    state = rows.state_dict()
    assert len(state["waiting"]) <= 50 and len(pickle.dumps(state)) < 1000
    rest, source = list(reading), Saved(examples)
    resumed = stream(source, 20, 50)
    resumed.load_state_dict(state)
    reader = iter(resumed)
    assert next(reader) == rest[0]
    assert state["read"] > 1000 and state["again"]["number"] > state["read"] - 400
    assert source.begin == 0, "a copy is iterated: the next epoch would begin at the state, too"
    assert list(reader) == rest[1:]
    assert source.read == 0


def test_a_state_of_something_else_is_refused():
    rows = stream(EXAMPLES, 16, 5, ranks=(0, 2))
    for _ in zip(range(3), rows):
        state = rows.state_dict()
    with pytest.raises(PackingError, match="max_tokens': 16.*max_tokens': 17"):
        stream(EXAMPLES, 17, 5).load_state_dict(state)

    def resumed(examples, ranks=(0, 2)):
        found = stream(examples, 16, 5, ranks=ranks)
        found.load_state_dict(state)
        return list(found)

    assert resumed(EXAMPLES) == list(rows)[3:]
    for ranks in ((1, 2), (0, 3), "all"):
        with pytest.raises(PackingError, match=r"process 0 of 2 .*and this is process \d of \d"):
            resumed(EXAMPLES, ranks)
    for others in (EXAMPLES[2:], EXAMPLES[::-1], EXAMPLES[:9], []):
        with pytest.raises(PackingError, match="the examples are not those"):
            resumed(others)
    with pytest.raises(PackingError, match="no load_state_dict"):
        state["again"]["state"] = {"at": 0}
        resumed(EXAMPLES)


def test_the_end_of_other_examples_is_not_the_end():
    rows = stream(EXAMPLES, 16, 50)
    next(iter(rows))
    state = rows.state_dict()
    longer = stream([*EXAMPLES, {"input_ids": [1]}], 16, 50)
    longer.load_state_dict(state)
    with pytest.raises(PackingError, match="the examples are not those"):
        list(longer)


def test_another_epoch_begins_at_its_beginning():
    class Epochs(Whole):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield from EXAMPLES[self.epoch :]

    rows = stream(Epochs(), 16, 5)
    rows.set_epoch(2)
    whole = list(rows)
    for _ in zip(range(3), rows):
        state = rows.state_dict()
    rows = stream(Epochs(), 16, 5)
    rows.load_state_dict(state)
    rows.set_epoch(2)
    assert list(rows) == whole[3:], "the state's epoch is set"
    rows.load_state_dict(state)
    rows.set_epoch(0)
    assert list(rows) == list(stream(EXAMPLES, 16, 5))


def test_positions_of_workers_are_not_known_here():
    rows = stream(EXAMPLES, 16, 5)
    with pytest.raises(PackingError, match="StatefulDataLoader"):
        rows.state_dict()
    next(iter(rows))
    rows.load_state_dict(rows.state_dict())
    with pytest.raises(PackingError, match="loaded in the main process.*StatefulDataLoader"):
        list(loaded(rows, 1))


def test_a_stream_can_be_copied_while_it_is_iterated():
    rows = stream(EXAMPLES, 16, 5)
    whole = list(rows)
    next(iter(rows))
    assert list(copy.deepcopy(rows)) == list(pickle.loads(pickle.dumps(rows))) == whole


def of_stateful(examples, workers, state=None, persistent=False):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    kept = {"persistent_workers": True} if persistent else {}
    loader = loaded(stream(examples, 16, 5), workers, stateful.StatefulDataLoader, **kept)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    return loader


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("examples", [EXAMPLES, SplitByWorker(), Saved(), Saved(EXAMPLES, 7)])
def test_torchdatas_loader_resumes_at_any_row(examples, workers):
    loader, states = of_stateful(examples, workers), []
    whole = [(row, states.append(loader.state_dict()))[0] for row in loader]
    assert first_tokens(whole) == Counter(range(3, 43))
    for place, state in enumerate(states, 1):
        resumed = of_stateful(examples, workers, state, persistent=workers > 0)
        rest = list(resumed)
        assert rest == whole[place:]
        assert list(resumed) == whole


# --- what is iterated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_an_iterable_dataset_of_datasets(workers, shuffled, process):
    # It splits itself by workers, knows whether it was split by ranks, and saves its position.
    datasets = pytest.importorskip("datasets", minversion="3")
    distributed = pytest.importorskip("datasets.distributed")

    def new(rank):
        found = datasets.Dataset.from_list(EXAMPLES * 6).to_iterable_dataset(num_shards=8)
        found = found.shuffle(seed=3, buffer_size=20) if shuffled else found
        return stream(distributed.split_dataset_by_node(found, rank, 2), 16, 5)

    counted = Counter()
    for rank in range(2):
        process(2, rank)
        counted += first_tokens(loaded(new(rank), workers))
    assert counted == Counter([*range(3, 43)] * 6)
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader, whole, states = loaded(new(1), workers, stateful), [], []
    for row in loader:
        whole.append(row)
        states.append(loader.state_dict())
    for place in range(1, len(whole), 25):
        resumed = loaded(new(1), workers, stateful)
        resumed.load_state_dict(states[place - 1])
        assert list(resumed) == whole[place:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_web_dataset(workers, tmp_path, process):
    webdataset = pytest.importorskip("webdataset")
    for shard in range(4):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as written:
            for number in range(shard, 40, 4):
                written.write({"__key__": str(number), "json": EXAMPLES[number]})
    counted = Counter()
    for rank in range(2):
        process(2, rank)
        urls = [str(tmp_path / f"{shard}.tar") for shard in range(4)]
        read = webdataset.WebDataset(urls, nodesplitter=webdataset.split_by_node, shardshuffle=False, empty_check=False)
        examples = read.decode().map(lambda sample: sample["json"])
        counted += first_tokens(loaded(stream(examples, 16, 5, ranks="all"), workers))
    assert counted == Counter(range(3, 43))
