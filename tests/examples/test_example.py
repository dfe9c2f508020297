"""examples/train_packed.py runs, both of its trainings have the same losses, and it reports bad data."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

for needed in ("transformers", "accelerate", "tokenizers", "matplotlib", "rich", "psutil"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
# The two trainings may differ only by rounding, which grows with the steps: 1e-7 is usual after 8, 1e-5 after 200.
# If documents leak into each other (packed and not patched, Transformers 4.44), the difference is 1e-2 after 8.
QUICK_TOLERANCE, FULL_TOLERANCE = 1e-5, 1e-3


@pytest.fixture(scope="module")
def script(example) -> ModuleType:
    return example("train_packed")


@pytest.fixture
def train(printed, tmp_path: Path):
    def train(*options: str) -> dict:
        said = printed(ROOT / "examples" / "train_packed.py", "--output", tmp_path, *options)
        assert "packed / padded" in said
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        return json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))

    return train


def check(results: dict, steps: int, tolerance: float) -> None:
    padded, packed = results["runs"]
    assert (padded["variant"], packed["variant"]) == ("padded", "packed")
    assert padded["optimizer_steps"] == packed["optimizer_steps"] == steps
    for key in ("checksum", "real", "targets"):
        assert [batch[key] for batch in padded["batches"]] == [batch[key] for batch in packed["batches"]]
    assert len(packed["batches"]) == steps
    assert all(batch["computed"] == batch["real"] for batch in packed["batches"])
    assert results["comparison"]["padded_tokens_per_real_token"] > 1.5

    assert [step for step, _ in padded["validation_curve"]] == [step for step, _ in packed["validation_curve"]]
    losses = [loss for _, loss in packed["validation_curve"]]
    assert losses[-1] < losses[0] - 0.2, "nothing was learnt, so equal curves would prove nothing"
    assert results["comparison"]["largest_validation_difference"] < tolerance
    assert packed["validation_loss_in_own_layout"] == pytest.approx(losses[-1], abs=1e-5)
    assert packed["training_memory_bytes"] < padded["training_memory_bytes"]


@pytest.mark.slow
def test_quick_run_trains_the_same_padded_and_packed(train) -> None:
    results = train("--quick")
    check(results, steps=8, tolerance=QUICK_TOLERANCE)
    assert results["command"].endswith("--quick") and {"date", "commit", "versions"} <= {*results}


@pytest.mark.slow
def test_full_run_trains_the_same_padded_and_packed(train) -> None:
    check(train(), steps=200, tolerance=FULL_TOLERANCE)


def test_what_is_committed_is_the_full_experiment() -> None:
    folder = ROOT / "examples" / "padded_and_packed"
    check(json.loads((folder / "results.json").read_text(encoding="utf-8")), steps=200, tolerance=FULL_TOLERANCE)


@pytest.mark.slow
def test_texts_of_the_standard_library(script: ModuleType) -> None:
    texts = script.standard_library()
    assert len(texts) > 3000
    assert len(set(texts)) == len(texts)
    assert ("# json\ndef loads(", "Deserialize ``s``") in {(p[:17], c[:17]) for p, c in texts}


def test_split_depends_on_the_texts_and_not_on_their_order(script: ModuleType) -> None:
    texts = [(f"prompt {number}", f"completion {number}") for number in range(1000)]
    train_texts, held_out = script.split(texts, limit=128)
    assert len(held_out) == 50
    assert sorted(train_texts + held_out) == sorted(texts)
    assert script.split(texts[::-1], limit=128) == (train_texts, held_out)


def test_rows_of_both_kinds_are_read(script: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n\n{"text": "ä"}\n', encoding="utf-8")
    assert script.read_jsonl(file) == [("a", "b"), ("", "ä")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"line 2: expected a JSON object, found no JSON \(.*column \d"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ("{}", "line 2: expected 'prompt' and 'completion', or 'text'; found no keys"),
        ('{"prompt": "a"}', r"line 2: expected 'prompt' and 'completion', or 'text'; found \['prompt'\]"),
        ('{"text": 1}', "line 2: expected a string under 'text', found int"),
        ('{"prompt": "a", "completion": ""}', "line 2: expected something to learn under 'completion'"),
        (r'{"text": "\ud800"}', "line 2: expected Unicode text under 'text', found surrogates"),
        ('{"messages": []}', "line 2: .* found 'messages'. .*apply_chat_template"),
    ],
)
def test_bad_row_is_named(script: ModuleType, tmp_path: Path, row: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=message):
        script.main(["--data", str(file), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("content", [None, "", '{"text": "only one document"}\n'])
def test_unusable_file_is_named(script: ModuleType, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"data\.jsonl: expected"):
        script.main(["--data", str(file), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("option", [["--steps", "1"], ["--batch-size", "0"], ["--eval-every", "x"]])
def test_bad_number_is_named(script: ModuleType, capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(option)
    assert f"{option[0]}: expected a whole number from" in capsys.readouterr().err
