"""Which versions the nightly workflow checks, and when it reports a failure."""

import json

import pytest
from evidence import GOOD, evidence

from compat_matrix import environments, nightly

OK = {"fa2patch": {"sdpa": GOOD}, "seam": ["interface"]}
FAIL = {"fa2patch": {"sdpa": {**GOOD, "ok": GOOD["ok"] - 1, "fail": {"packed_row": "off"}}}, "seam": ["interface"]}


def leave(folder, name, **architectures):
    (folder / f"{name}.json").write_text(json.dumps(evidence(name, architectures, transformers="5.0.0")))


def test_a_release_without_a_block_is_checked_once_it_is_out():
    blocks = list(environments.versions())
    assert nightly.wanted() == [*(name for name in blocks if name != "main"), "main"]
    assert nightly.wanted("5.99.0")[-2:] == ["5.99.0", "main"]
    assert nightly.wanted("4.44.2") == nightly.wanted("5.99.0rc1") == nightly.wanted()


def test_the_next_torch_is_checked_where_an_index_of_it_is_named(capsys):
    assert nightly.wanted(torch_next=True) == [*nightly.wanted(), "torch-next"]
    assert nightly.main(["versions", "--torch-next", "--only"]) == 0
    assert json.loads(capsys.readouterr().out)[-2:] == ["main", "torch-next"]
    newest, following = environments.newest(), environments.version("torch-next")
    assert following.allowed_to_fail and following.transformers == newest.transformers
    major, minor = map(int, newest.torch.split(".")[:2])
    assert f"torch>={major}.{minor + 1}.0.dev0" in following.requirements
    assert not any(requirement.startswith("torch==") for requirement in following.requirements)
    assert "on " in following.stamp and "on " not in newest.stamp
    assert "on " in environments.version("main").changed(pins=["peft==0.13.2"]).stamp, "pins change the name"


def test_red_is_what_fails_and_what_left_nothing(tmp_path, capsys):
    leave(tmp_path, "5.0.0", llama=OK)
    leave(tmp_path, "5.1.0", llama=FAIL, qwen2=OK)
    assert nightly.main(["red", str(tmp_path), "--wanted", '["5.0.0", "main"]']) == 0
    capsys.readouterr()
    assert nightly.main(["red", str(tmp_path), "--wanted", '["5.0.0", "5.1.0", "5.2.0", "main"]']) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("- 5.1.0: llama: ") and "packed_row" in first
    assert second.startswith("- 5.2.0: no evidence")


@pytest.mark.parametrize("name", ["main", "torch-next"])
def test_what_comes_next_names_the_seam_that_moved(tmp_path, capsys, name):
    leave(tmp_path, name, llama=FAIL, qwen2=FAIL, phi={**OK, "seam": ["method"]}, jamba=OK)
    assert nightly.main(["red", str(tmp_path), "--wanted", f'["{name}"]']) == 1
    first, second = capsys.readouterr().out.splitlines()
    moved = f"- {name}: the seam interface"
    assert first.startswith(f"{moved} moved in 3 architectures (llama, qwen2, phi): ") and "off" in first
    assert second == f"{moved} and mixer moved in 1 architectures (jamba): patched at the seam interface"


def test_versions_are_printed_as_json(capsys):
    assert nightly.main(["versions", "--newest", "5.99.0", "--only"]) == 0
    assert json.loads(capsys.readouterr().out)[-1] == "main"
    assert nightly.main(["versions", "--only", "4.44.2"]) == 0
    assert json.loads(capsys.readouterr().out) == ["4.44.2"]
