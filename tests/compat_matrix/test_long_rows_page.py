"""The tables of LONG_ROWS.md say what a stack's evidence says, and what failed in it."""

import copy

import pytest

from compat_matrix.ecosystem import page, page_long_rows, stacks

NAME = "long-rows-5.23.0"
REFUSAL = "PackingNotIsolated: mixers\nSee https://example.org"
RUNS = {
    "ulysses, 2 processes": {
        "ok": True,
        "table": {
            "ids": {"found": "right", "off_by": {"loss": 1e-7, "gradient": 3e-6}},
            "one key head": {"found": "right", "off_by": {"loss": 1e-7}},
            "mixers, documents cut": {"found": "refused", "said": REFUSAL},
        },
        "alone": {
            "ids": {"found": "leaks", "said": "", "off_by": 0.25},
            "window": {"found": "error", "said": "KeyError: x"},
        },
        "bytes": {"llama, ids": {"a layer's forward": {"counted": 2048.0, "on paper": 2048, "without fa2patch": 4096}}},
    },
    "ulysses, 4 processes": {
        "ok": True,
        "table": {
            "ids": {"found": "right", "off_by": {"loss": 1e-7, "gradient": 5e-6}},
            "one key head": {"found": "refused", "said": "too few heads"},
        },
    },
    "ulysses_engine loop zero2": {
        "ok": True, "loss": 1e-7, "weight": 2e-7, "gradients_times": 2, "verify": "isolated: 4 documents",
    },
    "ulysses_engine loop alone": {"ok": True, "alone": {"found": "leaks", "said": "", "off_by": 0.041}},
    "ulysses_architectures": {
        "ok": True,
        "architectures": {
            "llama": {"crossing": {"found": "right"}},
            "jamba": {"crossing": {"found": "refused"}, "whole": {"found": "right"}},
            "esm": {"crossing": {"found": "refused"}, "whole": {"found": "refused"}},
            "old": {"crossing": {"found": "upstream", "said": "one process: RuntimeError"}},
        },
    },
    "split_rows torch": {
        "ok": True, "table": {"mixers": {"found": "refused", "said": "PackingNotIsolated: mixers", "off_by": None}},
    },
}  # fmt: skip

MADE = {"commit": "1" * 40, "dirty": False, "date": "2026-01-01"}


def text_of(**changes):
    runs = copy.deepcopy(RUNS)
    for entry, change in changes.items():
        runs[entry].update(change)
    found = {NAME: {"made": dict.fromkeys(runs, MADE), "versions": {"torch": "2.13.0"}, "checks": runs}}
    return page.pages(found)[page.LONG_ROWS]


@pytest.mark.parametrize(
    "line",
    [
        "|  | DeepSpeed's Ulysses | accelerate's `sp_size` | torch's `context_parallel` |",
        "| packed rows by ids | right (5e-06) | right (2e-07) |  |",
        "| documents that cross the border | **leaks** (0.25) | **leaks** (0.041) |",
        "| fewer key heads than processes | right (1e-07) with 2 processes; refused [1] with 4 processes |  |  |",
        "| mixers, documents cut | refused [2] |  | refused [2] |",
        "| ten steps with ZeRO-2 |  | right (2e-07), gradients × 2 |  |",
        "| verify |  | right |  |",
        "| windows | error [3] |  |",
        "2. PackingNotIsolated: mixers",
        "3. KeyError: x",
        f"| {NAME} | 1 | 1 | 1 | 1 | 0 |",
        f"- {NAME}, refused: `esm`",
        f"- {NAME}, right if documents lie whole: `jamba`",
        f"- {NAME}, upstream: `old`",
        f"| {NAME} | 2 | llama, ids | a layer's forward | 2,048 | 2,048 | 4,096 |",
        f"| {NAME} | 2026-01-01 | commit 111111111111 | torch 2.13.0 |",
        "Without evidence: long-rows-4.57.6.",
        "    python -m compat_matrix.ecosystem --stacks long-rows-5.23.0 long-rows-4.57.6",
    ],
)
def test_the_page_has_this_line(line):
    assert line in text_of().splitlines()


def test_a_failure_is_on_the_page():
    assert "**failed**" not in text_of() and "**wrong**" not in text_of()
    crashed = text_of(**{"ulysses_engine loop zero2": {"ok": False, "error": "not ready after 1800 s"}})
    assert f"**failed**: {NAME}, ulysses_engine loop zero2: not ready after 1800 s" in crashed.splitlines()
    wrong = {"ids": {"found": "WRONG", "off_by": {"loss": 0.5}}}
    off = text_of(**{"ulysses, 4 processes": {"ok": False, "table": wrong}})
    row = "| packed rows by ids | right (3e-06) with 2 processes; **wrong** (0.5) with 4 processes | right (2e-07) |  |"
    assert row in off.splitlines() and f"**failed**: {NAME}, ulysses, 4 processes" in off.splitlines()
    leaking = {"llama": {"crossing": {"found": "WRONG", "said": "logits"}}}
    text = text_of(**{"ulysses_architectures": {"ok": False, "architectures": leaking}})
    assert (
        f"| {NAME} | 0 | 0 | 0 | 0 | 1 |" in text.splitlines() and f"- {NAME}, **wrong**: `llama`" in text.splitlines()
    )


def test_every_entry_of_the_stacks_is_of_an_engine_or_about_architectures():
    """An entry that no column is made of would be missing from the page."""
    of_page = [stack for name, stack in stacks.stacks().items() if name.startswith(page_long_rows.PREFIX)]
    assert [stack.checks for stack in of_page] == [(), ()]
    for stack in of_page:
        entries = {*stack.distributed} - {"ulysses_architectures"}
        evidence = {"checks": {entry: {"ok": True, "table": {"x": {}}, "alone": {}} for entry in entries}}
        columns = page_long_rows.by_engine(evidence, "table")
        started = {entry for entry in entries if entry.startswith("ulysses_engine")}
        assert sum(len(one["x"]) for one in columns.values()) == len(entries - started)
        assert all(any(entry.startswith(engine) for engine in page_long_rows.ENGINES) for entry in started)
