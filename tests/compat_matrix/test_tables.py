"""The tables and the page show exactly what the evidence says."""

import json
from html.parser import HTMLParser

import pytest
from evidence import GOOD, MADE, POINTS, evidence

from compat_matrix.publish import __main__ as publish
from compat_matrix.publish import links, tables
from compat_matrix.publish.bands import bands, split
from compat_matrix.publish.markdown import gpu, matrix, spans
from compat_matrix.publish.page import page
from compat_matrix.publish.readme import summary
from compat_matrix.results import CORE, Malformed, read, read_file

MARKERS = {
    "README.md": ("matrix", "need", "integrations", "reads", "overhead"),
    "docs/kernels.md": ("kernels", "reads", "overhead"),
    "docs/long_rows.md": ("engines", "costs"),
}
HELD = len(CORE)
ROWS = ["one row", "two rows", "mask of ones"]
RIGHT = dict.fromkeys(ROWS, "ok")
PLAIN = {**RIGHT, "two rows": "leak"}
LEAKS = dict.fromkeys(ROWS, "leak")
RAISES = dict.fromkeys(ROWS, "error: RuntimeError: shape '[1, 9]' is invalid: 8 < 9 </script>")


def checked(upstream=LEAKS, seam="interface", **implementations):
    cell = {"seam": [seam], "expected_seam": ["interface"], "fa2patch": {"eager": GOOD, **implementations}}
    return {**cell, "upstream": {"sdpa": LEAKS, "flash_attention_2": upstream}}


def llama(**cell):
    return {"architectures": {"llama": {"made": MADE, **cell}}}


ONE_LESS = {**GOOD, "ok": HELD - 1}
EVERY_STATE = {
    "llama": checked(RIGHT),
    "mamba": {"refused": "UnsupportedModel: MambaModel carries state, in a. Train it.", "upstream": {"sdpa": LEAKS}},
    "weird": {"xfail": "its router draws", "link": "https://github.com/o/r/issues/1"},
    "broken": {"error": "ValueError: no such *thing*"},
}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "compat_matrix/evidence/gpu").mkdir(parents=True)
    (tmp_path / "fa2patch").mkdir()
    (tmp_path / "docs").mkdir()
    for file, names in MARKERS.items():
        blocks = "".join(f"<!-- {name}:begin -->\n<!-- {name}:end -->\n" for name in names)
        (tmp_path / file).write_text(f"before\n{blocks}after\n")
    return tmp_path


@pytest.fixture
def leave(root):
    def leave(name, architectures, /, folder="", **changes):
        file = root / "compat_matrix/evidence" / folder / f"{name}.json"
        file.write_text(json.dumps(evidence(name, architectures, **{"upstream_rows": ROWS, **changes})))
        return file

    return leave


@pytest.fixture
def results(root):
    return lambda: read(root / "compat_matrix/evidence")


def only(results, architecture="llama"):
    return results().environments[0].cell(architecture)


def test_every_state(leave, results):
    leave("5.0.0", EVERY_STATE)
    leave("5.1.0", {"llama": checked(PLAIN)})
    first, second = results().environments
    states = {name: first.cell(name).state for name in results().architectures}
    assert states == {"llama": "ok", "mamba": "refused", "weird": "xfail", "broken": "fail"}
    assert first.cell("weird").link.endswith("/1")
    assert second.cell("mamba").state == "absent"
    assert results().score(second).states == {"ok": 1, "absent": 3}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (checked(sdpa=ONE_LESS), "do not add up"),
        (checked(sdpa={**GOOD, "ok": HELD + 1}), "do not add up"),
        (checked(sdpa={"fail": {"load": "ImportError"}}), "load: ImportError"),
        (
            checked(sdpa={**ONE_LESS, "fail": {"packed_row": "logits differ"}}),
            "sdpa: packed_row: logits differ",
        ),
        (checked(sdpa={**GOOD, "n/a": {"made_up": "a reason"}}), "not among those that were run"),
        (checked(eager={"n/a": {"load": "no such thing here"}}), "no point"),
        (checked(eager={"alone": {"document": "Transformers fails on one document"}}), "no point"),
        (
            checked(eager={**ONE_LESS, "alone": {"padding": "KeyError"}}),
            "padding held with no implementation",
        ),
        (
            checked(eager={**ONE_LESS, "n/a": {"padding": "as said", "windows": ""}}),
            "implementation: as said",
        ),
        (checked(eager={"ok": 0, "n/a": dict.fromkeys(POINTS, "for a reason"), "fail": {}}), "no point"),
        (checked(seam="entry"), "patched at the seam entry, not interface"),
    ],
)
def test_anything_else_fails(leave, results, broken, reason):
    leave("5.0.0", {"llama": broken})
    assert only(results).state == "fail"
    assert reason in only(results).reason


