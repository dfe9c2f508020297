"""The tables and the page show exactly what the evidence says."""

import json
from html.parser import HTMLParser

import pytest
from evidence import GOOD, MADE, POINTS, evidence

from compat_matrix import run
from compat_matrix.publish import __main__ as publish
from compat_matrix.publish import blocks, matrix, words
from compat_matrix.results import CORE, Malformed, read, read_file

MARKERS = {
    "README.md": ("gpu", "matrix", "need", "integrations", "reads", "overhead"),
    "docs/kernels.md": ("gpu", "kernels", "reads", "overhead"),
    "docs/long_rows.md": ("engines", "costs", "parts"),
}
ROWS = ["one row", "two rows", "mask of ones"]
RIGHT = dict.fromkeys(ROWS, "ok")
PLAIN = {**RIGHT, "two rows": "leak"}
LEAKS = dict.fromkeys(ROWS, "leak")
RAISES = dict.fromkeys(ROWS, "error: RuntimeError: shape '[1, 9]' is invalid: 8 < 9 </script>")
ONE_LESS = {**GOOD, "ok": len(CORE) - 1}
OLDER = {**MADE, "commit": "2" * 40, "when": "2026-11-20T23:59:00+00:00"}
NO_COMMIT = {**MADE, "commit": None, "dirty": None}


def checked(upstream=LEAKS, seam="interface", **implementations):
    cell = {"seam": [seam], "fa2patch": {"eager": GOOD, **implementations}}
    return {**cell, "upstream": {"sdpa": LEAKS, "flash_attention_2": upstream}}


def llama(**cell):
    return {"architectures": {"llama": {"made": MADE, **cell}}}


EVERY_STATE = {
    "llama": checked(RIGHT),
    "mamba": {"refused": "UnsupportedModel: MambaModel carries state, in a. Train it.", "upstream": {"sdpa": LEAKS}},
    "weird": {"xfail": "its router draws", "link": "https://github.com/o/r/issues/1"},
    "broken": {"error": "ValueError: no such *thing*"},
}


@pytest.fixture
def root(tmp_path):
    for folder in ("compat_matrix/evidence", "fa2patch", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    for file, names in MARKERS.items():
        blocks = "".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in names)
        (tmp_path / file).write_text(f"before\n{blocks}after\n")
    return tmp_path


@pytest.fixture
def leave(root):
    def leave(name, architectures, /, **changes):
        file = root / "compat_matrix/evidence" / f"{name}.json"
        file.write_text(json.dumps(evidence(name, architectures, **{"upstream_rows": ROWS, **changes})))
        return file

    return leave


@pytest.fixture
def results(root):
    return lambda: read(root / "compat_matrix/evidence")


@pytest.fixture
def llama_of(leave, results):
    def llama_of(cell):
        leave("5.0.0", {"llama": cell})
        return results().environments[0].cell("llama")

    return llama_of


@pytest.mark.slow  # `.ci/run` runs the command itself
def test_what_is_committed_is_what_the_evidence_says():
    assert publish.main(["--check"]) == 0


def test_every_state(leave, results):
    leave("5.0.0", EVERY_STATE)
    leave("5.1.0", {"llama": checked(PLAIN)})
    first, second = results().environments
    states = {name: first.cell(name).state for name in results().architectures}
    assert states == {"llama": "ok", "mamba": "refused", "weird": "xfail", "broken": "fail"}
    assert first.cell("weird").link.endswith("/1") and second.cell("mamba").state == "absent"
    assert results().score(second).states == {"ok": 1, "absent": 3}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (checked(sdpa=ONE_LESS), "do not add up"),
        (checked(sdpa={**GOOD, "ok": len(CORE) + 1}), "do not add up"),
        (checked(sdpa={"fail": {"load": "ImportError"}}), "load: ImportError"),
        (checked(sdpa={**ONE_LESS, "fail": {"packed_row": "logits differ"}}), "sdpa: packed_row: logits differ"),
        (checked(sdpa={**GOOD, "n/a": {"made_up": "a reason"}}), "not among those that were run"),
        (checked(eager={"n/a": {"load": "no such thing here"}}), "no point"),
        (checked(eager={"alone": {"document": "Transformers fails on one document"}}), "no point"),
        (checked(eager={**ONE_LESS, "alone": {"padding": "KeyError"}}), "padding held with no implementation"),
        (checked(eager={**ONE_LESS, "n/a": {"padding": "as said", "windows": ""}}), "implementation: as said"),
        (checked(eager={"ok": 0, "n/a": dict.fromkeys(POINTS, "for a reason"), "fail": {}}), "no point"),
        ({"seam": [], "fa2patch": {}}, "no point"),
    ],
)
def test_anything_else_fails(llama_of, broken, reason):
    assert llama_of(broken).state == "fail" and reason in llama_of(broken).reason


