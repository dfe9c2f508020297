"""Run ``examples/embeddings.py`` as it is, then without the patch: ``st_example.py EXAMPLES OUTPUT``."""

from __future__ import annotations

import json
import sys

sys.path.insert(0, sys.argv[1])

import embeddings  # type: ignore[import-not-found]  # noqa: E402
import sentence_transformers  # noqa: E402

import fa2patch  # noqa: E402


def losses() -> list[float]:
    trainer = embeddings.main(["--steps", "12", "--output", sys.argv[2]])
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


packed = losses()
fa2patch.apply = lambda model: None  # type: ignore[assignment, misc]
print(json.dumps({"version": sentence_transformers.__version__, "losses": [packed, losses()]}))
