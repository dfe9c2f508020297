"""Check every architecture at every point in this environment and write one JSON. ``compat_matrix.run`` starts it."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path

from . import found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and write the JSON to ``--output`` or stdout."""
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check", description=__doc__)
    parser.add_argument("--flash-attn", choices=sorted(found.IMPLEMENTATIONS), default="without")
    parser.add_argument("--families", nargs="*")
    parser.add_argument("--points", nargs="*")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", USE_TF="0")
    warnings.simplefilter("ignore")
    if given.flash_attn == "with":
        from . import stand_in

        stand_in.install()
    import torch
    import transformers

    from .. import tiny_models
    from ..user_models import models
    from . import upstream
    from .points import POINTS

    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a fifth of the time went into garbage collection of tiny models
    points = given.points or list(POINTS)
    cells = {}
    for architecture in given.families or tiny_models.architectures():
        if not tiny_models.is_present(architecture):
            continue
        check = functools.partial(found.cell, architecture, found.IMPLEMENTATIONS[given.flash_attn], points)
        cells[architecture] = found.timed(check)
        if models.is_file(architecture):
            cells[architecture]["notes"] = models.notes(architecture, tiny_models.config_class(architecture))
        print(f"{architecture}: {cells[architecture]}", file=sys.stderr, flush=True)
    evidence = {
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "wrapt": metadata.version("wrapt"),
        "flash_attn": "stand-in" if given.flash_attn == "with" else None,
        "device": "cpu",
        "kernel": "reference",
        "points": points,
        "upstream_rows": list(upstream.ROWS),
        "architectures": cells,
    }
    text = json.dumps(evidence, indent=1)
    given.output.write_text(text + "\n") if given.output else print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