ELSEWHERE = {**ONE_LESS, "n/a": {"windows": "no sliding window", "padding": "run with sdpa, or eager"}}


@pytest.mark.parametrize(
    "good",
    [
        checked(sdpa={"n/a": {"load": "no sdpa in this version"}}),
        checked(sdpa={"alone": {"document": "KeyError"}}),
        checked(sdpa=ELSEWHERE),
        checked(eager={**ELSEWHERE, "n/a": {**ELSEWHERE["n/a"], "padding": "checked on rows of text"}}),
    ],
    ids=["not loaded", "no document alone", "holds with another", "on text"],
)
def test_what_cannot_be_run_is_no_failure_and_a_core_point_holds_with_one_implementation(llama_of, good):
    assert llama_of(good).state == "ok"


def test_evidence_without_a_core_point_is_none(leave, results):
    file = leave("5.0.0", {"llama": checked()}, points=POINTS[1:])
    with pytest.raises(Malformed, match=f"points to have {POINTS[0]}"):
        results()
    assert read_file(file, partial=True).cell("llama").state == "fail"  # its numbers do not add up


def test_a_cell_says_what_made_it_and_its_age_is_published(root, leave, results):
    leave("5.0.0", {"llama": checked(), "phi": {**checked(), "made": {**OLDER, "dirty": True, "torch": "2.4.1"}}})
    leave("5.1.0", {"llama": checked(), "phi": {**checked(), "made": OLDER}})
    first, _ = results().environments
    assert first.codes == (f"commit {'1' * 12}", f"commit {'2' * 12} with uncommitted changes")
    assert (first.torch, first.dates) == ("2.13.0+cpu and 2.4.1", "2026-11-20 to 2026-11-21")
    text = matrix.tables(results(), {})
    assert "| ✓ ✗ | ✓ ✗ |" in text and "| ✓ ✗ ° | ✓ ✗ ° |" in text
    said = (
        "All 4 cells were checked from 2026-11-20 to 2026-11-21. 2 of them executed code that was changed before newer "
        "cells were checked; each cell names its commit."
    )
    page = matrix.page(results(), {})
    assert said in text and said in page and said in " ".join(blocks.summary(results()).split())
    assert f"Checked on 2026-11-20 with the code of commit {'2' * 12}" in page
    assert "What it executed has been changed since." in page
    assert {older for _, older in matrix.data(results())["made"]} == {0, 1}, "the map marks what is older"
    publish.main(["--root", str(root)])
    assert publish.main(["--root", str(root), "--check"]) == 0, "cells of older code are published with their age"


@pytest.mark.parametrize(("known", "older"), [("a", False), ("b", True)])
def test_a_cell_is_older_if_newer_ones_executed_other_code_whatever_its_commit_is(root, known, older):
    parts = {"new": {**MADE, "key": {"f.py::": "a"}}, "old": {**OLDER, "key": {"f.py::": known, "f.py::g": "c"}}}
    cells = {name: {**checked(), "made": made} for name, made in parts.items()}
    file = root / "compat_matrix" / "evidence" / "5.0.0.json"
    file.write_text(run.text(run.written(evidence("5.0.0", {}), cells)))
    found = read(file.parent)
    made = {name: cell.made for name, cell in found.environments[0].cells.items()}
    assert (found.is_older(made["new"]), found.is_older(made["old"])) == (False, older)


def test_a_cell_that_does_not_say_which_commit_made_it_is_not_published(root, leave, capsys):
    leave("5.0.0", {"llama": checked(), "phi": {**checked(), "made": NO_COMMIT}})
    assert publish.main(["--root", str(root), "--check"]) == 1
    said = capsys.readouterr().err
    assert "5.0.0: expected the commit that made each cell, found none in 1 of 2, such as phi" in said


