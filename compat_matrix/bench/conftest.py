"""What a bench is given: rivals timed in turns by pytest-benchmark, the rows of its result, the command's options.

Rivals take turns within each round, because the others are a round's setup. asv would time one function after the
other. Counts decide whether a commit is slower, and times are ratios.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from .. import commits
from . import figures


class Rows(list):  # type: ignore[type-arg]
    on = ""  # what was measured on, where device and versions do not say it all


class Taken(dict):  # type: ignore[type-arg]
    # It holds the seconds of each rival, round by round.

    def ms(self, name: str) -> float:
        return round(1e3 * statistics.median(self[name]), 4)

    def ratio(self, name: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(self[name], self[other])), 4)


FOUND = pytest.StashKey["dict[str, tuple[str, Rows]]"]()
FAILED = pytest.StashKey["set[str]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("fa2patch").addoption
    add("--quick", action="store_true", help="only see that it runs: tiny, and few repeats")
    add("--out", type=Path, help="folder that a result file of each part goes to; without it, none is written")
    add("--others", type=Path, help="folder of verl and Unsloth unpacked, whose planners are compared with ours")
    add("--environments", type=Path, default=commits.ROOT / ".compat", help="where environments are kept")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    torch.set_num_threads(1)
    config.stash[FOUND], config.stash[FAILED] = {}, set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    # Only the parts of these benches are not written: an hour of the others is not lost.
    report = yield
    if not report.passed:
        item.config.stash[FAILED].add(_part(item))
    return report


def _part(item: Any) -> str:
    return str(item.function.__name__)[len("bench_") :]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A bench's docstring holds what it is, and its notes.
    out, quick = (session.config.getoption(name) for name in ("--out", "--quick"))
    ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    passed = session.config.stash[FOUND].keys() - session.config.stash[FAILED]
    for part in sorted(passed) if out and ended else ():
        text, rows = session.config.stash[FOUND][part]
        what, _, notes = inspect.cleandoc(text).partition("\n\n")
        found = {"part": part, **figures.header(f"python -m compat_matrix.bench --parts {part}{' --quick' * quick}")}
        found |= {"on": rows.on} if rows.on else {}
        found |= {"what": what, "notes": " ".join(notes.split()), "rows": list(rows)}
        figures.write(out / f"{part}.json", found)


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--quick"))


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    return Path(request.config.getoption("--environments")).resolve()


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> Rows:
    # Each parameter of a bench adds rows to its part.
    return request.config.stash[FOUND].setdefault(_part(request.node), (request.function.__doc__, Rows()))[1]


@pytest.fixture
def turns(benchmark: Any, quick: bool) -> Callable[..., Taken]:
    # Rivals are called in turns, A, B, A, B, so that other load on the machine affects all of them.
    warnings.simplefilter("ignore")

    def timed(rivals: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> Taken:
        first, *others = rivals
        rounds = 1 if quick else rounds
        taken: dict[str, list[float]] = {name: [] for name in others}

        def before() -> None:
            for name in others:
                started = time.perf_counter()
                rivals[name]()
                taken[name].append(time.perf_counter() - started)

        benchmark.pedantic(rivals[first], setup=before, rounds=rounds, warmup_rounds=warm_up)
        found = {name: seconds[-rounds:] for name, seconds in taken.items()}
        return Taken({first: list(benchmark.stats.stats.data), **found})

    return timed
