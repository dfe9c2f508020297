"""What the patch itself takes, by release and beside another commit: ``python -m compat_matrix.bench.own_time``.

Counts are of Python's calls, so that no machine's noise hides them. What is counted of a forward is beyond the same
model with the kernel called by hand, or without a patch where Transformers has no registry of attention functions
(before 4.48). Times are the medians of repetitions in turns, of processor time, as other processes may run meanwhile;
only the import's are of the clock. Each side of each release runs in processes of its own, in the order before, after,
after, before, ...
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fa2patch
from fa2patch.kernels.reference import Reference

from .. import commits, environments
from ..check.reads import calls
from .workloads import BY_HAND, ByHand, boundaries_of, packed, small_llama

COMMAND = "python -m compat_matrix.bench.own_time"
VERSIONS = (environments.newest().name, "5.22.2", "4.43.4")
LAYERS, MORE_MODULES, REPEATS = 80, 2000, 150
BASE, WAYS = "by hand", ("position_ids only", "the collator's lengths")
# The layers of the models whose first capture is timed. Torch disassembles each function that it meets once, so that
# the share of the patch falls with the number of layers.
CAPTURED, CAPTURED_TOO = 4, 32

Rows = dict[str, float]
Runs = dict[str, Callable[[], Any]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("ref", nargs="?", metavar="REF", help="the commit that is measured beside the files of now")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, metavar="V", help="default: " + " ".join(VERSIONS))
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; default 3")
    parser.add_argument("--environments", type=Path, default=commits.ROOT / ".compat", help="where they are kept")
    parser.add_argument("--here", action="store_true", help="print what this process measures, as JSON")
    given = parser.parse_args(arguments)
    if given.here:
        print(json.dumps(measured()))
        return 0
    from ..screen import Console, Table  # not above: environments of releases have no rich
    from .against import order

    with tempfile.TemporaryDirectory(prefix="fa2patch-own-time-") as folder:
        # fa2patch of a commit and of now stand in these folders, each with the bench of now
        sides = {side: Path(folder).resolve() / side for side in (("before", "after") if given.ref else ("after",))}
        for home in sides.values():
            home.mkdir()
            (home / "compat_matrix").symlink_to(commits.ROOT / "compat_matrix", target_is_directory=True)
        (sides["after"] / "fa2patch").symlink_to(commits.ROOT / "fa2patch", target_is_directory=True)
        if given.ref:
            commits.export(commits.number(given.ref), "fa2patch", sides["before"])
        for name in given.versions:
            python = environments.make(environments.version(name), given.environments.resolve())
            runs: dict[str, list[Rows]] = {side: [] for side in sides}
            for side in order(given.rounds):
                if side in sides:
                    module = "compat_matrix.bench.own_time"
                    said = environments.printed(module, "--here", python=python, packages=sides[side])
                    runs[side].append(json.loads(said))
            table = Table("", *sides, title=f"Transformers {name}")
            for what in runs["after"][0]:
                medians = (statistics.median(run[what] for run in of_side) for of_side in runs.values())
                table.add_row(what, *(f"{median:,.2f}".removesuffix(".00") for median in medians))
            Console().print(table)
    return 0


# In an environment


def _calls(run: Callable[[], Any]) -> int:
    return sum(calls(run).values())


def measured() -> Rows:
    # The import is measured in processes of its own.
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, model = of_import(), on_meta(LAYERS)
    found[f"apply, {LAYERS} layers: calls"] = _calls(lambda: fa2patch.apply(model))
    with torch.no_grad():
        few, many, larger = (forwards(layers, more) for layers, more in ((2, 0), (6, 0), (2, MORE_MODULES)))
        found |= calls_of_forwards(few, many, larger)
        for way in WAYS:
            found |= _by_layers(way, "µs", *(_microseconds(runs[way], runs[BASE]) for runs in (few, many)))
        found |= _microseconds_of_seam()
    return {**found, **_of_capture()}


_IMPORT = """
import gc, json, sys, time, torch, transformers
from compat_matrix.check.reads import calls
began, collected = [0.0], []
def told(phase, info):
    if phase == "start":
        began[0] = time.perf_counter()
    else:
        collected.append((info["generation"], 1e3 * (time.perf_counter() - began[0])))
