"""Fused losses of other packages on packed rows, by token and by document: ``fused_losses.py NAME ...``.

The names are those of tests/helpers/replaced_forwards.py's REPLACED, followed by "by document" for batches of
``loss_weights="document"``. Prints a JSON object: the cases of each name, each "right", "refused: ERROR" or how far
off.
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
    by_document = " by document"
    print(json.dumps({name: cases(name.replace(by_document, ""), by_document in name) for name in sys.argv[1:]}))
