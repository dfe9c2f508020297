"""One environment, one JSON: every family present, every implementation, every point. ``__main__`` runs it in each."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

IMPLEMENTATIONS = {"without": ("eager", "sdpa"), "with": ("eager", "flash_attention_2")}
"""What is checked without flash-attn, and with (its stand-in on a CPU)."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.check", description=__doc__)
    parser.add_argument("--flash-attn", choices=sorted(IMPLEMENTATIONS), default="without")
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

    from . import tiny_models
    from .points import POINTS

    torch.set_num_threads(1)
    started = time.time()
    cells: dict[str, Any] = {}
    for family in given.families or tiny_models.FAMILIES:
        if not tiny_models.is_present(family):
            cells[family] = "absent"
            continue
        cells[family] = {}
        for implementation in IMPLEMENTATIONS[given.flash_attn]:
            results = _cell(family, implementation, given.points or list(POINTS))
            cells[family][implementation] = results
            bad = [f"{name}: {result}" for name, result in results.items() if result.startswith("FAIL")]
            print(f"{family} {implementation}: {'; '.join(bad) or 'ok'}", file=sys.stderr, flush=True)
    evidence = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "flash_attn": "stand-in" if given.flash_attn == "with" else None,
        "device": "cpu",
        "kernel": "reference",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.time() - started, 1),
        "cells": cells,
    }
    text = json.dumps(evidence, indent=1)
    given.output.write_text(text + "\n") if given.output else print(text)
    return 0


def _cell(family: str, implementation: str, points: list[str]) -> dict[str, str]:
    import torch

    from . import tiny_models
    from .points import POINTS, Cell, NotApplicable

    try:
        tiny_models.build(family, implementation)
    except (ValueError, ImportError) as error:
        if implementation == "sdpa" and "scaled_dot_product" in str(error):
            return {"load": "n/a: this version of the family has no sdpa implementation"}
        return {"load": f"FAIL: {error}"}
    cell, results = Cell(family, implementation), {}
    for name in points:
        try:
            torch.manual_seed(0)
            POINTS[name](cell)
            results[name] = "ok"
        except NotApplicable as reason:
            results[name] = f"n/a: {reason}"
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            results[name] = f"FAIL: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"[:400]
            if os.environ.get("FA2PATCH_TRACE"):
                traceback.print_exc()
    return results


if __name__ == "__main__":
    sys.exit(main())
