"""The dry run traces every kernel's path without a device, and counts what its table says."""

import functools

import pytest
import torch

from compat_matrix.bench import dry, figures

KERNELS = ("flash_attn_3", "flash_attn", "flash_attn_4", "torch_varlen", "efficient", "flex")


@functools.cache
def traced(name, case):
    return dry.trace(*dry.kernels()[name], dry.CASES[case])


OPERATORS = {
    "a view": (lambda x: x.transpose(0, 1)[None].flatten(0, 1), {}),
    "an allocation": (lambda x: x.new_empty(3), {}),
    "arithmetic": (lambda x: x * 2 + 1, {"others": 2}),
    "padding": (lambda x: torch.nn.functional.pad(x, (0, 1)), {"copies": 1}),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), {"copies": 1}),
    "contiguous already": (lambda x: x.contiguous(), {}),
    "a dtype": (lambda x: x.double(), {"copies": 1}),
    "gathering": (lambda x: x.index_select(0, torch.tensor([1])), {"copies": 1}),
    "item": (lambda x: x.sum().item(), {"others": 1, "reads": 1}),
    "nonzero": (lambda x: x.nonzero(), {"reads": 1}),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_counted_by_its_kind(name):
    call, expected = OPERATORS[name]
    states = torch.ones(2, 3)
    with dry.counted() as found:
        call(states)
    assert {kind: count for kind, count in found.items() if count} == expected


@pytest.mark.parametrize("case", ["plain", "grouped heads", "window", "head dim 80"])
@pytest.mark.parametrize("name", KERNELS)
def test_an_ordinary_layer_starts_its_kernel_and_nothing_else(name, case):
    found, plain = traced(name, case), traced(name, "plain")
    if "why" in found:
        assert (name, case) == ("efficient", "window")
        return
    for way in ("forward", "backward"):
        if "why" in found[way]:
            assert (name, way) == ("efficient", "backward")
            assert "meta__efficient_attention_backward" in found[way]["why"]
        elif (name, case) == ("efficient", "grouped heads"):
            assert found[way]["later"]["copies"] == 2, "k and v are repeated"
        elif (name, case) == ("flash_attn_4", "head dim 80"):
            assert found[way]["later"]["copies"] == 4, "q, k and v are padded to 96, and the output is cut"
        else:
            assert found[way]["later"] == plain[way]["bare"]


@pytest.mark.parametrize("name", KERNELS)
def test_values_of_another_head_dimension_are_copied_only_where_the_kernel_needs_it(name):
    later = traced(name, "MLA")["forward"]["later"]
    assert later["copies"] == (2 if name in ("flash_attn", "torch_varlen") else 0)


@pytest.mark.parametrize("case", dry.CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_no_layer_reads_from_the_device(name, case):
    found = traced(name, case)
    for way in ("forward", "backward"):
        for counts in found.get(way, {}).values():
            assert isinstance(counts, str) or counts["reads"] == 0


def test_this_torch_finds_what_is_committed():
    minor = ".".join(torch.__version__.split(".")[:2])
    every = [version.rpartition(".")[0] for version in dry.TORCH]
    kept = {}
    for row in figures.committed("dry")["rows"]:
        runs = [run.split(" to ") for run in row["torch"].split(", ")]
        places = [range(every.index(run[0]), every.index(run[-1]) + 1) for run in runs if run != ["all"]]
        if row["torch"] == "all" or any(every.index(minor) in place for place in places):
            case, _, names = row["layer"].partition(": ")
            cells = {name: cell for name, cell in row.items() if name not in ("layer", "torch", "once per batch")}
            kept.update({(case, name): cells for name in names.split(", ")})
    made = {(case, name): cells for case, of in dry.here()["cases"].items() for name, cells in of.items()}
    assert kept == {at: {n: c for n, c in cells.items() if n != "once per batch"} for at, cells in made.items()}


def run(version, copies, first=0):
    return {"torch": version, "cases": {"plain": {"fast": {"forward: copies": copies, "once per batch": first}}}}


def test_versions_with_the_same_counts_share_a_row_whatever_the_first_layer_does():
    rows = dry.merged([run("2.4.1", 1), run("2.5.1", 0, first=1), run("2.6.0", 0, first=3)])
    assert [row["torch"] for row in rows] == ["2.4", "2.5 to 2.6"] and rows[1]["once per batch"] == 3


@pytest.mark.parametrize(
    ("some", "words"),
    [
        (["2.4.1", "2.5.1", "2.10.0", "2.11.0"], "all"),
        (["2.4.1"], "2.4"),
        (["2.4.1", "2.5.1"], "2.4 to 2.5"),
        (["2.4.1", "2.10.0", "2.11.0"], "2.4, 2.10 to 2.11"),
    ],
    ids=str,
)
def test_versions_in_words(some, words):
    assert dry.in_words(some, ["2.4.1", "2.5.1", "2.10.0", "2.11.0"]) == words
