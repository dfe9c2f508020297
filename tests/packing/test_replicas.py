"""Ranks that share a row get the same row, rows are balanced over groups, and contradictions are errors."""

from types import SimpleNamespace

import numpy as np
import pytest

from fa2patch import packing
from fa2patch.packing import PackedBatchSampler, PackingError

LENGTHS = np.random.default_rng(1).integers(1, 4097, 600)


@pytest.fixture
def accelerator():
    accelerate = pytest.importorskip("accelerate", minversion="1.12")
    state = accelerate.state.AcceleratorState
    state._reset_state(True)

    def made(**sizes):
        found = accelerate.Accelerator(cpu=True)
        # Given to the constructor, it is refused in a single process.
        found.state.parallelism_config = accelerate.ParallelismConfig(**sizes) if sizes else None

    yield made
    state._reset_state(True)


@pytest.fixture(autouse=True)
def without_an_accelerator_of_another_test():
    state = pytest.importorskip("accelerate").state.AcceleratorState
    state._reset_state(True)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{"max_tokens": 8192}, {"max_tokens": None, "batch_size": 3}])
def test_consecutive_ranks_get_the_row_of_their_group(process, size, options):
    options = {**options, "strategy": "mini_batches" if "batch_size" in options else "best_fit_decreasing"}
    for rank in range(6):
        process(6, rank)
        sampler = PackedBatchSampler(LENGTHS, ranks_per_row=size, **options)
        of_group = PackedBatchSampler(LENGTHS, num_replicas=6 // size, rank=rank // size, **options)
        assert (sampler.num_replicas, sampler.rank) == (6 // size, rank // size)
        assert list(sampler) == list(of_group) and len(sampler) == len(of_group)
        together = PackedBatchSampler(LENGTHS, rank="all", ranks_per_row=size, **options)
        assert list(together)[rank // size :: 6 // size] == list(sampler)


def test_balance_is_between_groups(process):
    process(16, 5)
    costs = PackedBatchSampler(LENGTHS, 8192, ranks_per_row=4).costs()
    assert costs.shape[1] == 4 and packing.imbalance(costs) < 1.01


def test_a_state_fits_groups_of_another_size_but_not_another_number(process):
    process(4, 3)
    sampler = PackedBatchSampler(LENGTHS, 8192, ranks_per_row=2)
    sampler.set_epoch(1)
    expected, state = list(sampler), sampler.state_dict(steps=5)
    process(2, 1)
    alone = PackedBatchSampler(LENGTHS, 8192)
    alone.load_state_dict(state)
    assert list(alone) == expected[5:]
    process(4, 3)
    with pytest.raises(PackingError, match="other lengths, ranks, seed or options"):
        PackedBatchSampler(LENGTHS, 8192).load_state_dict(state)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ranks_per_row": 3}, "4 processes cannot be divided into groups of 3"),
        ({"ranks_per_row": 8, "rank": "all"}, "4 processes cannot be divided into groups of 8"),
        ({"ranks_per_row": 0}, "expected a positive number of processes, found 0"),
        ({"ranks_per_row": 2.0}, "expected a positive number of processes, found 2.0"),
        ({"ranks_per_row": True}, "expected a positive number of processes, found True"),
        ({"ranks_per_row": 2, "num_replicas": 4}, "num_replicas=4 and rank=None: expected one or the other"),
        ({"ranks_per_row": 2, "num_replicas": 4, "rank": 3}, "num_replicas and rank count groups"),
        ({"ranks_per_row": 2, "rank": 1}, "num_replicas=None and rank=1: expected one or the other"),
    ],
)
def test_sizes_that_fit_nothing_are_errors(process, options, said):
    process(4, 3)
    with pytest.raises(PackingError, match=said):
        PackedBatchSampler(LENGTHS, 8192, **options)


@pytest.mark.parametrize(
    "sizes, groups",
    [({}, 8), ({"tp_size": 2, "dp_shard_size": 4}, 4), ({"cp_size": 4, "dp_shard_size": 2}, 2),
     ({"tp_size": 2, "cp_size": 2, "dp_shard_size": 2}, 2), ({"sp_size": 4, "dp_shard_size": 2}, 8),
     ({"dp_shard_size": 8}, 8)],
)  # fmt: skip
def test_accelerates_config_is_read(process, accelerator, sizes, groups):
    accelerator(**sizes)
    process(8, 5)
    for rank in (None, "all"):
        sampler = PackedBatchSampler(LENGTHS, 8192, rank=rank)
        assert (sampler.num_replicas, sampler.rank) == (groups, rank or 5 * groups // 8)
    assert PackedBatchSampler(LENGTHS, 8192, 8, 7).num_replicas == 8, "numbers that are passed count groups already"


@pytest.mark.parametrize("config, groups", [({"tensor_parallel": {"autotp_size": 2}}, 2), ({}, 4)])
def test_deepspeeds_tensor_parallelism_is_read(process, accelerator, monkeypatch, config, groups):
    accelerator()
    plugin = SimpleNamespace(deepspeed_config=config)
    monkeypatch.setattr("accelerate.state.AcceleratorState.deepspeed_plugin", plugin)
    process(4, 3)
    for rank in (None, "all"):
        sampler = PackedBatchSampler(LENGTHS, 8192, rank=rank)
        assert (sampler.num_replicas, sampler.rank) == (groups, rank or 3 * groups // 4)


@pytest.mark.parametrize(
    "sizes, options, said",
    [
        ({"sp_size": 2}, {"ranks_per_row": 2}, "sp_size=2: DeepSpeed's UlyssesSPDataLoaderAdapter expects"),
        ({"sp_size": 2}, {"ranks_per_row": 2, "rank": "all"}, "sp_size=2: DeepSpeed's UlyssesSPDataLoaderAdapter"),
        ({}, {"ranks_per_row": 2, "rank": "all"}, "gives the same row to 1 process. Leave"),
        ({"tp_size": 2}, {"ranks_per_row": 4, "rank": "all"}, "gives the same row to 2 processes. Leave"),
        ({"tp_size": 2}, {"ranks_per_row": 1, "rank": "all"}, "gives the same row to 2 processes. Leave"),
    ],
)
def test_what_accelerate_does_otherwise_is_an_error(process, accelerator, sizes, options, said):
    accelerator(**sizes)
    process(4, 3)
    with pytest.raises(PackingError, match=said):
        PackedBatchSampler(LENGTHS, 8192, **options)


def test_a_loop_of_ones_own_may_differ_from_accelerate(process, accelerator):
    accelerator()
    process(4, 3)
    sampler = PackedBatchSampler(LENGTHS, 8192, ranks_per_row=2)
    assert (sampler.num_replicas, sampler.rank) == (2, 1)
