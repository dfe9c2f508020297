"""sentence-transformers on patched models: padded batches computed packed, with the same embeddings and losses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from in_stack import ROOT, run_in

from compat_matrix.ecosystem.stacks import stacks

SCRIPTS = Path(__file__).parent / "scripts"
OLDEST, OLD, NEW, NEWEST = (f"sentence-transformers-{number}" for number in ("3.0.1", "3.4.1", "5.7.0", "6.2.0"))

ONNX = "sentence-transformers-onnx"

pytestmark = pytest.mark.slow


@functools.cache
def found(stack: str, script: str, *arguments: str) -> dict[str, Any]:
    result = run_in(stack, SCRIPTS / script, *arguments)
    assert f"sentence-transformers=={result['version']}" in stacks()[stack].environment.pins
    return result


EMBEDDED = [
    (NEWEST, "bert", "sdpa"),
    (NEWEST, "roberta", "eager"),
    (NEWEST, "mpnet", "eager"),
    (NEWEST, "distilbert", "sdpa"),
    (NEWEST, "modernbert", "sdpa"),
    (NEWEST, "qwen3", "sdpa"),
    (NEW, "modernbert", "sdpa"),
    (NEW, "roberta", "sdpa"),
    (OLD, "bert", "sdpa"),
    (OLD, "mpnet", "eager"),
    (OLDEST, "roberta", "eager"),
    (OLDEST, "qwen2", "sdpa"),
]


@pytest.mark.parametrize(("stack", "family", "attention"), EMBEDDED)
def test_embeddings_are_those_of_the_unpatched_model(stack: str, family: str, attention: str) -> None:
    # The cases are all poolings, prompts, truncation, normalization, each token, an empty text and one text.
    result = found(stack, "st_embeddings.py", family, attention)
    assert max(result["off"].values()) < 1e-6, result["off"]
    assert result["different"] > 10
    tokens = result["tokens"]
    assert tokens["packed"] == tokens["of texts"] < 0.65 * tokens["padded"]
    assert result["verified"]


SENTENCES = ("multiple negatives", "cosine", "cached", "matryoshka", "fit")
TRAINED = {
    NEWEST: (*SENTENCES, "cross encoder", "sparse encoder"),
    NEW: (*SENTENCES, "cross encoder", "sparse encoder"),
    OLD: (*SENTENCES, "cross encoder, fit"),
    OLDEST: (*SENTENCES, "cross encoder, fit"),
}


@pytest.mark.parametrize(("stack", "kind"), [(stack, kind) for stack, kinds in TRAINED.items() for kind in kinds])
def test_thirty_steps_train_as_without_the_patch(stack: str, kind: str) -> None:
    result = found(stack, "st_training.py", "bert", *TRAINED[stack])[kind]
    losses, expected = result["losses"]
    assert len(expected) >= 30 or "fit" in kind
    assert losses == pytest.approx(expected, rel=1e-4)
    assert result["gradients"] < 1e-5
    assert result["compared"] > 20 or kind.split()[0] in ("cross", "sparse")
    assert result["results"] < 1e-4
    computed, padded = result["tokens"]
    assert computed < 0.85 * padded


@pytest.mark.parametrize("family", ["roberta", "modernbert"])
def test_its_own_flattening_is_right_beside_the_patch(family: str) -> None:
    # Texts are flattened for flash attention from 5.5 on; then the patch is handed a packed row.
    result = found(NEWEST, "st_flattened.py", family)
    assert result["flattened"] == [True, True, False]
    assert max(result["off"].values()) < 1e-6, result["off"]


def test_a_model_of_onnx_runtime_is_refused_by_name() -> None:
    said = found(ONNX, "st_onnx.py")["said"]
    assert len(said) == 2
    assert "SentenceTransformer around a ORTModelForFeatureExtraction" in said[0]
    assert "CrossEncoder around a ORTModelForSequenceClassification" in said[1]
    assert all("choose the backend 'torch'" in each for each in said)


def test_the_example_trains_as_without_the_patch(tmp_path: Path) -> None:
    packed, padded = found(NEWEST, "st_example.py", str(ROOT / "examples"), str(tmp_path))["losses"]
    assert len(packed) == 12
    assert packed[-1] < packed[0]
    assert packed == pytest.approx(padded, abs=2e-4)
