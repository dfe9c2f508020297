"""README's table *Do I need it?* says what the committed evidence says."""

import json
import re
from collections import Counter

import pytest
import torch
from packaging.version import Version

import fa2patch
from compat_matrix import environments
from compat_matrix.cells import Cell, Environment, Results, Upstream
from compat_matrix.check.cell import Cell as CheckedCell
from compat_matrix.check.rows import documents, pack
from compat_matrix.publish import need

FOLDER = environments.HERE
EVIDENCE = [json.loads(file.read_text()) for file in (FOLDER / "evidence").glob("*.json")]
README = (FOLDER.parent / "README.md").read_text()
WORDS = {"right": "ok", "**leaks**": "leak", "an error": "error"}


def columns():
    """The columns of README's table: the label, and a cell for each case."""
    block = README.split("<!-- need:begin -->")[1].split("<!-- need:end -->")[0]
    lines = [line.strip("|").split(" | ") for line in block.splitlines() if line.startswith("| ")]
    return [[text.strip(" |") for text in column] for column in list(zip(*(lines[0], *lines[2:])))[1:]]


def raw(case, label):
    # The evidence files are read without the package's classes. The result is (family, minor, result).
    first, last = (tuple(map(int, end.split("."))) for end in re.split("\N{EN DASH}", label))
    for held in EVIDENCE:
        minor = Version(held["transformers"]).release[:2]
        if not first <= minor <= last:
            continue
        for name, cell in held["architectures"].items():
            if name not in case.architectures and not (case.architectures == need.MIXERS and name in MIXERS):
                continue
            for implementation, found in cell.get("upstream", {}).items():
                if not case.implementations or implementation in case.implementations:
                    yield from ((name, minor, found[row].partition(":")[0]) for row in case.rows)


MIXERS = {name for held in EVIDENCE for name, cell in held["architectures"].items() if "mixer" in cell.get("seam", ())}


def said(text):
    # The main result of a cell, and the exceptions by result.
    *others, main = text.split("; ")
    return WORDS[main.removesuffix(", slow").removeprefix("else ")], {
        WORDS[word]: where for word, where in (other.split(" in ", 1) for other in others)
    }


@pytest.mark.parametrize("number", range(len(need.CASES)), ids=[case.title for case in need.CASES])
def test_the_table_says_what_the_evidence_says(number):
    case = need.CASES[number]
    minor = "{}.{}".format(*max(Version(held["transformers"]) for held in EVIDENCE).release)
    assert [column[0] for column in columns()] == ["4.34–4.43", "4.44–4.52", "4.53–4.57", f"5.0–{minor}"]
    for label, *texts in columns():
        main, exceptions = said(texts[number])
        if case.untested:
            assert (main, exceptions) == (case.untested, {})
            continue
        found = list(raw(case, label))
        counted = Counter(result for _, _, result in found)
        assert counted.most_common(1)[0][0] == main and set(counted) == {main, *exceptions}, (label, counted)
        assert ("slow" in texts[number]) == (case.slow and main == "ok")
        for result, where in exceptions.items():
            assert_where(found, result, where)


def assert_where(found, result, where):
    families = {name for name, _, other in found if other == result}
    if where.startswith("4.") or where.startswith("5."):
        assert {f"{minor[0]}.{minor[1]}" for _, minor, other in found if other == result} == {where}
        assert {other for _, minor, other in found if f"{minor[0]}.{minor[1]}" == where} == {result}
    elif where.endswith("model types"):
        assert where == f"{len(families)} of {len({name for name, _, _ in found})} model types"
    else:
        named = {re.sub(r" \(.*", "", name) for name in where.split(", ")}
        assert named == {need.SEEDS.get(name, name) for name in families}


@pytest.mark.parametrize("family", need.SEEDS)
def test_a_row_with_padding_behind_it_leaks(family):
    # The column that the evidence has no row for, in the installed version.
    row, padding = pack(documents(5, 9, 3)), torch.arange(4)[None]
    batch = {name: torch.cat([row[name], padding + 3 * (name == "input_ids")], dim=1) for name in row}
    batch["attention_mask"] = (torch.arange(21) < 17).long()[None]
    model = CheckedCell(family, "sdpa").model()
    found = fa2patch.verify(model, batch={**batch, "use_cache": False}, strict=False, max_documents=2)
    assert not found.ok and next(case for case in need.CASES if case.untested).untested == "leak"


def test_the_fourteen_families_are_refused_nowhere_and_their_good_cells_are_counted():
    releases = [held["architectures"] for held in EVIDENCE if held["name"] == held["transformers"]]
    cells = [held[name] for held in releases for name in need.SEEDS if name in held]
    assert not any({"refused", "xfail", "error"} & set(cell) for cell in cells)
    good = [cell for cell in cells if not any(run.get("fail") for run in cell["fa2patch"].values())]
    assert len(good) == len(cells)
    assert f"checked in each release that has it: {len(cells):,} checks, all right" in " ".join(README.split())


def test_a_named_exception_has_its_minors():
    def environment(minor, **results):
        cells = {name: Cell("ok", alone=(Upstream("sdpa", {"one row": result}),)) for name, result in results.items()}
        about = dict.fromkeys(("python", "wrapt", "flash_attn", "device", "kernel"), "")
        return Environment(f"{minor}.0", f"{minor}.0", **about, points=(), upstream_rows=(), cells=cells)

    case = need.Case("a case", ("llama", "phi"), ("sdpa",), slow=True)

    def cell(*held):
        return need.cell(case, held, Results(held))

    right = environment("5.1", llama="ok", phi="ok")
    assert cell(right) == "right, slow"
    assert cell(right, environment("5.2", llama="ok", phi="leak")) == "**leaks** in Phi (5.2); else right, slow"
    assert cell(environment("5.2", llama="ok", phi="error: X"), right) == "an error in Phi (5.2); else right, slow"
    assert cell(right, right, environment("5.2", llama="leak", phi="leak")) == "**leaks** in 5.2; else right, slow"
    leaks = [environment(minor, llama="ok", phi="leak") for minor in ("5.0", "5.2", "5.3")]
    assert cell(leaks[0], right, right, right, *leaks[1:]) == "**leaks** in Phi (5.0, 5.2–5.3); else right, slow"
    assert cell(environment("5.1", gemma="ok")) == "not in these versions"
