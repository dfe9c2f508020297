"""Fused losses of other packages on packed rows, with weights and without: ``fused_losses.py NAME ...``.

The names are those of REPLACED in tests/helpers/replaced_forwards.py, followed by "by document" or "by token" for
batches of ``loss_weights="document"`` or ``"token"``. Prints a JSON object: the cases of each name, each "right",
"refused: ERROR" or how far off.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
from replaced_forwards import cases

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps({name: cases(*name.split(" by ")) for name in sys.argv[1:]}))