@pytest.mark.parametrize("why", [{"n/a": {"load": "no sdpa in this version"}}, {"alone": {"document": "KeyError"}}])
def test_an_implementation_that_cannot_be_run_is_no_failure(leave, results, why):
    leave("5.0.0", {"llama": checked(sdpa=why)})
    assert only(results).state == "ok"


def test_a_core_point_must_hold_with_one_implementation_or_be_of_text(leave, results):
    elsewhere = {**ONE_LESS, "n/a": {"windows": "no sliding window", "padding": "run with sdpa, or eager"}}
    leave("5.0.0", {"llama": checked(sdpa=elsewhere)})
    assert only(results).state == "ok"
    on_text = {**elsewhere, "n/a": {**elsewhere["n/a"], "padding": "checked on rows of text"}}
    leave("5.0.0", {"llama": checked(eager=on_text)})
    assert only(results).state == "ok"


def test_evidence_without_a_core_point_is_none(leave, results):
    file = leave("5.0.0", {"llama": checked()}, points=POINTS[1:])
    with pytest.raises(Malformed, match=f"points to have {POINTS[0]}"):
        results()
    assert read_file(file, partial=True).cell("llama").state == "fail"  # its numbers do not add up


def test_a_cell_says_what_made_it_and_older_code_is_marked(leave, results):
    older = {**MADE, "commit": "2" * 40, "when": "2026-11-20T23:59:00+00:00"}
    leave("5.0.0", {"llama": checked(), "phi": {**checked(), "made": {**older, "dirty": True, "torch": "2.4.1"}}})
    leave("5.1.0", {"llama": checked(), "phi": {**checked(), "made": {**older, "commit": None, "dirty": None}}})
    first, second = results().environments
    assert (
        first.codes == ("commit " + "1" * 12, "commit " + "2" * 12 + " with uncommitted changes")
        and second.codes[1] == "an unknown commit"
    )
    assert (first.torch, first.dates) == ("2.13.0+cpu and 2.4.1", "2026-11-20 to 2026-11-21")
    text = matrix(results())
    assert "| ✓ ✗ | ✓ ✗ |" in text and "| ✓ ✗ ° | ✓ ✗ ° |" in text
    assert f"2 of 4 cells were checked with older code than that of commit {'1' * 12}" in text
    assert "That is older than" in page(results())
    leave("5.1.0", {"llama": checked()})
    assert f"1 of 3 cells were checked with older code than that of commit {'1' * 12}" in matrix(results())


def test_a_cell_that_does_not_say_which_commit_made_it_is_not_published(root, leave, capsys):
    leave("5.0.0", {"llama": checked(), "phi": {**checked(), "made": {**MADE, "commit": None, "dirty": None}}})
    assert publish.main(["--root", str(root), "--check"]) == 1
    said = capsys.readouterr().err
    assert "5.0.0: expected the commit that made each cell, found none in 1 of 2, such as phi" in said


def test_another_stack_of_a_release_is_shown_and_not_counted(leave, results):
    leave("5.0.0", {"llama": checked()})
    leave("5.0.0-wrapt1.16", {"llama": checked()})
    assert results().score(*results().counted).states == {"ok": 1}
    assert "5.0.0-wrapt1.16 (another stack of this release, not counted)" in matrix(results())


def test_nothing_was_checked_is_not_ok(leave, results):
    leave("5.0.0", {"llama": {"seam": [], "fa2patch": {}}})
    assert only(results).state == "fail"


