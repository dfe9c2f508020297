"""examples/reproduce_paper.py: each variant's training data, the computed claims, and the committed results."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

for needed in ("transformers", "accelerate", "tokenizers", "matplotlib", "rich", "psutil", "tqdm"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "examples/paper"
PADDING, ONLINE, OFFLINE = "padding", "online mini-batch + ids", "offline packing + ids"
LEAKY_ROWS, LEAKY = "packing, no ids", "online mini-batch, no ids"
WITH_IDS = (OFFLINE, ONLINE, "sorted + ids", "multipack + ids")


@pytest.fixture(scope="module")
def variants(example) -> ModuleType:
    return example("paper_variants")


@pytest.fixture(scope="module")
def report(example) -> ModuleType:
    return example("paper_report")


def documents(count: int = 48, longest: int = 24, seed: int = 0) -> list[dict]:
    # The documents count upwards, each from another number, so that they can be told apart. The first two tokens of
    # each are not learned.
    rng = np.random.default_rng(seed)
    found = []
    for start in range(count):
        ids = [(start + offset) % 60 + 1 for offset in range(rng.integers(4, longest + 1))]
        found.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return found


@pytest.fixture(scope="module")
def runs(example, variants: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    job = {
        "train": documents(),
        "validation": documents(8, seed=1),
        "vocab_size": 64,
        "model": None,
        "max_length": 24,
        "batch_size": 4,
        "row_length": 40,
        "accumulate": 2,
        "evaluations": 2,
        "learning_rate": 2e-3,
        "seed": 0,
        "scratch": str(tmp_path_factory.mktemp("scratch")),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)  # the tolerances are for training on a CPU
        return {name: example("paper_once").train({**job, "variant": name}) for name in variants.VARIANTS}


def members(mini_batches: list[list[dict]]) -> Counter:
    return Counter(tuple(document["input_ids"]) for mini_batch in mini_batches for document in mini_batch)


@pytest.mark.parametrize("name", [PADDING, *WITH_IDS, LEAKY])
def test_every_document_is_whole_and_trained_on_once(variants, name):
    given = documents()
    mini_batches = variants.VARIANTS[name].mini_batches(given, variants.Sizes(4, 40, seed=0))
    assert members(mini_batches) == members([given])
    other = variants.VARIANTS[name].mini_batches(given, variants.Sizes(4, 40, seed=1))
    assert members(other) == members([given]) and other != mini_batches


def test_rows_without_ids_are_cut_wherever_they_are_full(variants):
    given = documents()
    mini_batches = variants.cut_to_length(given, variants.Sizes(4, 40, seed=0))
    rows = [row for mini_batch in mini_batches for row in mini_batch]
    assert {len(row["input_ids"]) for row in rows} == {len(row["labels"]) for row in rows} == {40}
    tokens = [token for row in rows for token in row["input_ids"]]
    stream = [token for document in variants.shuffled(given, 0) for token in document["input_ids"]]
    assert tokens == stream[: len(tokens)] and len(stream) - len(tokens) < 40
    batch = variants.rows_without_ids(mini_batches[0])
    assert set(batch) == {"input_ids", "labels"} and batch["input_ids"].shape == (4, 40)


def test_only_variants_with_ids_say_where_documents_start(variants):
    given = documents(4)
    for name, variant in variants.VARIANTS.items():
        if name != LEAKY_ROWS:
            assert ("position_ids" in variant.collate(given)) == variant.ids == (name in WITH_IDS), name


@pytest.mark.parametrize("name", ["sorted + ids", "multipack + ids"])
def test_sample_selection_keeps_to_the_tokens_of_an_average_mini_batch(variants, name):
    given, sizes = documents(400), variants.Sizes(4, 40, seed=0)
    tokens = variants.lengths(given)
    limit = round(4 * tokens.mean())
    mini_batches = variants.VARIANTS[name].mini_batches(given, sizes)
    assert max(int(variants.lengths(mini_batch).sum()) for mini_batch in mini_batches) <= limit
    assert 100 <= len(mini_batches) < 130, "about as many as 400 documents in fours"


@pytest.mark.slow
def test_every_variant_trains_one_epoch(runs):
    for name, run in runs.items():
        assert run["optimizer_steps"] == -(-run["mini_batches"] // 2), name
        assert run["validation_loss"] < run["validation_curve"][0][1], name
        assert min(run["real_tokens_per_second"], run["real_tokens_per_processor_second"]) > 0, name
    everything = sum(len(document["input_ids"]) for document in documents())
    assert all(run["real_tokens"] == everything for name, run in runs.items() if name != LEAKY_ROWS)
    assert all(run["computed_tokens"] == run["real_tokens"] for name, run in runs.items() if name != PADDING)
    assert runs[PADDING]["computed_tokens"] > 1.2 * everything
    assert runs[OFFLINE]["mini_batches"] < runs[ONLINE]["mini_batches"] / 2


@pytest.mark.slow
def test_online_mini_batches_are_the_padded_run(runs):
    padded, packed = runs[PADDING], runs[ONLINE]
    for key in ("checksum", "targets", "rows", "optimizer_steps"):
        assert padded[key] == packed[key], key
    for curve in ("validation_curve", "train_curve"):
        assert packed[curve] == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in padded[curve]]
    assert packed["validation_loss_packed"] == pytest.approx(packed["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_without_ids_the_same_mini_batches_train_another_model(runs):
    assert runs[LEAKY]["checksum"] == runs[ONLINE]["checksum"]
    assert abs(runs[LEAKY]["validation_loss"] / runs[ONLINE]["validation_loss"] - 1) > 1e-4


@pytest.mark.slow
def test_claims_are_computed(report, runs):
    held = {found["claim"]: found["holds"] for found in report.findings(list(runs.values()))}
    assert len(held) == 5
    equal = next(claim for claim in held if claim.startswith(f"{ONLINE} equals"))
    assert held[equal]
    leaked = {**runs, ONLINE: {**runs[LEAKY], "variant": ONLINE}}
    assert not {found["claim"]: found["holds"] for found in report.findings(list(leaked.values()))}[equal]
    fewer = next(claim for claim in held if "fewer steps" in claim)
    swapped = [
        {**runs[OFFLINE], "validation_loss": runs[ONLINE]["validation_loss"]},
        {**runs[ONLINE], "validation_loss": runs[ONLINE]["validation_loss"] + 0.1},
    ]
    assert {found["claim"]: found["holds"] for found in report.findings(swapped)} == {fewer: False}


@pytest.mark.parametrize(
    ("folder", "names"),
    [
        (COMMITTED, {PADDING, LEAKY_ROWS, LEAKY, *WITH_IDS}),
        (COMMITTED / "longer", {ONLINE, LEAKY}),
    ],
    ids=["all", "longer"],
)
def test_what_is_committed_is_one_experiment(report, folder, names, tmp_path):
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert set(report.by_variant(results["runs"])) == names
    assert results["summaries"] == report.summaries(results["runs"])
    assert results["findings"] == report.findings(results["runs"])
    assert (folder / "TABLE.md").read_text(encoding="utf-8") == report.markdown(results)
    report.figure(results, tmp_path / "figures.png")
    for file in (tmp_path, folder):
        assert (file / "figures.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--row-length", "100", "--max-length", "200"], "--row-length 100 is shorter than --max-length 200"),
        (["--batch-size", "0"], "expected a whole number from 1"),
        (["--variants", "magic"], "invalid choice: 'magic'"),
    ],
)
def test_bad_option_is_named(example, capsys, given, message):
    with pytest.raises(SystemExit):
        example("reproduce_paper").main(given)
    assert message in capsys.readouterr().err


def test_the_table_names_the_commit(report):
    import made_by

    results = json.loads((COMMITTED / "results.json").read_text(encoding="utf-8"))
    assert ", commit 123456789abc, LlamaForCausalLM" in report.markdown({**results, "commit": "123456789abc"})
    assert ", LlamaForCausalLM" in report.markdown({**results, "commit": None})
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (made_by.commit() or "").removesuffix("-dirty") == head[:12]


def test_outside_a_clone_there_is_no_commit(report, monkeypatch):
    import made_by

    monkeypatch.setenv("GIT_DIR", str(ROOT / "nowhere"))
    assert made_by.commit() is None


@pytest.mark.slow
def test_quick_experiment(printed, tmp_path):
    said = printed(ROOT / "examples/reproduce_paper.py", "--quick", "--output", tmp_path)
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert len(results["runs"]) == 7
    assert results["findings"][0]["holds"], results["findings"][0]
    assert (tmp_path / "TABLE.md").read_text(encoding="utf-8") in said
