"""The page of the committed evidence: every cell has an address, and the address shows what the evidence says."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from compat_matrix import environments
from compat_matrix.cells import Cell, Checked, Upstream
from compat_matrix.publish import matrix, words
from compat_matrix.results import ROWS_WITH_MEDIA, read
from compat_matrix.tiny_configs import MEDIA, PAIRS

FOLDER = environments.HERE
PAGE = FOLDER / "matrix.html"
EVIDENCE = {file.stem: json.loads(file.read_text()) for file in sorted((FOLDER / "evidence").glob("*.json"))}
NEWEST = read(FOLDER / "evidence").counted[-1].name
MINOR = ".".join(NEWEST.split(".")[:2])
CELLS = {(name, version) for version, held in EVIDENCE.items() for name in held["architectures"]}
ALL_ROWS = dict.fromkeys(words.ROWS, "ok")


@pytest.fixture(scope="module")
def data():
    return matrix.data(read(FOLDER / "evidence"))


def shown(data):
    # The cells of the page's data, by address: (fa2patch, Transformers alone).
    return {
        words.address(name, environment["name"]): (data["cells"][pair[0]], data["runs"][pair[1]])
        for name, _, pairs in data["architectures"]
        for environment, pair in zip(data["environments"], pairs)
        if pair
    }


def test_every_cell_has_an_address_that_means_one_thing(data):
    addresses = [words.address(name, version) for name, version in CELLS]
    assert len(set(addresses)) == len(CELLS) > 4000 and set(shown(data)) == set(addresses)
    names = [name for name, _, _ in data["architectures"]]
    versions = [environment["name"] for environment in data["environments"]]
    every = [words.address(name, version) for name in names for version in versions]
    assert len(set(every)) == len(every), "two pairs of a model type and a version have one address"
    assert not set(every) & set(names) and not any(address.startswith("stack=") for address in every)


def test_a_cell_shows_the_results_of_every_implementation(data):
    cells, texts = shown(data), data["texts"]
    for name, version in CELLS:
        _, (_, runs) = cells[words.address(name, version)]
        found = {texts[implementation]: [texts[result] for _, result in rows] for implementation, rows in runs}
        runs = EVIDENCE[version]["architectures"][name]["upstream"]
        kinds = ROWS_WITH_MEDIA if name.endswith((*MEDIA, PAIRS)) else words.ROWS
        expected = {
            implementation: [rows.get(row, "unknown") for row in kinds] for implementation, rows in runs.items()
        }
        assert found == expected, (name, version)


def test_what_does_not_apply_is_not_in_the_sentences_of_a_cell(data):
    texts = data["texts"]
    for address, ((state, verdict, here, told, _, _, checked), _) in shown(data).items():
        reasons = {texts[reason] for run in checked for _, reason in run[3]}
        said = [texts[verdict], *(texts[run[2]] for run in checked), *(texts[text] for _, text in told)]
        said += [texts[here]] if state == 0 else []
        assert not any("n/a" in text or reason in text for text in said for reason in reasons), address


def test_evidence_that_the_page_and_the_tables_link_to_exists(data):
    addresses = {words.address(name, version) for name, version in CELLS}
    assert data["folder"] == words.FOLDER
    for environment in data["environments"]:
        assert (FOLDER / "evidence" / f"{environment['name']}.json").exists()
    tables = (FOLDER / "MATRIX.md").read_text()
    linked = re.findall(rf"\({re.escape(words.PAGE)}#([^)]+)\)", tables)
    assert set(linked) <= addresses
    assert set(linked) >= {words.address(name, NEWEST) for name in EVIDENCE[NEWEST]["architectures"]}
    for file in re.findall(r"\((evidence/[^)]+)\)", tables):
        assert (FOLDER / file).exists(), file


def test_a_minor_stands_for_its_environments_its_release_first(data):
    names = [environment["name"] for environment in data["environments"]]
    assert [names[number] for number in data["minors"]["4.36"]] == ["4.36.2", "4.36.2-py3.9-torch2.1"]
    assert names[data["minors"][MINOR][0]] == NEWEST
    assert {number for numbers in data["minors"].values() for number in numbers} == set(range(len(names)))


def test_every_point_of_the_evidence_is_explained():
    assert set(matrix.points()) >= {point for held in EVIDENCE.values() for point in held["points"]}
    assert all(matrix.points().values())


def test_the_page_is_smaller_than_a_megabyte():
    assert PAGE.stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("state", "alone", "said"),
    [
        ("ok", "ok", "fa2patch isolates the documents; Transformers alone, loaded as sdpa, is right for all 5 kinds"),
        ("refused", "leak", "fa2patch refuses this model and gives the reason; Transformers alone, loaded as sdpa"),
        ("fail", "error", "This fails with fa2patch; Transformers alone, loaded as sdpa, raises an error"),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(state, alone, said):
    verdict = words.verdict(Cell(state, alone=(Upstream("sdpa", dict.fromkeys(ALL_ROWS, alone)),)))
    assert verdict.startswith(said) and verdict.count(".") == 1


def test_implementations_with_the_same_results_are_said_once():
    flash, leaks = {**ALL_ROWS, "two rows": "leak"}, dict.fromkeys(ALL_ROWS, "leak")
    cell = Cell(
        "ok",
        checked={"sdpa": Checked(17, {"windows": "none"}, {}, {}), "eager": Checked(0, {"load": "none"}, {}, {})},
        alone=(Upstream("flash_attention_2", flash), Upstream("sdpa", leaks), Upstream("eager", leaks)),
    )
    first, second = words.alone(cell)
    assert first[0] == "flash_attention_2" and first[1].endswith("; leaks for two packed rows in a batch.")
    assert second == ("sdpa or eager", "leaks for all 5 kinds of packed row.")
    assert words.with_fa2patch(cell).endswith("with the model loaded as sdpa.")
    assert [words.held(run) for run in cell.checked.values()] == [
        "all 17 points that were run hold",
        "cannot be loaded this way in this environment",
    ]
    assert "Transformers alone fails" in words.held(Checked(0, {}, {"document": "KeyError"}, {}))


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STEPS = Path(__file__).with_name("page_steps.js")


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"looked for {', '.join(BROWSERS)} on the PATH and found none")
    page = PAGE.read_text(encoding="utf-8").replace(
        "</body>", f"<script>{STEPS.read_text(encoding='utf-8').replace('NEWEST', NEWEST)}</script></body>"
    )
    copy = tmp_path / "matrix.html"
    copy.write_text(page, encoding="utf-8")
    said = _run(browser, copy)
    assert "error" not in said, said["error"]
    title, body = said["cell"]
    assert title == "llama in Transformers 4.43.4" and "leaks, even for one packed row." in body
    held = EVIDENCE["4.43.4"]
    made = held["architectures"]["llama"]["made"]
    assert f"torch {made['torch']}, Python {held['python']}, wrapt {held['wrapt']}" in body
    assert made["when"][:10] in body and made["commit"][:12] in body
    assert "evidence/4.43.4.json" in said["evidence"] and "#llama-4.42.4" in said["evidence"]
    assert said["folded"] and not any(is_open for is_open, _ in said["folded"])
    assert any("no sliding window" in text for _, text in said["folded"])
    assert said["clicked"] == [f"#mistral-{NEWEST}", f"mistral in Transformers {NEWEST}"]
    assert said["focus"] == "panel-title", "a click without a mouse is the keyboard's"
    assert said["back"] == ["#llama-4.43.4", "llama in Transformers 4.43.4"]
    assert said["closed"] == ["", True]
    assert "#nonsense is not known" in said["unknown"]
    assert "granite was not checked in 4.34.1" in said["absent"] and "from 4.45.2" in said["absent"]
    assert "4.46.1 itself was not checked. These are the results of 4.46.3" in said["stack"]
    assert "checked with torch 2.13.0, not with torch 2.5" in said["stack"] and "isolated" in said["stack"]
    assert "raises an error for two packed rows" in said["stack"] and "sdpa or eager: leaks for all 5" in said["stack"]
    assert said["typed"][0] == "#stack=4.36.2&torch=2.1.0&model=mistral"
    assert "checked with torch 2.1.2, not with torch 2.1.0" in said["typed"][1] and "torch2.1" in said["typed"][1]
    assert "not with torch" not in said["exact"] and "4.36.2-py3.9-torch2.1" in said["exact"]
    assert f"Transformers 4.33.0 was not checked. The minor versions 4.34 to {MINOR} were." in said["old"]
    assert "newer than" in said["newer"] and "Nothing is known of it here" in said["newer"]
    assert "No model type “Qwen/Qwen2.5-7B”" in said["similar"] and said["similar"].endswith("qwen2")
    assert said["width"] < 600 and said["wide"] == 0, "the page itself scrolls sideways"
    assert said["links"] == len(CELLS)


def _run(browser: str, page: Path) -> dict:
    # The browser gets a profile of its own. The page's last script leaves the result.
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=390,844",
        "--virtual-time-budget=20000",
    ]
    options += [f"--user-data-dir={page.parent / 'profile'}", "--dump-dom"]
    done = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="said">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