def test_nothing_is_ok_without_its_json(root, leave, results):
    leave("5.0.0", {"llama": checked()})
    gone = leave("5.1.0", {"llama": checked(), "granite": checked()})
    assert "granite" in matrix(results())
    gone.unlink()
    assert "granite" not in matrix(results())
    assert results().score(*results().counted).states == {"ok": 1}
    (root / "compat_matrix/versions.toml").write_text('[version."5.0.0"]\n[version."5.1.0"]\n')
    said = {file.name for file, text in tables.made(root).items() if "Version 5.1.0 has not been checked yet." in text}
    assert said == {"MATRIX.md", "matrix.html"}


@pytest.mark.parametrize(
    ("upstream", "state", "one_row", "every_row"),
    [(RIGHT, "ok", "ok", 1), (PLAIN, "plain", "ok", 0), (LEAKS, "leak", "leak", 0), (RAISES, "error", "error", 0)],
)
def test_upstream(leave, results, upstream, state, one_row, every_row):
    leave("5.0.0", {"llama": checked(upstream)})
    assert only(results).upstream.state == state
    score = results().score(*results().environments)
    assert (score.one_row, score.every_row, score.measured) == ({one_row: 1}, every_row, 1)


def test_a_row_that_does_not_exist_with_pictures_does_not_count(leave, results):
    three = {"one row": "ok", "mask of ones": "ok", "default cache": "ok"}
    leave("5.0.0", {"llava:picture": checked(three), "llama": checked(three)}, upstream_rows=[*three, "two rows"])
    found = results().environments[0]
    assert found.cell("llava:picture").upstream.state == "ok" and found.cell("llama").upstream.state == "plain"


def test_a_row_that_was_not_run_is_not_right(leave, results):
    leave("5.0.0", {"llama": checked({"one row": "ok"})})
    assert only(results).upstream.state == "plain"


def test_versions_are_in_their_order(leave, results):
    for name in ("5.10.4", "5.2.0", "4.57.6-wrapt1.16", "4.57.6", "4.34.1"):
        leave(name, {"llama": checked()})
    names = [environment.name for environment in results().environments]
    assert names == ["4.34.1", "4.57.6", "4.57.6-wrapt1.16", "5.2.0", "5.10.4"]
    assert [band.label for band in bands(results().environments)] == ["4.34", "4.57", "5.2–5.10"]
    assert [len(part.environments) for part in split(bands(results().environments)[2], 1)] == [1, 1]
    assert spans(results().environments, ["4.34.1", "4.57.6", "5.10.4"]) == "4.34.1 to 4.57.6, 5.10.4"


def test_what_is_allowed_to_fail_is_shown_and_not_counted(root, leave, results):
    leave("5.0.0", {"llama": checked(RIGHT)})
    before = results().score(*results().counted)
    leave("main", {"newest": {"error": "moved"}}, transformers="5.99.0.dev0", allowed_to_fail=True)
    assert results().score(*results().counted) == before
    assert "main (allowed to fail, not counted)" in matrix(results())
    assert "newest" in page(results())
    assert " fail" not in tables.made(root)[root / "README.md"]


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
    file = leave("5.0.0", {}, **change)
    with pytest.raises(Malformed) as caught:
        results()
    assert str(file) in str(caught.value) and expected in str(caught.value)
    assert publish.main(["--root", str(root)]) == 1
    assert expected in capsys.readouterr().err


def test_no_json_and_no_evidence(leave, results):
    with pytest.raises(Malformed, match="expected evidence"):
        results()
    leave("5.0.0", {}).write_text("{")
    with pytest.raises(Malformed, match=r"5\.0\.0\.json: expected JSON"):
        results()


