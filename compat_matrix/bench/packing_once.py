"""Every planner on every list of lengths, in this environment. Each in a forked child, its rows checked and weighed.

Planners get what they take: fa2patch's and axolotl's the lengths, TRL's a dataset, whose tokens are one byte each here.
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
"""Seconds; what takes longer is not repeated."""

MEMORY_FOR_ALL = 12e9
"""Bytes that must be free for TRL to pack a million examples in one batch: about 20 for each token were seen."""


class Rows(NamedTuple):
    """The lengths of the documents of all rows, row after row, and where each row starts; indices where known."""

    lengths: Any
    offsets: Any
    indices: Any = None
    dealt: bool = False  # by the planner itself: every RANKS rows are a step


Planner = Callable[[], Callable[[], Rows]]
"""What is timed; what it gives reads the rows out of the result, and is not."""


def ours(lengths: Any, budget: int, strategy: str) -> Planner:
    def planner() -> Callable[[], Rows]:
        plan = packing.plan(lengths, budget, strategy)
        return lambda: Rows(lengths[plan.indices], plan.offsets, plan.indices)

    return planner


def our_rows_as_a_list(lengths: Any, budget: int) -> Planner:
    def planner() -> Callable[[], Rows]:
        rows = packing.plan(lengths, budget).rows
        return lambda: _of_lists(lengths, rows)

    return planner


def our_sampler(lengths: Any, budget: int) -> Planner:
    def planner() -> Callable[[], Rows]:
        sampler = packing.PackedBatchSampler(lengths, budget, RANKS, "all")
        len(sampler)
        return lambda: _of_lists(lengths, list(sampler))._replace(dealt=True)

    return planner


def our_stream(lengths: Any, budget: int) -> Planner:
    examples = list(enumerate(lengths.tolist()))

    def planner() -> Callable[[], Rows]:
        rows = list(packing.stream(examples, budget, length=lambda example: example[1]))
        return lambda: _of_lists(lengths, [[index for index, _ in row] for row in rows])

    return planner


def trl(lengths: Any, budget: int, batch_size: int) -> Planner:
    """``pack_dataset`` by its default strategy, bfd; the rows' order is that of a random sampler."""
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
    """``MultipackBatchSampler`` with the options that axolotl's trainer gives it by default."""
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

    few = lengths[:10]  # numba compiles
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


# --- what the rows are worth ----------------------------------------------------------------------------------


def weighed(rows: Rows, lengths: Any, budget: int) -> dict[str, Any]:
    """Checks that every example is there once, and no row over the budget; then counts."""
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
    """Costliest rank by mean, on average over steps, and at worst; rows not dealt are dealt in turn, but for the last
    step where it is incomplete."""
    each = packing.example_costs(rows.lengths.astype(np.int64), attention_cost)
    costs = np.add.reduceat(each, rows.offsets[:-1])
    if len(costs) < RANKS:
        return None
    steps = costs[: len(costs) // RANKS * RANKS].reshape(-1, RANKS)
    worst = float((steps.max(axis=1) / steps.mean(axis=1)).max())
    return {"mean": round(packing.imbalance(steps), 4), "worst": round(worst, 4)}


# --- one case -------------------------------------------------------------------------------------------------


def case(make: Callable[[], Planner], lengths: Any, budget: int, repeats: int) -> dict[str, Any]:
    """In a forked child, so that memory is its own."""
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
    gc.freeze()  # the many modules loaded here are nobody's work: axolotl's planner calls gc.collect()
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
    least = {"seconds": round(min(seconds), 4), "cpu_seconds": round(min(processor), 4)}
    return {**least, "repeats": len(seconds), "peak_mb": grew, **weight}


def _resident(name: str) -> Any:
    """Kibibytes; None where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(name))
    return None


def free() -> float:
    """Bytes of memory available; infinite where nobody knows."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as known:
        return next(1024.0 * int(line.split()[1]) for line in known if line.startswith("MemAvailable"))
    return math.inf


# --- all cases ------------------------------------------------------------------------------------------------


def planners(lengths: Any, budget: int) -> Iterator[tuple[str, Callable[[], Planner] | str]]:
    """By name: how to make each, or why it is not run."""
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
    if distribution == "uniform":
        return np.random.default_rng(0).integers(1, 4097, count)
    return np.array(distributions.DISTRIBUTIONS[distribution].draw(count, seed=0))


def main(arguments: list[str] | None = None) -> None:
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
