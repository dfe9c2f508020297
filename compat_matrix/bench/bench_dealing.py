"""How evenly a global batch is dealt to ranks, by `packing.deal` and by the functions of verl and Unsloth."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from fa2patch import packing

from .workloads import DISTRIBUTIONS

EACH = 32  # examples per rank and step

# Lengths, and the tokens of a pass. The long tail is Pareto's with an exponent of 1.1, from 100 tokens on.
LENGTHS: dict[str, tuple[Callable[[int], Any], int]] = {
    **{name: (each.draw, 8192) for name, each in DISTRIBUTIONS.items()},
    "uniform, 1 to 4096": (lambda count: np.random.default_rng(0).integers(1, 4097, count), 8192),
    "long tail, to 32768": (lambda count: 100 * (1 + np.random.default_rng(0).pareto(1.1, count)).clip(0, 327), 32768),
}

Passes = list[list[Any]]


def functions(file: Path) -> SimpleNamespace:
    # What the file imports and this environment lacks is a mock.
    names: dict[str, Any] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {each.asname or each.name.partition(".")[0]: MagicMock() for each in node.names}
        with contextlib.suppress(ImportError):
            exec(compile(ast.Module([node], []), str(file), "exec"), names)  # noqa: S102 - the user's own folder
    return SimpleNamespace(**names)


def of_verl(verl: Any, lengths: Any, ranks: int, budget: int) -> Passes:
    # A step is dealt as by verl's trainer, and cut into as many micro-batches as the rank that needs the most.
    work = verl.calculate_workload(torch.from_numpy(lengths)).tolist()
    batches = verl.get_seqlen_balanced_partitions(work, ranks, equal_size=True)

    def cut(batch: list[int], least: int | None) -> list[list[int]]:
        offsets = torch.from_numpy(np.append(0, np.cumsum(lengths[batch])))
        ids = SimpleNamespace(is_nested=True, offsets=lambda: offsets)
        return verl.rearrange_micro_batches({"input_ids": ids}, budget, min_num_micro_batch=least)[1]

    found, number = [cut(batch, None) for batch in batches], 0
    while len({len(cuts) for cuts in found}) > 1:  # its all_reduce of the number
        number = max(map(len, found))
        found = [cuts if len(cuts) == number else cut(batch, number) for batch, cuts in zip(batches, found)]
    return [[np.array(batch)[rows] for rows in cuts] for batch, cuts in zip(batches, found)]


def of_unsloth(unsloth: Any, lengths: Any, ranks: int, budget: int) -> Passes:
    # A step is dealt as by Unsloth's sampler, and cut as by its training step. Ranks may differ in passes.
    dealt = unsloth.balance_step_indices(list(range(len(lengths))), lengths.tolist(), len(lengths) // ranks, 1, ranks)
    found = []
    for batch in np.array(dealt).reshape(ranks, -1):
        packed = {"input_ids": torch.zeros(1, lengths[batch].sum(), dtype=torch.int8)}
        packed["packed_seq_lengths"] = torch.from_numpy(lengths[batch])
        cuts = unsloth.split_batch_by_token_budget(packed, budget)
        ends = np.cumsum([len(each["packed_seq_lengths"]) for each in cuts])
        found.append(np.split(batch, ends[:-1]))
    return found


def planners(others: Path | None) -> dict[str, Callable[..., Passes]]:
    # Planners of other packages are compared only if the folder holds them.
    found: dict[str, Callable[..., Passes]] = {"fa2patch": lambda *given: packing.deal(*given).passes}
    for name, pattern, deal in (
        ("verl", "**/verl/utils/seqlen_balancing.py", of_verl),
        ("unsloth", "**/unsloth/utils/token_budget.py", of_unsloth),
    ):
        for file in sorted(others.glob(pattern))[:1] if others else ():
            theirs, wheels = functions(file), sorted(file.parents[2].glob(f"{name}-*.dist-info"))
            version = wheels[0].name[len(name) + 1 : -len(".dist-info")] if wheels else "of unknown version"
            found[f"{name} {version}"] = lambda *given, deal=deal, theirs=theirs: deal(theirs, *given)
    return found


def judged(lengths: Any, passes: Passes, budget: int) -> dict[str, float]:
    costs, most = packing.example_costs(lengths), max(map(len, passes))
    of_passes = np.zeros((len(passes), most))
    for rank, cuts in enumerate(passes):
        of_passes[rank, : len(cuts)] = sorted((costs[rows].sum() for rows in cuts), reverse=True)
    assert sorted(int(index) for cuts in passes for rows in cuts for index in rows) == list(range(len(lengths)))
    assert all(lengths[rows].sum() <= budget for cuts in passes for rows in cuts)
    totals, bound = of_passes.sum(axis=1), packing.deal(lengths, len(passes), budget)
    return {
        "passes": most,
        "fewest": bound.fewest_passes,
        "ranks with fewer passes": sum(len(cuts) < most for cuts in passes) / len(passes),
        "slowest / mean": totals.max() / totals.mean(),
        "slowest / bound": totals.max() / bound.least_cost,
        "each pass: slowest / mean": of_passes.max(axis=0).sum() / totals.mean(),
    }


@pytest.mark.parametrize("ranks", [8, 64, 4096])
@pytest.mark.parametrize("name", LENGTHS)
def bench_dealing(rows: list[Any], quick: bool, request: pytest.FixtureRequest, name: str, ranks: int) -> None:
    """Global batches of 32 examples per rank, dealt to ranks in passes of at most 8192 tokens (long tail: 32768).

    The means of 16 steps, of 4 steps with 64 ranks, and one step with 4096. *Fewest* and *bound* are what no planner
    can do better. *Slowest / mean* is by cost: ranks that wait for each other at the end of a step. *Each pass* adds up
    the slowest of the k-th passes, costliest first: ranks that wait in each pass. A rank with fewer passes than others
    makes them wait for ever, or, with unsloth, keeps the step from being cut. *Seconds* are processor time for a step.
    Other packages' functions are read from the folder that `--others` names.
    """
    ranks, steps = (4, 1) if quick else (ranks, {8: 16, 64: 4, 4096: 1}[ranks])
    draw, budget = LENGTHS[name]
    drawn = np.asarray(draw(steps * ranks * EACH)).astype(np.int64).reshape(steps, -1)
    for planner, deal in planners(request.config.getoption("--others")).items():
        started = time.process_time()
        dealt = [deal(lengths, ranks, budget) for lengths in drawn]
        seconds = f"{(time.process_time() - started) / steps:.4f}"
        found = [judged(lengths, passes, budget) for lengths, passes in zip(drawn, dealt)]
        means = {column: f"{np.mean([of[column] for of in found]):.3f}" for column in found[0]}
        rows.append({"lengths": name, "ranks": ranks, "planner": planner, **means, "seconds": seconds})
