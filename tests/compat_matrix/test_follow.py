"""What a release of Transformers changed, by its sources: what is red, what is not, and what the page says."""

import re
import subprocess
from pathlib import Path

import pytest

from compat_matrix import environments
from compat_matrix.follow import __main__ as follow
from compat_matrix.follow import newest, sources, watch
from compat_matrix.follow.changes import RULES, SPREAD, Seen, compared

ROOT = Path(__file__).parents[2]
FOLDERS = [f"model_{number}" for number in range(SPREAD + 2)]
FORWARD = "hidden_states, attention_mask: Tensor | None = None, past_key_values: Cache | None = None"
EVERY = dict.fromkeys(FOLDERS, FORWARD)
LIBRARY = """class AttentionMaskConverter:
    _global_mapping = {"sdpa": sdpa, # no more
    }

def find_documents(position_ids):
    \"\"\"Its words do not count.\"\"\"
    return torch.diff(position_ids) != 1
"""
KEYWORDS = "class TransformersKwargs(TypedDict, total=False):\n    seq_idx: int\n    {}: int\n"


def made(folder, release, forwards=None, keywords="cu_seq_lens_q", library=LIBRARY):
    """Write the sources of a Transformers whose models have one class with one forward each."""
    package = folder / release / "src" / "transformers"
    texts = {
        "__init__.py": f'__version__ = "{release}"\n',
        "modeling_utils.py": "",
        "masking_utils.py": library,
        "utils/generic.py": KEYWORDS.format(keywords),
        "models/auto/modeling_auto.py": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict(["
        + ", ".join(f'("{name}", "{name.title()}ForCausalLM")' for name in forwards)
        + "])\n",
    }
    for name, taken in forwards.items():
        texts[f"models/{name}/__init__.py"] = ""
        texts[f"models/{name}/modeling_{name}.py"] = (
            f"class {name.title()}ForCausalLM(Module):\n"
            f"    def forward(self, {taken}, **kwargs: Unpack[TransformersKwargs]):\n"
            "        return kwargs.get('from_kwargs')\n"
        )
    for path, text in texts.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    return sources.read(folder / release)


@pytest.fixture
def before(tmp_path):
    return made(tmp_path, "9.1.0", EVERY)


def seen(*releases):
    known = Seen()
    for release in releases:
        known.learn(release)
    return known


def reds(before, after, known=None):
    return {(red.rule, red.name) for red in compared(before, after, known or seen(before)).reds}


def test_a_forward_is_read_with_its_annotations_and_what_it_takes_from_its_kwargs(before):
    assert before.release == "9.1.0" and before.folders == {*FOLDERS, "auto"} - {"auto"}
    assert before.forwards["models/model_0/modeling_model_0.py", "Model_0ForCausalLM"] == {
        "hidden_states": "", "attention_mask": "Tensor | None", "past_key_values": "Cache | None", "from_kwargs": "",
    }  # fmt: skip
    assert before.keywords == {"TransformersKwargs": {"seq_idx", "cu_seq_lens_q"}}
    assert before.tables["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]["model_3"] == "Model_3ForCausalLM"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"forwards": dict.fromkeys(FOLDERS, FORWARD.replace("past_key_values", "cache"))},
            {("spreads", "cache"), ("gone", "past_key_values")},
        ),
        ({"forwards": EVERY, "keywords": "cu_seq_lens_q: int\n    row_ends"}, {("keyword", "row_ends")}),
        ({"forwards": EVERY, "library": LIBRARY.replace("Attention", "Another")}, {("gone", "AttentionMaskConverter")}),
        ({"forwards": EVERY, "library": LIBRARY.replace("!= 1", "!= 0")}, {("derives", "find_documents")}),
        ({"forwards": EVERY, "library": LIBRARY.partition("def")[0]}, {("derives", "find_documents")}),
        (
            {"forwards": EVERY, "library": LIBRARY.replace("# no", "'torch_flash': flash, # no")},
            {("implementation", "torch_flash")},
        ),
        *(
            ({"forwards": {**EVERY, "brand_new": f"{FORWARD}, {name} = None"}}, {("boundaries", name)})
            for name in ("cu_seqlens", "document_ids", "packed_seq_lengths", "seq_lens")
        ),
    ],
    ids=[
        "renamed in all",
        "keyword of all",
        "function that fa2patch names",
        "derives otherwise",
        "derives no more",
        "new implementation",
        *["like boundaries"] * 4,
    ],
)
def test_what_is_red(before, tmp_path, change, expected):
    assert reds(before, made(tmp_path, "9.2.0", **change)) == expected


