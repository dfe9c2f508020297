"""The benchmark counts and computes what it claims. No test depends on how long anything takes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

import fa2patch
from compat_matrix import environments, tiny_models
from compat_matrix.bench import __main__ as bench
from compat_matrix.bench import (
    collator,
    compile,
    counting,
    figures,
    gpu,
    gpu_once,
    kernels,
    lengths,
    plots,
    syncs,
    syncs_once,
    tables,
)
from compat_matrix.check.rows import documents, pack

PARTS = ("kernels", "overhead", "mixers", "training", "sharing", "collator")
"""The parts that need seconds and no other environment."""


@pytest.fixture
def as_it_was(monkeypatch):
    """Restore the environment variables and the number of threads that the benchmark sets."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, "")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# --- counting -------------------------------------------------------------------------------------------------

READS = {
    "item": (lambda x: x.sum().item(), 1),
    "bool": (lambda x: bool((x > 0).all()), 1),
    "int": (lambda x: int(x.max()), 1),
    "cpu and numpy": (lambda x: x.cpu().numpy(), 1),
    "numpy": (lambda x: x.detach().numpy(), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "to cpu, then more": (lambda x: (x.to("cpu") * 2).max().item(), 1),
    "to a dtype": (lambda x: x.to(torch.float64), 0),
    "nonzero": (lambda x: (x > 0).nonzero(), 1),
    "boolean index": (lambda x: x[x > 0], 1),
    "integer index": (lambda x: x[torch.tensor([0])], 0),
    "equal": (lambda x: torch.equal(x, x), 1),
    "unique": (lambda x: x.unique(), 1),
    "repeat_interleave": (lambda x: x.repeat_interleave(x.long()), 1),
    "repeat_interleave of known size": (lambda x: x.repeat_interleave(x.long(), output_size=6), 0),
    "arithmetic": (lambda x: (x + 1).cumsum(0).max(), 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_counted_once(name):
    read, expected = READS[name]
    with counting.counted(packages=(__name__,)) as count:
        read(torch.tensor([1.0, 2.0, 3.0]))
    assert count.reads == expected, count.where


class Layer(torch.nn.Module):
    def forward(self, x):
        return x * x.max().item() if x.min() > 0 else x


def test_a_model_of_known_reads():
    model = torch.nn.Sequential(*(Layer() for _ in range(5)))
    with counting.counted(packages=(__name__,)) as count:
        model(torch.ones(3))
    assert (count.reads, sum(count.where.values())) == (10, 10)


def test_reads_of_others_are_not_counted_and_afterwards_nothing_is():
    with counting.counted(packages=("somebody",)) as count:
        torch.ones(3).tolist()
    before = torch.Tensor.tolist
    torch.ones(3).tolist()
    assert (count.reads, before is torch.Tensor.tolist, sys.getprofile()) == (0, True, None)


def test_tensors_that_a_kernel_wants_as_numbers_are_counted():
    kernel = counting.watched(lambda **keywords: None)
    with counting.counted() as count:
        kernel(max_seqlen_q=torch.tensor(3), max_seqlen_k=3)
        kernel(max_seqlen_q=torch.tensor(3), max_seqlen_k=torch.tensor(3))
    assert count.arguments == 3


@pytest.mark.parametrize("given, reads, derived", [("position_ids", 1, 1), ("lengths", 0, 0)])
@pytest.mark.parametrize("layers", [1, 5])
def test_fa2patch_reads_once_whatever_the_layers_and_not_at_all_with_lengths(layers, given, reads, derived):
    model = tiny_models.build("llama", "sdpa", num_hidden_layers=layers)
    batch = syncs_once.row(given == "lengths")
    with fa2patch.apply(model, kernel="reference"), counting.counted() as count:
        model(**batch, use_cache=False)
    assert (count.reads, count.derived, count.arguments) == (reads, derived, 0), count.where


# --- lengths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution, ratio", [(lengths.FLAN, 2.066), (lengths.ORCAMATH, 1.448)])
def test_padding_ratios(distribution, ratio):
    """The expected ratios are of one shuffle. The mean over all mini-batches differs from them in the fourth digit."""
    assert lengths.expected_padding_ratio(distribution.draw(20_000, seed=0), 4) == pytest.approx(ratio, abs=1e-3)


def test_padding_ratio_is_what_mini_batches_hold():
    assert lengths.padding_ratio([[1, 3], [2, 2]]) == (6 + 4) / 8
    assert lengths.expected_padding_ratio([1, 3], 2) == pytest.approx(6 / 4)
    assert lengths.expected_padding_ratio([1, 2, 3], 2) == pytest.approx((2 + 3 + 3) / 3 / 2)


def test_scaled_documents_keep_the_ratio():
    small = lengths.FLAN.scaled(0.25).draw(20_000)
    assert lengths.expected_padding_ratio(small, 4) == pytest.approx(2.066, abs=5e-3)


def test_scores_are_what_a_masked_kernel_keeps():
    for drawn in ([5, 3, 1], lengths.filled(lengths.FLAN.scaled(0.02), 64)):
        document = torch.repeat_interleave(torch.arange(len(drawn)), torch.tensor(drawn))
        assert lengths.scores(drawn) == int((document[:, None] == document).sum())


def test_layouts_hold_the_same_tokens_and_fewer_scores_the_shorter_documents_are():
    rows = kernels.layouts(2048)
    assert {sum(row) for row in rows.values()} == {2048}
    equal = [lengths.scores(row) for name, row in rows.items() if " x " in name]
    assert equal == [2048**2 // 2**power for power in range(12)]


# --- parts ----------------------------------------------------------------------------------------------------


def test_quick_parts_give_well_formed_json(tmp_path, as_it_was, capsys):
    assert bench.main(["--parts", *PARTS, "--quick", "--out", str(tmp_path)]) == 0
    assert "Training, padded and packed" in capsys.readouterr().out
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in PARTS}
    for part, result in found.items():
        assert result["command"] == f"python -m compat_matrix.bench --parts {part} --quick"
        assert {"date", "device", "threads", "python", "torch", "transformers"} <= set(result)
    for row in found["kernels"]["rows"]:
        assert all(rival["away_from_reference"] < 1e-4 for rival in row["causal"].values())
    for run in found["training"]["runs"]:
        assert {rival["optimizer_steps"] for rival in run["rivals"].values()} == {2}
        assert all(rival["largest_loss_difference"] < 1e-4 for rival in run["rivals"].values())
    assert {row["kind"] for row in found["collator"]["rows"]} == set(collator.KINDS)


@pytest.mark.parametrize("case", [case for case in collator.CASES if case.tokens < 2048], ids=str)
def test_both_collators_make_the_same_row_of_the_same_examples(case):
    ours, theirs = (collate() for collate in collator.rivals(case).values())
    assert set(ours) - set(theirs) == {"weights"} & set(collator.COLUMNS[case.columns])
    for name, expected in theirs.items():
        assert ours[name] == expected if isinstance(expected, int) else torch.equal(ours[name], expected), name


def test_layouts_of_a_compiled_model_are_one_graph_and_an_error_is_named(monkeypatch):
    rows = compile.batches(3, {})
    assert len({tuple(row["input_ids"].shape) for row in rows}) == 3
    monkeypatch.setattr(compile, "LAYERS", 1)
    assert compile.whole(rows) == 2  # a whole row of the first length, and one of any length
    monkeypatch.setattr(
        compile, "steps", lambda model, rows: torch.compile(fails, fullgraph=True)(rows[0]["input_ids"])
    )
    assert compile.whole(rows) == "Unsupported"


def fails(ids):
    torch._dynamo.graph_break()
    return ids


def test_synchronisations_of_an_environment(tmp_path, monkeypatch):
    """The child process runs in this test's own environment."""
    monkeypatch.setattr(environments, "make", lambda *unused: Path(sys.executable))
    with Progress(disable=True) as progress:
        found = syncs.measure(progress, tmp_path, ("5.23.0",), quick=True)
    counts = found["versions"]["5.23.0"]["counts"]["llama"]
    assert [tables.total_reads(counts["fa2patch"][layers]) for layers in "24"] == [1, 1]
    assert [tables.total_reads(counts["fa2patch, lengths"][layers]) for layers in "24"] == [0, 0]
    two, four = (counts["upstream"][layers]["derived"] for layers in "24")
    assert four in (two, 2 * two)
    assert tables.of({"syncs": found})[0].rows


# --- gpu ------------------------------------------------------------------------------------------------------

TOY = ["--device", "cpu", "--toy", "--steps", "2", "--warm-up", "1", "--shapes", "Mistral-7B"]


def test_gpu_toy_on_a_cpu_goes_on_where_it_was_and_gives_no_figures(tmp_path, as_it_was, monkeypatch):
    started = []

    def once(settings, file, limit):
        started.append(settings["variant"])
        gpu.about.write(file, gpu_once.run(settings))

    monkeypatch.setattr(gpu, "once", once)
    variants = ["padded:sdpa", "fa2patch:reference", "fa2patch:reference+lengths", "by-hand:reference"]
    if importlib.util.find_spec("transformers.masking_utils") is None:
        variants.pop()
    arguments = [*TOY, "--out", str(tmp_path / "results")]
    assert gpu.main([*arguments, "--variants", *variants[:2]]) == 0
    assert gpu.main([*arguments, "--variants", *variants]) == 0
    assert started == variants
    with pytest.raises(SystemExit):
        gpu.main([*arguments, "--seed", "1"])
    found = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert found["toy"] is True
    for run in found["shapes"]["Mistral-7B"]["distributions"].values():
        assert list(run["variants"]) == variants
        losses = [variant["last_loss"] for variant in run["variants"].values()]
        assert max(losses) - min(losses) < 0.05  # the rounding of bfloat16
    assert figures.read(tmp_path / "results") == {}
    assert figures.OWED in figures.page({})


def test_gpu_needs_a_gpu_or_says_toy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "--device", "cpu"])
    assert "found none" in capsys.readouterr().err


def test_a_place_names_no_machine():
    assert gpu_once.place("/somewhere/lib/site-packages/torch/nn/functional.py", 3) == "torch/nn/functional.py:3"
    assert gpu_once.place("/a/clone/fa2patch/boundaries.py", 3) == "fa2patch/boundaries.py:3"


# --- figures --------------------------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_results_say():
    assert figures.main(["--check"]) == 0


def test_check_detects_drift(tmp_path, monkeypatch, capsys):
    results = figures.read(figures.HERE / "results")
    for part, result in results.items():
        gpu.about.write(tmp_path / "results" / f"{part}.json", result)
    monkeypatch.setattr(plots, "cpu", lambda *unused: None)
    monkeypatch.setattr(plots, "gpu", lambda *unused: None)
    arguments = ["--folder", str(tmp_path)]
    assert figures.main([*arguments, "--check"]) == 1
    assert figures.main(arguments) == 0
    assert figures.main([*arguments, "--check"]) == 0
    results["training"]["runs"][0]["limit"] += 1
    gpu.about.write(tmp_path / "results" / "training.json", results["training"])
    assert figures.main([*arguments, "--check"]) == 1
    assert "is not what the results say" in capsys.readouterr().err


def test_a_gpus_results_become_a_table_and_a_picture(tmp_path):
    variant = {"real_tokens_per_second": 10.0, "peak_bytes": 2e9, "ratio_to_padded": 1.0, "share_of_limit": 0.5}
    run = {"limit": 2.0, "steps": 1, "variants": {"padded:sdpa": variant, "fa2patch:x": variant, "y": {"error": "no"}}}
    shape = {"layers": 2, "parameters": 10, "distributions": {"FLAN-like": run}}
    settings = {"dtype": "bfloat16", "optimizer": "adamw", "batch": 4, "device": "a GPU"}
    found = {"part": "gpu", **settings, "shapes": {"Llama-2-7B": shape}}
    assert "| FLAN-like, fa2patch:x | 10 | 1.00 | 2.00 | 50% | 2.0 |  |" in tables.gpu(found)[0].as_markdown()
    plots.gpu(found, tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size


def test_nothing_committed_names_a_machine():
    for file in (figures.HERE / "BENCH.md", *(figures.HERE / "results").glob("*.json")):
        text = file.read_text()
        assert str(figures.HERE.parents[1]) not in text and str(Path.home()) + "/" not in text, file


def test_a_packed_row_and_the_collators_agree():
    """The row in which reads are counted is the one that the points pack."""
    expected = pack(documents(*syncs_once.DOCUMENTS))
    assert all(torch.equal(syncs_once.row(False)[name], value) for name, value in expected.items())
