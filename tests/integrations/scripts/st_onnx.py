"""Models of sentence-transformers that ONNX Runtime computes, handed to ``apply``: the errors, as JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import sentence_transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from st_folders import folder_of

import fa2patch
from fa2patch.errors import NotAModel


def main() -> None:
    said = []
    with tempfile.TemporaryDirectory() as home:
        folder = folder_of("bert", Path(home))
        for cls in (SentenceTransformer, CrossEncoder):
            try:
                fa2patch.apply(cls(folder, backend="onnx", device="cpu"))
            except NotAModel as error:
                said.append(error.message)
    print(json.dumps({"version": sentence_transformers.__version__, "said": said}))


if __name__ == "__main__":
    main()
