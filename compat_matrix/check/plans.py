"""Print what ``apply`` finds in every architecture of this environment, one JSON a line. ``run`` starts it.

No forward is run. The last line tells what was executed for all of them.
"""

from __future__ import annotations

from . import executed

executed.record()  # before anything of fa2patch is imported

import argparse  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402

from . import found, process  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and print the lines to stdout."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check.plans", description=__doc__)
    parser.add_argument("--families", nargs="*")
    given = parser.parse_args(arguments)
    # flash-attn's stand-in is there for all; that a seam is the same without it is found when the cells are run
    out = process.lines(stand_in=True)
    from .. import tiny_media, tiny_models  # noqa: F401  # the first adds models of pictures and sound
    from . import plan

    implementations = [each for part in found.IMPLEMENTATIONS.values() for each in part]
    for architecture in filter(tiny_models.is_present, given.families or tiny_models.architectures()):
        said = {"architecture": architecture, "cell": plan.of(architecture, implementations)}
        print(json.dumps(said), file=out, flush=True)
    print(json.dumps({"architecture": found.EXECUTED, "cell": executed.executed()}), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