def test_another_stack_of_a_release_and_what_may_fail_are_shown_and_not_counted(root, leave, results):
    leave("5.0.0", {"llama": checked(RIGHT)})
    before = results().score(*results().counted)
    leave("5.0.0-wrapt1.16", {"llama": checked()})
    leave("main", {"newest": {"error": "moved"}}, transformers="5.99.0.dev0", allowed_to_fail=True)
    assert results().score(*results().counted) == before and before.states == {"ok": 1}
    text = matrix.tables(results(), {})
    assert "5.0.0-wrapt1.16 (another stack of this release, not counted)" in text
    assert "main (allowed to fail, not counted)" in text and "newest" in matrix.page(results(), {})
    assert " fail" not in publish.made(root)[root / "README.md"]


def test_nothing_is_ok_without_its_json(root, leave, results):
    leave("5.0.0", {"llama": checked()})
    gone = leave("5.1.0", {"llama": checked(), "granite": checked()})
    assert "granite" in matrix.tables(results(), {})
    gone.unlink()
    assert "granite" not in matrix.tables(results(), {}) and results().score(*results().counted).states == {"ok": 1}
    (root / "compat_matrix/versions.toml").write_text('[version."5.0.0"]\n[version."5.1.0"]\n')
    said = {file.name for file, text in publish.made(root).items() if "Version 5.1.0 has not been checked yet." in text}
    assert said == {"MATRIX.md", "matrix.html"}


@pytest.mark.parametrize(
    ("upstream", "state", "one_row", "every_row"),
    [
        (RIGHT, "ok", "ok", 1), (PLAIN, "plain", "ok", 0), (LEAKS, "leak", "leak", 0), (RAISES, "error", "error", 0),
        ({"one row": "ok"}, "plain", "ok", 0),
    ],
)  # fmt: skip
def test_upstream(llama_of, results, upstream, state, one_row, every_row):
    assert llama_of(checked(upstream)).upstream.state == state
    score = results().score(*results().environments)
    assert (score.one_row, score.every_row, score.measured) == ({one_row: 1}, every_row, 1)


def test_a_row_that_does_not_exist_with_pictures_does_not_count(leave, results):
    three = {"one row": "ok", "mask of ones": "ok", "default cache": "ok"}
    leave("5.0.0", {"llava:picture": checked(three), "llama": checked(three)}, upstream_rows=[*three, "two rows"])
    found = results().environments[0]
    assert found.cell("llava:picture").upstream.state == "ok" and found.cell("llama").upstream.state == "plain"


def test_versions_are_in_their_order(leave, results):
    for name in ("5.10.4", "5.2.0", "4.57.6-wrapt1.16", "4.57.6", "4.34.1"):
        leave(name, {"llama": checked()})
    found = results().environments
    assert [each.name for each in found] == ["4.34.1", "4.57.6", "4.57.6-wrapt1.16", "5.2.0", "5.10.4"]
    bands = words.bands(found)
    assert [words.label(band) for band in bands] == ["4.34", "4.57", "5.2–5.10"]
    assert [len(part) for part in matrix.split(bands[2], 1)] == [1, 1]
    assert words.spans(found, ["4.34.1", "4.57.6", "5.10.4"]) == "4.34.1 to 4.57.6, 5.10.4"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": 2}, "format 3, found 2"),
        ({"python": None}, "python to be str"),
        ({"transformers": "newest"}, "transformers to be a version"),
        ({"name": "5.1.0"}, "name to be the file's, '5.0.0'"),
        ({"architectures": {"llama": "ok"}}, "architectures.llama to be dict"),
        (llama(**{**checked(), "made": None}), "architectures.llama.made to be dict"),
        (llama(**{**checked(), "made": {}}), "architectures.llama.made.commit, found nothing"),
        (llama(**{**checked(), "made": {**MADE, "when": 1}}), "made.when to be str"),
        (llama(seam=[]), "architectures.llama.fa2patch to be dict"),
        (llama(seam=[], fa2patch={"eager": "ok"}), "fa2patch.eager to be dict"),
        (llama(xfail="it is known"), "architectures.llama.link to be str"),
        (llama(xfail="known", link="javascript:x"), "link to be a web address"),
        (llama(**checked({"one row": "fine"})), "one row to be ok, leak or error"),
    ],
)
def test_malformed(root, leave, results, change, expected, capsys):
    with pytest.raises(Malformed, match="expected evidence"):
        results()
    file = leave("5.0.0", {}, **change)
    assert publish.main(["--root", str(root)]) == 1
    said = capsys.readouterr().err
    assert str(file) in said and expected in said
    file.write_text("{")
    with pytest.raises(Malformed, match=r"5\.0\.0\.json: expected JSON"):
        results()


