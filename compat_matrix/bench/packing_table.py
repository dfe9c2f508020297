"""The tables of part ``packing``: one row for each planner, one column for each list of lengths and budget."""

from __future__ import annotations

from typing import Any, Callable

from .table import Found, Table

Case = dict[str, Any]

WHERE = "The lengths are drawn by `compat_matrix/bench/lengths.py`; *uniform* means 1 to 4096. "
SPEED = (
    "Each cell holds seconds of processor time (the median of 3 runs, or one run if it takes 3 s) and the growth of "
    "the peak of resident memory in MB, measured in a process of its own. TRL packs tokens, here of one byte each; all "
    "others pack lengths. *.rows* makes the plan a Python list of arrays. *PackedBatchSampler* makes an epoch for 8 "
    "ranks, balanced by cost. *stream* takes the examples one by one."
)
FILL = (
    "Each cell holds the tokens divided by the places in the rows. In brackets: the number of rows divided by its "
    "lower bound, which is tokens / budget, rounded up."
)
BALANCE = (
    "Each cell holds the cost of the costliest of 8 ranks divided by the mean of the ranks, averaged over steps: a "
    "synchronous step takes as long as its costliest rank. The cost is tokens + {cost:.2g} x the sum of squared "
    "lengths (hidden size 4096); in brackets, the cost is the number of tokens. Rows go to the ranks in turn, without "
    "an incomplete last step, and TRL's in a random order. PackedBatchSampler distributes its rows itself, including "
    "the last step."
)


def tables(found: Found) -> list[Table]:
    """Return the tables of the part: speed and fill for each number of examples, and the balance of ranks."""
    sizes = sorted({case["examples"] for case in found["cases"]})
    budgets = sorted({case["max_tokens"] for case in found["cases"]})
    pairs = [budgets[place : place + 2] for place in range(0, len(budgets), 2)]
    made = []
    for size in sizes:
        for pair in pairs:
            made.append(_table(found, f"{size:,} examples: seconds of processor time, MB", size, pair, _speed, SPEED))
            if size == sizes[0] or pair == pairs[0]:
                made.append(_table(found, f"{size:,} examples: how full rows are", size, pair, _fill, WHERE + FILL))
    balance = BALANCE.format(cost=found["attention_cost"])
    made.append(_table(found, f"{sizes[0]:,} examples: balance of ranks", sizes[0], pairs[0], _balance, balance))
    return made


def _table(found: Found, title: str, size: int, pair: list[int], cell: Callable[[Case], str], notes: str) -> Table:
    cases = [case for case in found["cases"] if case["examples"] == size and case["max_tokens"] in pair]
    columns = list(dict.fromkeys((case["distribution"], case["max_tokens"]) for case in cases))
    at = {(case["planner"], case["distribution"], case["max_tokens"]): case for case in cases}
    rows = []
    for planner in found["planners"]:
        of_planner = [at[(planner, *column)] for column in columns]
        if any("rows" in case for case in of_planner):
            rows.append([planner, *(cell(case) if "rows" in case else _why_not(case) for case in of_planner)])
    reasons = dict.fromkeys(case["not_run"] for case in cases if "not_run" in case)
    if reasons:
        notes += f" Not run: {'; '.join(reasons)}."
    return Table(title, ["", *(f"{name} {budget}" for name, budget in columns)], rows, notes)


def _why_not(case: Case) -> str:
    return "not run" if "not_run" in case else "failed"


def _speed(case: Case) -> str:
    memory = "" if case["peak_mb"] is None else f", {case['peak_mb']:,.0f}"
    seconds = case["cpu_seconds"]
    return f"{seconds:.{0 if seconds >= 10 else 2 if seconds >= 0.1 else 3}f}{memory}"


def _fill(case: Case) -> str:
    return f"{case['fill']:.2%} ({case['rows'] / case['lower_bound']:.4f})"


def _balance(case: Case) -> str:
    if case["cost"] is None:
        return "fewer rows than ranks"
    return f"{case['cost']['mean']:.4f} ({case['tokens']['mean']:.4f})"