gc.callbacks.append(told)
before, started = set(sys.modules), time.perf_counter()
counts = calls(lambda: __import__("fa2patch").apply) if {counting} else __import__("fa2patch").apply and {{}}
taken = 1e3 * (time.perf_counter() - started)
full = sum(generation == 2 for generation, _ in collected)
modules = len(set(sys.modules) - before)
print(json.dumps([sum(counts.values()), modules, taken, sum(ms for _, ms in collected), full]))
"""


def of_import(repeats: int = 3) -> Rows:
    # torch and Transformers are imported before it.

    def run(counting: bool) -> list[float]:
        code = [sys.executable, "-c", _IMPORT.format(counting=counting)]
        return list(json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout))

    run(counting=False)  # it leaves bytecode
    count, modules, *_ = run(counting=True)
    times = [run(counting=False) for _ in range(repeats)]
    return {
        "import: calls": count,
        "import: modules": modules,
        "import: ms": statistics.median(each[2] for each in times),
        "import: of it garbage collection, ms": statistics.median(each[3] for each in times),
        "import: full garbage collections": max(each[4] for each in times),
    }


def on_meta(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers))


def calls_of_forwards(few: Runs, many: Runs, larger: Runs) -> Rows:
    # The forwards have 2, 6 and 2 layers. The last model holds more modules.
    counts = [{name: _calls(run) for name, run in runs.items()} for runs in (few, many, larger)]
    found: Rows = {}
    for way in WAYS:
        short, long, with_more = (count[way] - count[BASE] for count in counts)
        found |= _by_layers(way, "calls", short, long)
        found[f"{MORE_MODULES:,} more modules, {way}: calls"] = with_more - short
    return found


def _by_layers(way: str, unit: str, short: float, long: float) -> Rows:
    # short and long: of forwards with 2 and 6 layers
    return {
        f"a layer, {way}: {unit}": (long - short) / 4,
        f"a forward beyond its layers, {way}: {unit}": short - (long - short) / 2,
    }


def _microseconds_of_seam() -> Rows:
    # What a layer's attention function takes beyond the changes of shape that every varlen kernel needs. The kernel
    # returns the queries, and the call is repeated alone, so that its code is in the processor's caches. In a forward
    # it is not, and the same code takes several times as long.
    from transformers.models.llama import modeling_llama

    if not hasattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS"):  # before 4.48
        return {}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with _calls_of_seam(dtype) as (ours, shapes):
            found[f"a layer's seam alone, {str(dtype)[6:]}: µs"] = _repeated(ours) - _repeated(shapes)
    return found


@contextlib.contextmanager
def _calls_of_seam(dtype: Any) -> Iterator[tuple[Callable[[], Any], Callable[[], Any]]]:
    # The two call a patched layer's attention function, and the changes of shape alone.
    from transformers.models.llama import modeling_llama

    model = small_llama(2, 64).eval().to(dtype)
    fa2patch.apply(model, kernel="reference")
    layer, masks, heads = model.model.layers[0].self_attn, [], 2
    hook = layer.register_forward_pre_hook(
        lambda _, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    batch = packed([list(range(3, 12)), list(range(3, 10))])
    model(**batch)
    hook.remove()
    q, k, v = (torch.randn(1, heads, 16, 32, dtype=dtype) for _ in range(3))
    attention = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def ours() -> Any:
        masks[-1].calls.clear()
        return attention(layer, q, k, v, masks[-1], dropout=0.0, scaling=layer.scaling)

    def shapes() -> Any:
        masks[-1].calls.clear()
        a, b, c = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return a.flatten(0, 1), b.flatten(0, 1), c.flatten(0, 1), q.view(1, 16, heads, 32)

    with mock.patch.object(Reference, "__call__", lambda self, q, k, v, boundaries, options: q):
        yield ours, shapes


def _repeated(run: Callable[[], Any]) -> float:
    # It is the least of seven means, in µs of processor time.
    taken, times = [], 2000
    with _without_collection():
        for _ in range(7):
            started = time.process_time()
            for _ in range(times):
                run()
            taken.append((time.process_time() - started) / times)
    return 1e6 * min(taken)


def forwards(layers: int, more_modules: int = 0) -> Runs:
    # The row has two documents. The patched model may hold more modules, which compute nothing.
    documents = [list(range(3, 12)), list(range(3, 10))]
    plain, lengths = ({**packed(documents, each)} for each in (False, True))
    for batch in (plain, lengths):
        del batch["labels"]
    try:
        ByHand(Reference(), boundaries_of([9, 7]))
        bare = small_llama(layers, 64, BY_HAND).eval()
    except ImportError:  # before 4.48
        bare = small_llama(layers, 64).eval()
    patched = small_llama(layers, 64).eval()
    patched.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(more_modules))
    fa2patch.apply(patched, kernel="reference")
    runs: Runs = {
        BASE: lambda: bare(**plain),
        WAYS[0]: lambda: patched(**plain),
        WAYS[1]: lambda: patched(**lengths),
    }
    for run in (*runs.values(), *runs.values()):
        run()  # some checks are made only once for each model
    return runs


def _microseconds(run: Callable[[], Any], base: Callable[[], Any]) -> float:
    # It is the median of what a forward takes more than the base, in turns.
    taken = []
    with _without_collection():
        for _ in range(REPEATS):
            times = [time.process_time()]
            for each in (base, run):
                each()
                times.append(time.process_time())
            taken.append((times[2] - times[1]) - (times[1] - times[0]))
    return 1e6 * statistics.median(taken)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def steps_of_capture(patched: bool) -> int:
    # The number of instructions that dynamo traces is the same on every machine.
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    steps, traced = 0, InstructionTranslatorBase.step

    def step(self: Any) -> Any:
        nonlocal steps
        steps += 1
        return traced(self)

    run = _compiled(patched, CAPTURED, "eager")
    with mock.patch.object(InstructionTranslatorBase, "step", step):
        run(**packed([list(range(3, 3 + length)) for length in (9, 7, 4)]))
    return steps


def _compiled(patched: bool, layers: int, backend: Any) -> Any:
    torch._dynamo.reset()
    model = small_llama(layers, 64).bfloat16()
    if patched:
        fa2patch.apply(model)
    return torch.compile(model, backend=backend)


def _of_capture() -> Rows:
    # The models are in bfloat16, and times are multiples of the unpatched model's.
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    def captured(patched: bool, layers: int = CAPTURED) -> tuple[float, int]:
        graphs.clear()
        run, taken = _compiled(patched, layers, backend), []
        for lengths in ((9, 7, 4), (8, 6, 5), (5, 5, 5, 5), (21,)) if layers == CAPTURED else ((9, 7, 4),):
            batch = packed([list(range(3, 3 + length)) for length in lengths])
            started = time.process_time()
            run(**batch)
            taken.append(time.process_time() - started)
        return taken[0], len(graphs)

    if not hasattr(torch.library, "custom_op"):  # torch before 2.4 breaks the graph
        return {}
    captured(True), captured(False)
    pairs = [(captured(True), captured(False)) for _ in range(3)]
    larger = [(captured(True, CAPTURED_TOO), captured(False, CAPTURED_TOO)) for _ in range(3)]
    return {
        "first capture, traced instructions": steps_of_capture(True),
        "first capture, traced instructions, upstream": steps_of_capture(False),
        "first capture, to upstream's": statistics.median(a[0] / b[0] for a, b in pairs),
        f"first capture, {CAPTURED_TOO} layers, to upstream's": statistics.median(a[0] / b[0] for a, b in larger),
        "graphs of four batches": pairs[0][0][1],
        "graphs of four batches, upstream": pairs[0][1][1],
    }


if __name__ == "__main__":
    sys.exit(main())