def test_drift_is_caught(root, leave, capsys):
    leave("5.0.0", EVERY_STATE)
    run = ["--root", str(root)]
    assert publish.main([*run, "--check"]) == 1
    assert not (root / "compat_matrix/MATRIX.md").exists()
    assert publish.main(run) == 0
    assert publish.main([*run, "--check"]) == 0
    assert (root / "README.md").read_text().startswith("before\n")
    assert (root / "README.md").read_text().endswith("after\n")
    capsys.readouterr()
    pages = "README.md", "docs/kernels.md", "docs/long_rows.md", "compat_matrix/MATRIX.md", "compat_matrix/matrix.html"
    for name in (*pages, "fa2patch/cli/evidence.json"):
        good = (root / name).read_text()
        (root / name).write_text(good.replace("1", "2").replace('"5.0"', '"5.9"'))
        assert publish.main([*run, "--check"]) == 1
        said = capsys.readouterr().err
        assert name in said and publish.COMMAND in said
        (root / name).write_text(good)
    leave("5.0.0", {**EVERY_STATE, "llama": checked(seam="entry")})
    assert publish.main([*run, "--check"]) == 1


def test_readme_without_markers(root, leave):
    leave("5.0.0", EVERY_STATE)
    (root / "README.md").write_text("nothing\n")
    with pytest.raises(Malformed, match="matrix:begin"):
        tables.made(root)


def test_readme_says_what_holds_in_two_sentences_and_one_link(root, leave, results):
    leave("4.42.4", {"llama": checked(LEAKS), "other": EVERY_STATE["broken"]})
    leave("5.0.0", {"llama": checked(RIGHT), "other": checked(PLAIN), "mamba": EVERY_STATE["mamba"]})
    leave("5.1.0", {"llama": checked(PLAIN), "weird": EVERY_STATE["weird"]})
    *said, link = summary(results()).splitlines()
    assert " ".join(said) == (
        "fa2patch isolates 4 of 7 checked combinations of model type and Transformers release "
        "(3 releases, on a CPU); it refuses 1 with a reason; "
        "1 are known failures of Transformers; 1 fail. Transformers alone is right in 3 of them for one packed row, "
        f"and in 1 for every kind of packed row. All 7 cells were checked with the code of commit {'1' * 12}."
    )
    assert links.PAGE in link and f"{links.FOLDER}/MATRIX.md" in link
    assert "\n".join([*said, link]) in tables.made(root)[root / "README.md"]


def test_gpu_evidence_is_claimed_only_where_it_is(root, leave, results):
    leave("5.0.0", EVERY_STATE)
    assert gpu(results()) == "No GPU evidence exists yet."
    leave("5.0.0", {"llama": checked()}, folder="gpu")
    assert gpu(results()) == "No GPU evidence exists yet."
    leave("5.0.0", {"llama": checked()}, folder="gpu", device="NVIDIA H100", kernel="flash_attn")
    assert gpu(results()) == "GPU evidence: 5.0.0 on NVIDIA H100, 1 of 1 ok."
    assert all("NVIDIA H100" in text for text in (matrix(results()), page(results())))


VOID = {"meta", "input", "link", "img", "br", "hr", "col"}
LOADS = {"src", "srcset", "data", "poster", "action", "background"}


class Page(HTMLParser):
    """A parser that fails on a wrong end tag and on everything that a browser would fetch."""

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


def test_the_page_is_well_formed_and_fetches_nothing(leave, results):
    leave("5.0.0", {**EVERY_STATE, "raises": checked(RAISES)})
    parsed = Page()
    parsed.feed(page(results()))
    parsed.close()
    assert parsed.open == []
    style, (words, data, script) = "".join(parsed.text["style"]), parsed.text["script"]
    assert set(json.loads(words)["here"]) == {"ok", "refused", "xfail", "fail"}
    assert not any(word in style for word in ("http", "url(", "@import"))
    assert not any(word in script for word in ("http", "fetch(", "XMLHttpRequest", "import(", "innerHTML"))
    held = json.loads(data)
    assert [name for name, _, _ in held["architectures"]] == ["broken", "llama", "mamba", "raises", "weird"]
    assert {EVERY_STATE["weird"]["link"], RAISES["one row"], "no sliding window"} <= set(held["texts"])


def test_the_same_evidence_gives_the_same_files(root, leave):
    leave("5.0.0", EVERY_STATE)
    leave("5.1.0", {**EVERY_STATE, "raises": checked(RAISES)})
    assert tables.made(root) == tables.made(root)
