"""Run every planner on every list of lengths, in this environment, and check the rows. Each runs in a forked child.

Every planner gets its own input: fa2patch's and axolotl's take lengths, TRL's takes a dataset with one byte per token.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np

from fa2patch import packing

from . import lengths as distributions

RANKS = 8
SMALL, LARGE, QUICK = 20_000, 1_000_000, 300
BUDGETS = (4096, 8192, 32768, 65536)
REPEATS = 3
LONG = 3.0
"""Seconds; a run that takes longer is not repeated."""

MEMORY_FOR_ALL = 12e9
"""Bytes that must be free for TRL to pack a million examples in one batch; it took about 20 bytes per token."""


class Rows(NamedTuple):
    """The planned rows.

    Attributes:
        lengths: the document lengths of all rows, row after row.
        offsets: where each row starts in ``lengths``, and the end of the last one.
        indices: the documents' indices in the same order, or None if the planner does not return them.
        dealt: whether the planner assigns rows to ranks itself: every ``RANKS`` rows are then one step.
    """

    lengths: Any
    offsets: Any
    indices: Any = None
    dealt: bool = False


Planner = Callable[[], Callable[[], Rows]]
"""The call of the planner is timed. It returns a function that reads the rows from the result, which is not timed."""


def ours(lengths: Any, budget: int, strategy: str) -> Planner:
    """``packing.plan`` with one strategy."""

    def planner() -> Callable[[], Rows]:
        plan = packing.plan(lengths, budget, strategy)
        return lambda: Rows(lengths[plan.indices], plan.offsets, plan.indices)

    return planner


def our_rows_as_a_list(lengths: Any, budget: int) -> Planner:
    """``packing.plan`` whose ``.rows``, a Python list of arrays, are timed too."""

    def planner() -> Callable[[], Rows]:
        rows = packing.plan(lengths, budget).rows
        return lambda: _of_lists(lengths, rows)

    return planner


def our_sampler(lengths: Any, budget: int) -> Planner:
    """One epoch of ``PackedBatchSampler`` for all ranks."""

    def planner() -> Callable[[], Rows]:
        sampler = packing.PackedBatchSampler(lengths, budget, RANKS, "all")
        len(sampler)
        return lambda: _of_lists(lengths, list(sampler))._replace(dealt=True)

    return planner


def our_stream(lengths: Any, budget: int) -> Planner:
    """``packing.stream`` over the examples one by one."""
    examples = list(enumerate(lengths.tolist()))

    def planner() -> Callable[[], Rows]:
        rows = list(packing.stream(examples, budget, length=lambda example: example[1]))
        return lambda: _of_lists(lengths, [[index for index, _ in row] for row in rows])

    return planner


def trl(lengths: Any, budget: int, batch_size: int) -> Planner:
    """``pack_dataset`` with its default strategy, bfd. The rows are then shuffled, as by a random sampler."""
    import pyarrow
    from datasets import Dataset
    from trl import pack_dataset

    kind = pyarrow.int32() if lengths.sum() < 2**31 else pyarrow.int64()
    offsets = pyarrow.array(np.append(0, np.cumsum(lengths)), type=kind)
    tokens = pyarrow.array(np.zeros(int(lengths.sum()), np.int8))
    array = pyarrow.ListArray if kind == pyarrow.int32() else pyarrow.LargeListArray
    dataset = Dataset(pyarrow.table({"input_ids": array.from_arrays(offsets, tokens)}))
    how = {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False}

    def planner() -> Callable[[], Rows]:
        packed = pack_dataset(dataset, budget, map_kwargs=how)

        def rows() -> Rows:
            column = packed.data.column("seq_lengths").combine_chunks()
            counts = column.value_lengths().to_numpy()
            found = Rows(column.flatten().to_numpy(), np.append(0, np.cumsum(counts)))
            return _in_order(found, np.random.default_rng(0).permutation(len(counts)))

        return rows

    return planner


def axolotl(lengths: Any, budget: int, sequential: bool) -> Planner:
    """``MultipackBatchSampler`` with the default options of axolotl's trainer."""
    import torch
    from axolotl.utils.samplers.multipack import MultipackBatchSampler
    from torch.utils.data import RandomSampler, SequentialSampler

    options = {"group_size": 100_000, "bin_size": 200, "drop_last": False, "num_processes": 1}

    def planner() -> Callable[[], Rows]:
        order = torch.Generator().manual_seed(0)
        sampler = SequentialSampler(lengths) if sequential else RandomSampler(lengths, generator=order)
        made = MultipackBatchSampler(sampler, 1, budget, lengths, sequential=sequential, **options)
        batches = made.generate_batches()
        return lambda: _of_lists(lengths, [row for batch in batches for row in batch])

    few = lengths[:10]  # so that numba compiles before the timing starts
    MultipackBatchSampler(SequentialSampler(few), 1, budget, few, sequential=sequential, **options).generate_batches()
    return planner


