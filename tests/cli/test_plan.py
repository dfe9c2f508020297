"""``fa2patch plan`` compares padding, packing and a budget on a dataset's lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fa2patch.cli import commands
from fa2patch.cli.plan import compared
from fa2patch.packing import plan

LENGTHS = np.random.default_rng(0).integers(3, 400, 200)


def run(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "120"}).invoke(commands.main, ["plan", *map(str, arguments)])


def files(folder: Path) -> dict[str, Path]:
    rows = [{"input_ids": [1] * int(length)} for length in LENGTHS]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "lengths.json").write_text(json.dumps(LENGTHS.tolist()))
    (folder / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    np.save(folder / "lengths.npy", LENGTHS)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".npy"])
def test_every_format_gives_the_same_numbers(tmp_path: Path, suffix: str) -> None:
    done = run(files(tmp_path)[suffix], "--max-tokens", 500, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["examples"], found["tokens"]) == (200, int(LENGTHS.sum()))
    padded, packed, passes, filled = found["ways"]
    assert padded["steps"] == packed["steps"] == passes["steps"] == 25 and filled["steps"] >= LENGTHS.sum() / 500
    assert padded["cost"] == 1 > packed["cost"] and padded["tokens"] > packed["tokens"] == LENGTHS.sum()
    assert passes["largest"] == 500 and passes["passes"] > 1


@pytest.mark.parametrize("ranks", [1, 4])
def test_numbers_are_those_of_the_batches(ranks: int) -> None:
    padded, packed, passes, filled = compared(plan(LENGTHS, 500), 8, ranks)
    assert padded.tokens * (1 - padded.padding) == pytest.approx(LENGTHS.sum())
    assert padded.largest <= 8 * LENGTHS.max() and packed.tokens == filled.tokens == LENGTHS.sum()
    assert passes.imbalance <= packed.imbalance + 1e-9


def test_what_is_printed_has_a_picture_a_table_and_advice(tmp_path: Path) -> None:
    done = run(files(tmp_path)[".txt"], "--max-tokens", 500, "--ranks", 2)
    assert done.exit_code == 0 and done.output.count("█") > 100
    said = " ".join(done.output.split())
    assert all(part in said for part in ("mini-batches, in passes", "imbalance", "another training"))
    assert repr(plan(LENGTHS, 500)) in said


def test_little_padding_is_said(tmp_path: Path) -> None:
    (tmp_path / "alike.txt").write_text("\n".join(["100"] * 50))
    assert "packing saves little here" in run(tmp_path / "alike.txt", "--max-tokens", 500).output


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"text": "a b"}', "looked for --tokenizer NAME, because it holds texts"),
        ("a.jsonl", '{"x": 1}', "looked for input_ids, text, or prompt and completion"),
        ("a.jsonl", "not json", "cannot be read: JSONDecodeError"),
        ("a.txt", "", "looked for one length of at least 1 for each example"),
        ("a.txt", "3 0 4", "with 0. Leave empty examples out"),
        ("a.json", "[[1, 2]]", r"found an array [1, 2]"),
        ("a.txt", "3 700 4", "1 of 3 that are longer: the longest has 700 tokens"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    done = run(tmp_path / name, "--max-tokens", 500)
    assert done.exit_code == 2 and said in " ".join(done.output.split())
