"""sentence-transformers' own flattening for flash attention, beside the patch: ``st_flattened.py FAMILY``.
A stand-in for flash-attn is imported first. The last line is a JSON object.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from compat_matrix.check import stand_in

stand_in.install()

import sentence_transformers  # noqa: E402
import torch  # noqa: E402
from st_folders import folder_of, sentence_transformer, texts  # noqa: E402

import fa2patch  # noqa: E402


def main(family: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = folder_of(family, Path(home))
        expected = encoded(sentence_transformer(folder))
        model = sentence_transformer(folder, attention="flash_attention_2")
    rows: list[tuple[int, ...]] = []
    model[0].register_forward_pre_hook(lambda module, args: rows.append(tuple(args[0]["input_ids"].shape)))
    found: dict[str, Any] = {"alone": encoded(model)}
    fa2patch.apply(model)
    found["patched"] = encoded(model)
    found["flattened"] = [shape[0] == 1 for shape in rows]
    model[0].unpad_inputs = False
    rows.clear()
    found["patched, padded"] = encoded(model)
    found["flattened"].append(rows[0][0] == 1)
    scale = float(expected.abs().max())
    off = {name: float((each - expected).abs().max()) / scale for name, each in found.items() if name != "flattened"}
    print(json.dumps({"version": sentence_transformers.__version__, "off": off, "flattened": found["flattened"]}))


def encoded(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.encode(texts(), convert_to_tensor=True)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