def test_drift_is_caught(root, leave, capsys):
    leave("5.0.0", EVERY_STATE)
    run = ["--root", str(root)]
    assert publish.main([*run, "--check"]) == 1 and not (root / "compat_matrix/MATRIX.md").exists()
    assert (publish.main(run), publish.main([*run, "--check"])) == (0, 0)
    readme = (root / "README.md").read_text()
    assert readme.startswith("before\n") and readme.endswith("after\n")
    capsys.readouterr()
    for file in publish.made(root):
        good = file.read_text()
        file.write_text(good.replace("1", "2").replace("8", "9").replace('"5.0"', '"5.9"'))
        assert publish.main([*run, "--check"]) == 1
        said = capsys.readouterr().err
        assert str(file.relative_to(root)) in said and publish.COMMAND in said
        file.write_text(good)
    leave("5.0.0", {**EVERY_STATE, "llama": checked(seam="entry")})
    assert publish.main([*run, "--check"]) == 1
    (root / "README.md").write_text("nothing\n")
    with pytest.raises(Malformed, match="matrix:begin"):
        publish.made(root)


def test_readme_says_what_holds_in_a_few_sentences_and_one_link(root, leave, results):
    leave("4.42.4", {"llama": checked(LEAKS), "other": EVERY_STATE["broken"]})
    leave("5.0.0", {"llama": checked(RIGHT), "other": checked(PLAIN), "mamba": EVERY_STATE["mamba"]})
    leave("5.1.0", {"llama": checked(PLAIN), "weird": EVERY_STATE["weird"]})
    *said, link = blocks.summary(results()).splitlines()
    assert " ".join(said) == (
        "When last checked, fa2patch isolated 4 of 7 combinations of model type and Transformers release (3 releases, "
        "on a CPU); it refused 1 with a reason; 1 were known failures of Transformers; 1 failed. Without "
        "fa2patch, 3 of them keep the examples of one packed row apart. Only 1 also do so with several rows, a mask of "
        "ones or the default cache. All 7 cells were checked on "
        "2026-11-21, and the code that they executed is the same in all."
    )
    assert words.PAGE in link and f"{words.FOLDER}/MATRIX.md" in link
    assert "\n".join([*said, link]) in publish.made(root)[root / "README.md"]


def test_what_ran_on_a_gpu_is_shown_beside_what_ran_on_a_cpu(leave, results):
    leave("5.0.0", EVERY_STATE)
    assert words.gpu({}) == "None ran on a GPU yet."
    said = "Right with flash_attn on NVIDIA H100, 2026-11-30, Transformers 5.0.0."
    gpu = {"llama": ("ok", said), "other": ("fail", "Wrong on NVIDIA H100.")}
    assert words.gpu(gpu) == "On a GPU, 1 of 2 architectures were right."
    row = next(line for line in matrix.tables(results(), gpu).splitlines() if line.startswith("| [`llama`]"))
    assert row.endswith(f"| {said} |") and said in matrix.page(results(), gpu)


VOID = {"meta", "input", "link", "img", "br", "hr", "col"}
LOADS = {"src", "srcset", "data", "poster", "action", "background"}


class Page(HTMLParser):
    """A parser that fails at a wrong end tag and at everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], {}

    def handle_starttag(self, tag, attrs):
        assert tag != "link" and not LOADS & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)


def test_the_page_is_well_formed_and_fetches_nothing_and_is_the_same_each_time(root, leave, results):
    leave("5.0.0", {**EVERY_STATE, "raises": checked(RAISES)})
    assert publish.made(root) == publish.made(root)
    parsed = Page()
    parsed.feed(matrix.page(results(), {}))
    parsed.close()
    assert parsed.open == []
    style, (told, data, script) = "".join(parsed.text["style"]), parsed.text["script"]
    assert set(json.loads(told)["here"]) == {"ok", "refused", "xfail", "fail"}
    assert not any(word in style for word in ("http", "url(", "@import"))
    assert not any(word in script for word in ("http", "fetch(", "XMLHttpRequest", "import(", "innerHTML"))
    held = json.loads(data)
    assert [name for name, _, _ in held["architectures"]] == ["broken", "llama", "mamba", "raises", "weird"]
    assert {EVERY_STATE["weird"]["link"], RAISES["one row"], "no sliding window"} <= set(held["texts"])