def _of_lists(lengths: Any, rows: Any) -> Rows:
    indices = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return Rows(lengths[indices], np.append(0, np.cumsum([len(row) for row in rows])), indices)


def _in_order(rows: Rows, order: Any) -> Rows:
    counts = np.diff(rows.offsets)[order]
    starts = rows.offsets[:-1][order]
    offsets = np.append(0, np.cumsum(counts))
    where = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    return Rows(rows.lengths[where], offsets)


# --- figures of the rows --------------------------------------------------------------------------------------


def weighed(rows: Rows, lengths: Any, budget: int) -> dict[str, Any]:
    """Check that every example occurs once and that no row exceeds the budget; then compute the figures.

    Returns:
        ``rows``, ``lower_bound`` (the total of tokens / budget, rounded up), ``fill``, and the imbalance of ranks by
        ``tokens`` and by ``cost``.
    """
    if rows.indices is not None:
        assert np.array_equal(np.sort(rows.indices), np.arange(len(lengths)))
    assert np.array_equal(np.sort(rows.lengths), np.sort(lengths))
    tokens = np.add.reduceat(rows.lengths, rows.offsets[:-1])
    assert tokens.max() <= budget, f"a row of {tokens.max()} tokens"
    bound = math.ceil(int(lengths.sum()) / budget)
    return {
        "rows": len(tokens),
        "lower_bound": bound,
        "fill": round(int(lengths.sum()) / (budget * len(tokens)), 5),
        "tokens": _imbalance(rows, 0.0),
        "cost": _imbalance(rows, packing.ATTENTION_COST),
    }


def _imbalance(rows: Rows, attention_cost: float) -> dict[str, float] | None:
    """Return the costliest rank by the ranks' mean, averaged over steps and at worst; None for fewer rows than ranks.

    Rows are assigned to ranks in turn. An incomplete last step is left out.
    """
    each = packing.example_costs(rows.lengths.astype(np.int64), attention_cost)
    costs = np.add.reduceat(each, rows.offsets[:-1])
    if len(costs) < RANKS:
        return None
    steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
    worst = float((steps.max(axis=1) / steps.mean(axis=1)).max())
    return {"mean": round(packing.imbalance(steps), 4), "worst": round(worst, 4)}


# --- one case -------------------------------------------------------------------------------------------------


def case(make: Callable[[], Planner], lengths: Any, budget: int, repeats: int) -> dict[str, Any]:
    """Measure one planner in a forked child, so that its memory can be measured."""
    planner = make()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        with os.fdopen(writing, "w") as out:
            try:
                json.dump(_measured(planner, lengths, budget, repeats), out)
            except BaseException:
                json.dump({"error": traceback.format_exc()[-600:]}, out)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        said = told.read()
    os.waitpid(child, 0)
    return dict(json.loads(said)) if said else {"error": "the process ended without a word (out of memory?)"}


