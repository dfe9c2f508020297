"""The steps, in the order of their value, and which of them are due: not done yet, or stale by their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from .. import keys
from ..plans import Snapshots
from ..tiny_configs import MEDIA, PAIRS
from ..tiny_models import SEEDS
from . import store
from .costs import HYBRIDS
from .pool import Task
from .training import SETTINGS

# One release for each way in which Transformers computes attention. The newest has a step of its own.
RELEASES = ("4.36.2", "4.43.4", "4.47.1", "4.57.6")
LOADED = ("sdpa", "flash_attention_2")


@dataclass(frozen=True)
class Machine:
    """What a machine can run."""

    device: str
    installed: str  # release of Transformers
    kernels: list[str]  # best first
    flash_attn: bool
    overlays: dict[str, Path] = field(default_factory=dict)  # folders with other releases, by release

    @property
    def newest(self) -> str:
        return max([self.installed, *self.overlays], key=Version)

    def release(self, name: str) -> str:
        return "" if name == self.installed else name

    def has(self, name: str) -> bool:
        return name == self.installed or name in self.overlays


def tasks(here: Machine, plans: dict[str, Snapshots]) -> Iterator[Task]:
    """Every task that this machine can run, the most valuable first."""
    yield from _cells(here, plans, "matrix", here.newest, "sdpa", "eager")
    for release in filter(here.has, RELEASES):
        for family in (name for name in SEEDS if name in _planned(plans, release)):
            for loaded in LOADED[: 1 + here.flash_attn]:
                called = ("models:cell", (family, "auto", loaded))
                yield Task("families", f"{release}, {family}, {loaded}", *called, release=here.release(release))
    for kernel in here.kernels:
        yield Task("kernels", kernel, "models:against_reference", (kernel,), 30)
    for family in SEEDS:
        for kernel in here.kernels:
            yield Task("kernels", f"{kernel}, {family}", "models:cell", (family, kernel, "sdpa"))
    for kernel in here.kernels:
        yield Task("kernels", f"{kernel}, time", "costs:kernel", (kernel,), 20, alone=True)
    yield from _training(here, [name for name, setting in SETTINGS.items() if not setting.checkpointing])
    yield Task("cuda", "lengths", "costs:check_of_lengths", (), 60, alone=True)
    yield Task("cuda", "memory of the trial", "costs:memory_of_trial", (), 20, alone=True)
    for family in (name for name in HYBRIDS if name in _planned(plans, here.installed)):
        yield Task("rivals", family, "costs:hybrid", (family,), 60, alone=True)
    for prompt in ("512", "2048"):
        yield Task("rivals", f"prompt of {prompt}", "costs:shared", (prompt, "8"), 30, alone=True)
    for loaded in LOADED[: 1 + here.flash_attn]:
        yield Task("rivals", f"ModernBERT, {loaded}", "costs:encoder", (loaded,), 40, alone=True)
    yield Task("rivals", "sentence-transformers", "costs:evaluation", (), 60, alone=True)
    yield from _tests(here)
    yield from _beyond(here, plans)


def _planned(plans: dict[str, Snapshots], release: str) -> Snapshots:
    # The architectures of a release without a plan are taken to be those of the newest that has one.
    return plans.get(release) or plans[[*plans][-1]]


def _cells(here: Machine, plans: dict[str, Snapshots], step: str, release: str, *loaded: str) -> Iterator[Task]:
    # rows of text come first: more is trained on them than on pictures and on pairs
    for name in sorted(_planned(plans, release), key=lambda name: name.endswith((*MEDIA, PAIRS))):
        what = f"{release}, {name}{'' if len(loaded) > 1 else f', {loaded[0]}'}"
        yield Task(step, what, "models:cell", (name, "auto", *loaded), release=here.release(release))


def _training(here: Machine, settings: list[str]) -> Iterator[Task]:
    best, flash = here.kernels[0], "flash_attention_2" if here.flash_attn else "sdpa"
    ways = [f"padded:{flash}", f"fa2patch:{best}+lengths", f"by-hand:{best}", f"budget:{best}+lengths"]
    ways += [f"padded_batches:{best}", f"upstream:{flash}{'+lengths' * here.flash_attn}"]
    for setting in settings:
        for way in ways:
            yield Task("training", f"{setting}, {way}", "training:train", (setting, way), 60, alone=True)
    for setting in settings:
        own = (setting, ways[1])
        yield Task("training", f"{setting}, profile", "training:profile", own, 60, alone=True)


def _tests(here: Machine) -> Iterator[Task]:
    file, marked = "tests/kernels/test_gpu_kernels.py", ("-m", "gpu")
    for kernel in here.kernels:
        others = [f"not {other}" for other in here.kernels if other != kernel and kernel in other]
        chosen = " and ".join([kernel, *others])
        yield Task("tests", f"gpu, {kernel}", "suites:suite", (file, *marked, "-k", chosen), 120)
    rest = " and ".join(f"not {kernel}" for kernel in here.kernels)
    yield Task("tests", "gpu, rest", "suites:suite", ("tests", *marked, "-k", rest), 120)
    there = ("-p", "compat_matrix.gpu.suites", "-k", "not compile")
    for path in sorted((store.ROOT / "tests" / "never_silent").glob("test_*.py")):
        yield Task(
            "tests", f"never_silent, {path.stem}", "suites:suite", (f"tests/never_silent/{path.name}", *there), 60
        )


def _beyond(here: Machine, plans: dict[str, Snapshots]) -> Iterator[Task]:
    yield from _training(here, [name for name, setting in SETTINGS.items() if setting.checkpointing])
    if here.flash_attn:
        yield from _cells(here, plans, "beyond", here.newest, "flash_attention_2")
    for release in filter(here.has, reversed(RELEASES)):
        yield from _cells(here, plans, "beyond", release, "sdpa", "eager")


def due(planned: list[Task], records: store.Records, sources: keys.Sources) -> list[Task]:
    """Return what was never done, and then what is stale, both in the order of their value."""
    never = [task for task in planned if task.name not in records]
    return never + [task for task in planned if task.name in records and not store.is_done(records[task.name], sources)]