def test_a_name_that_few_models_had_is_red_when_it_becomes_general(tmp_path):
    # ``cache`` was an argument of Flaubert long before 5.24 gave it to every model.
    some = {**EVERY, "flaubert": "input_ids, cache = None"}
    before = made(tmp_path, "9.1.0", some)
    all_of_them = {name: taken.replace("past_key_values", "cache") for name, taken in some.items()}
    after = made(tmp_path, "9.2.0", all_of_them)
    assert ("spreads", "cache") in reds(before, after)


def test_what_is_general_already_is_not_red_again(before, tmp_path):
    after = made(tmp_path, "9.2.0", dict.fromkeys(FOLDERS, FORWARD + ", noise = None"))
    assert reds(before, after) == {("spreads", "noise")}
    without = made(tmp_path, "9.3.0", EVERY)
    again = made(tmp_path, "9.4.0", dict.fromkeys(FOLDERS, FORWARD + ", noise = None"))
    assert reds(without, again, seen(before, after, without)) == set()


def test_a_new_models_own_arguments_are_not_red(before, tmp_path):
    after = made(tmp_path, "9.2.0", {**EVERY, "brand_new": FORWARD + ", pitch = None, tempo = None"})
    found = compared(before, after, seen(before))
    assert not found.reds and found.new == {"pitch", "tempo"}


def test_a_rename_in_one_model_is_red_if_fa2patch_relies_on_the_old_name(before, tmp_path):
    for old, red in (("past_key_values", True), ("hidden_states_of_nobody", False)):
        taken = FORWARD.replace("past_key_values", old)
        first = made(tmp_path / old, "9.1.0", {**EVERY, "one": taken})
        after = {**EVERY, "one": taken.replace(old, "memory_of_tokens")}
        found = reds(first, made(tmp_path / old, "9.2.0", after))
        assert found == ({("replaces", "memory_of_tokens")} if red else set())


@pytest.fixture
def watched(monkeypatch, tmp_path, before):
    made(tmp_path, "9.2.0", dict.fromkeys(FOLDERS, FORWARD + ", noise = None"))
    file = tmp_path / "seen.json"
    seen(before).write(file)
    monkeypatch.setattr(sources, "of_release", lambda release, folder: tmp_path / release)
    monkeypatch.setattr(Seen.read.__func__, "__defaults__", (file,))
    monkeypatch.setattr(Seen.write, "__defaults__", (file,))
    return lambda *options: watch.main(["--sources", str(tmp_path / "9.2.0"), "--against", "9.1.0", *options])


def test_the_watch_names_what_is_red_first_and_says_what_to_do(watched, capsys):
    assert watched() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# Transformers 9.2.0, beside 9.1.0" and lines[2].startswith("**RED: `noise`.**")
    assert any(line.startswith("**spreads**") and RULES["spreads"][1] in line for line in lines)
    assert any("| `noise` | 12 forwards, 12 folders |" in line for line in lines)


def test_a_person_accepts_a_name_with_a_reason_and_it_is_red_no_longer(watched, capsys):
    assert watched("--accept", "noise", "--because", "it is added to embeddings") == 0
    assert "**Green:**" in capsys.readouterr().out and watched() == 0
    assert "Accepted in seen.json: `noise`" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="not red in 9.2.0: other"):
        watched("--accept", "other", "--because", "no reason")
    with pytest.raises(SystemExit):
        watched("--accept", "noise")


