"""Check every architecture in this environment and print one JSON a line. ``compat_matrix.run`` starts it.

The first line is about the environment. Each further line is a cell, printed as soon as it is checked. A cell is
checked in a process of its own, forked where the system can: caches are empty then, so that what the process executes
is what the cell depends on (``executed``), and a crash costs one cell.

With ``--plans`` each line is what ``apply`` finds in an architecture. No forward is run. The last line tells what was
executed for all of them.
"""

from __future__ import annotations

from . import executed

executed.record()  # before anything of fa2patch is imported

import argparse  # noqa: E402
import contextlib  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Iterable  # noqa: E402
from typing import Any, Callable, TextIO  # noqa: E402

from . import found  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check", description=__doc__)
    parser.add_argument("--flash-attn", choices=sorted(found.IMPLEMENTATIONS), default="without")
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--points", nargs="*")
    parser.add_argument(
        "--vouched", type=json.loads, default={}, metavar="JSON", help="by architecture, who vouches for its points"
    )
    parser.add_argument("--plans", action="store_true", help="find plans instead of checking")
    given = parser.parse_args(arguments)
    # plans are found with the stand-in for all; that a seam is the same without it is found when the cells are run
    out = _lines(stand_in=given.plans or given.flash_attn == "with")
    if given.plans:
        return _print_plans(given.families, out)
    import torch

    from .. import tiny_models
    from ..user_models import models
    from . import upstream
    from .points import POINTS

    with contextlib.suppress(ImportError):  # a version's environment may have none
        import peft  # noqa: F401  # else every cell's process would import it
    import torch._dynamo  # noqa: F401  # the same: the first random numbers on the meta device import it

    torch.set_num_threads(1)
    gc.set_threshold(100_000, 50, 50)  # a fifth of the time went into garbage collection of tiny models
    points = given.points or list(POINTS)
    implementations = found.IMPLEMENTATIONS[given.flash_attn]
    flash = "stand-in" if given.flash_attn == "with" else None
    about = found.header(flash, "cpu", "reference", points, list(upstream.ROWS))
    print(json.dumps(about), file=out, flush=True)
    for architecture in given.families or tiny_models.architectures():
        if not tiny_models.is_present(architecture):
            continue
        voucher = given.vouched.get(architecture, "")
        cell = in_child(functools.partial(_cell, architecture, implementations, points, voucher))
        if models.is_file(architecture):
            cell["notes"] = models.notes(architecture, tiny_models.config_class(architecture))
        print(json.dumps({"architecture": architecture, "cell": cell}), file=out, flush=True)
    return 0


def _lines(stand_in: bool) -> TextIO:
    # What libraries print goes to standard error, because standard output holds the lines. fa2patch must not be
    # imported before flash-attn's stand-in is in its place.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", USE_TF="0")
    warnings.simplefilter("ignore")
    if stand_in:
        from .stand_in import install

        install()
    return out


def _print_plans(families: Iterable[str] | None, out: TextIO) -> int:
    from .. import tiny_media, tiny_models  # noqa: F401  # the first adds models of pictures and sound
    from . import plan

    implementations = [each for part in found.IMPLEMENTATIONS.values() for each in part]
    for architecture in filter(tiny_models.is_present, families or tiny_models.architectures()):
        said = {"architecture": architecture, "cell": plan.of(architecture, implementations)}
        print(json.dumps(said), file=out, flush=True)
    print(json.dumps({"architecture": found.EXECUTED, "cell": executed.executed()}), file=out, flush=True)
    return 0


def _cell(architecture: str, implementations: tuple[str, ...], points: list[str], voucher: str) -> dict[str, Any]:
    made = found.timed(functools.partial(found.cell, architecture, implementations, points, voucher))
    made["made"]["executed"] = executed.executed()
    return made


def in_child(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    # An error of the process itself, such as a crash, is the cell's error. Where the system cannot fork, check runs in
    # this process.
    if "fork" not in multiprocessing.get_all_start_methods():
        return check()
    gc.collect()
    gc.freeze()
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: writing.send(check()))
    child.start()
    writing.close()
    try:
        said = reading.recv()
    except (EOFError, OSError):
        said = None
    child.join()
    if said is None:
        why = f"the process of this cell ended with status {child.exitcode} and no findings"
        said = found.timed(lambda: {"error": why})
        said["made"]["executed"] = executed.executed()
    return dict(said)


if __name__ == "__main__":
    sys.exit(main())
