"""Which versions the nightly workflow checks, and when it reports a failure."""

import json

from compat_matrix import environments, nightly

OK = {"fa2patch": {"sdpa": {"ok": 1}}, "seam": ["interface"]}
FAIL = {"fa2patch": {"sdpa": {"fail": {"packed_row": "off by 2.1"}}}, "seam": ["interface"]}


def evidence(folder, name, **architectures):
    made = {"format": 2, "name": name, "transformers": "5.0.0", "torch": "2", "python": "3.11", "wrapt": "1"}
    made |= {"device": "cpu", "kernel": "reference", "date": "2026-01-01", "points": ["packed_row"]}
    (folder / f"{name}.json").write_text(json.dumps({**made, "upstream_rows": [], "architectures": architectures}))


def test_a_release_without_a_block_is_checked_once_it_is_out():
    blocks = list(environments.versions())
    assert nightly.wanted() == [*(name for name in blocks if name != "main"), "main"]
    assert nightly.wanted("5.99.0")[-2:] == ["5.99.0", "main"]
    assert nightly.wanted("4.44.2") == nightly.wanted("5.99.0rc1") == nightly.wanted()


def test_red_is_what_fails_and_what_left_nothing_but_not_main(tmp_path, capsys):
    evidence(tmp_path, "5.0.0", llama=OK)
    evidence(tmp_path, "5.1.0", llama=FAIL, qwen2=OK)
    evidence(tmp_path, "main", llama=FAIL)
    assert nightly.main(["red", str(tmp_path), "--wanted", '["5.0.0", "main"]']) == 0
    capsys.readouterr()
    assert nightly.main(["red", str(tmp_path), "--wanted", '["5.0.0", "5.1.0", "5.2.0", "main"]']) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("- 5.1.0: llama: ") and "packed_row" in first
    assert second.startswith("- 5.2.0: no evidence")


def test_versions_are_printed_as_json(capsys):
    assert nightly.main(["versions", "--newest", "5.99.0", "--only"]) == 0
    assert json.loads(capsys.readouterr().out)[-1] == "main"
    assert nightly.main(["versions", "--only", "4.44.2"]) == 0
    assert json.loads(capsys.readouterr().out) == ["4.44.2"]