def test_the_committed_file_says_that_5_24_renamed_every_cache():
    # What the watch says of 5.24 follows from what was seen before it, not from what is accepted.
    known = Seen.read()
    (release,) = (each for each in known.since if each.startswith("5.24."))
    had, general = known.before(release)
    assert "cache" in had and "cache" not in general and {"past_key_values", "position_ids"} <= general
    assert "cache" in known.general[release]
    assert {*environments.versions()} >= {*known.since}
    rows = [line for line in watch.HISTORY.read_text().splitlines() if line.startswith(f"| {release} |")]
    assert len(rows) == 1 and "spreads: `cache`" in rows[0]


VERSIONS = (
    '[defaults]\npython = "3.11"\ntorch = "2.13.0"\npins = []\n\n[version."9.1.0"]\ntorch = "2.9.1"\n\n# Stacks.\n'
)


def test_a_release_gets_the_block_of_the_one_before(monkeypatch, tmp_path):
    monkeypatch.setattr(environments, "HERE", tmp_path)
    file = tmp_path / "versions.toml"
    file.write_text(VERSIONS)
    follow.add_block("9.2.0")
    assert [*environments.versions()] == ["9.1.0", "9.2.0"] and environments.newest().name == "9.2.0"
    assert environments.versions()["9.2.0"].torch == "2.9.1" and file.read_text().endswith("\n\n# Stacks.\n")
    follow.add_block("9.2.0")
    follow.add_block("9.2.1")
    assert [*environments.versions()] == ["9.1.0", "9.2.1"], "one patch release of a minor"
    with pytest.raises(SystemExit, match="9.1.5 is older"):
        follow.add_block("9.1.5")


def test_no_text_names_another_newest_release():
    assert newest.main(["--check"]) == 0


def test_a_stale_text_is_found_and_written(monkeypatch, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text("in Transformers 4.34 to 5.1.")
    (tmp_path / "docs" / "page.md").write_text("4.34 to 4.42 is another range, and 5.1 a fact.")
    (tmp_path / "tests" / "constraints.txt").write_text('transformers==5.1.0; python_version >= "3.11"\n')
    release = environments.newest()
    monkeypatch.setattr(environments, "newest", lambda: release)
    monkeypatch.setattr(environments, "HERE", tmp_path / "compat_matrix")
    assert newest.main(["--check"]) == 1 and "README.md does not say" in capsys.readouterr().out
    assert newest.main(["--write"]) == 0 and capsys.readouterr().out == f"{release.transformers}\n"
    minor = ".".join(release.transformers.split(".")[:2])
    assert (tmp_path / "README.md").read_text() == f"in Transformers 4.34 to {minor}."
    assert release.transformers in (tmp_path / "tests" / "constraints.txt").read_text()
    assert newest.main(["--check"]) == 0


MEASURED = (
    "/evidence/", "/results", "/MATRIX.md", "/matrix.html", "/BENCH.md", "/ECOSYSTEM.md", "/LONG_ROWS.md", "/TABLE.md",
    "/HISTORY.md", "/RELEASE.md", "/seen.json", "/evidence.json", "/upstream.json", "/versions.toml", "/CHANGELOG.md",
    "/plans.json", ".svg",
)  # fmt: skip


def test_no_other_file_names_the_newest_release_by_hand():
    # Commands take ``newest``; compat_matrix.follow.newest keeps the ranges and the tests' pin. What
    # ``compat_matrix.publish`` writes between two comments is generated.
    release = environments.newest().transformers
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    naming = []
    for name in filter(None, listed.stdout.split("\0")):
        if any(part in f"/{name}" for part in MEASURED):
            continue
        text = (ROOT / name).read_bytes().decode("utf-8", errors="replace")
        text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL)
        naming += [name] if release in newest._PIN.sub("", text) else []
    assert not naming