def _measured(planner: Planner, lengths: Any, budget: int, repeats: int) -> dict[str, Any]:
    gc.freeze()  # axolotl's planner calls gc.collect(), which would scan all modules loaded here
    before, grew = _resident("VmRSS"), None
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    seconds: list[float] = []
    processor: list[float] = []
    while not seconds or (len(seconds) < repeats and seconds[-1] < LONG):
        gc.collect()
        started, used = time.perf_counter(), time.process_time()
        read = planner()
        seconds.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
        if grew is None and before is not None:
            grew = round((_resident("VmHWM") - before) / 1024, 1)
    weight = weighed(read(), lengths, budget)
    taken = {"seconds": round(statistics.median(seconds), 4), "cpu_seconds": round(statistics.median(processor), 4)}
    return {**taken, "repeats": len(seconds), "peak_mb": grew, **weight}


def _resident(name: str) -> Any:
    """In kibibytes; None where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))
    return None


def free() -> float:
    """Return the bytes of available memory, or infinity if unknown."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as known:
        return next(1024.0 * int(line.split()[1]) for line in known if line.startswith("MemAvailable"))
    return math.inf


# --- all cases ------------------------------------------------------------------------------------------------


def planners(lengths: Any, budget: int) -> Iterator[tuple[str, Callable[[], Planner] | str]]:
    """Yield each planner's name with a function that makes it, or with the reason why it is not run."""
    large = len(lengths) >= LARGE
    peers = ("TRL bfd, batches of 1000 (default)", "TRL bfd, one batch", "axolotl multipack", "axolotl sequential")
    for strategy in packing.STRATEGIES:
        yield f"fa2patch {strategy}", lambda strategy=strategy: ours(lengths, budget, strategy)
    yield "fa2patch best_fit_decreasing, .rows", lambda: our_rows_as_a_list(lengths, budget)
    yield f"fa2patch PackedBatchSampler, {RANKS} ranks", lambda: our_sampler(lengths, budget)
    yield "fa2patch stream, buffer 1000", lambda: our_stream(lengths, budget)
    if large and budget not in BUDGETS[:2]:
        yield from ((name, "for time") for name in peers)
        return
    yield peers[0], lambda: trl(lengths, budget, 1000)
    if large and lengths.mean() > 350:
        yield peers[1], "for memory: about 20 bytes for each token, 8 GB and more"
    elif large and free() < MEMORY_FOR_ALL:
        yield peers[1], "for memory: about 20 bytes for each token, 6 GB, which were not free"
    else:
        yield peers[1], lambda: trl(lengths, budget, len(lengths))
    yield peers[2], lambda: axolotl(lengths, budget, sequential=False)
    yield peers[3], lambda: axolotl(lengths, budget, sequential=True)


def draw(distribution: str, count: int) -> Any:
    """Draw ``count`` lengths from a distribution of ``lengths.py``, or uniformly from 1 to 4096."""
    if distribution == "uniform":
        return np.random.default_rng(0).integers(1, 4097, count)
    return np.array(distributions.DISTRIBUTIONS[distribution].draw(count, seed=0))


def main(arguments: list[str] | None = None) -> None:
    """Run all cases. Print a JSON line with versions and the number of cases, then one for each case."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.bench.packing_once", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import datasets

    datasets.disable_progress_bars()
    lists = [
        (distribution, count, budget)
        for count in ((QUICK,) if given.quick else (SMALL, LARGE))
        for distribution in (*distributions.DISTRIBUTIONS, "uniform")
        for budget in (BUDGETS[:1] if given.quick else BUDGETS)
    ]
    names = [name for name, _ in planners(np.ones(QUICK, np.int64), BUDGETS[0])]
    about = ("numpy", "torch", "transformers", "trl", "datasets", "pyarrow", "axolotl", "numba")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in about}}
    header = {"versions": versions, "ranks": RANKS, "attention_cost": packing.ATTENTION_COST}
    _say({"total": len(lists) * len(names), **header, "planners": names})
    for distribution, count, budget in lists:
        lengths = draw(distribution, count)
        for name, make in planners(lengths, budget):
            where = {"planner": name, "distribution": distribution, "examples": count, "max_tokens": budget}
            found = {"not_run": make} if isinstance(make, str) else case(make, lengths, budget, REPEATS)
            _say({**where, **found})


def _say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
