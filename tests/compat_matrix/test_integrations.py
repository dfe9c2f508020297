"""README's table of integrations says which tests passed, and refuses to say so of tests that did not."""

import json
from pathlib import Path

import pytest

from compat_matrix.ecosystem import integrations
from compat_matrix.publish import integrations_table
from compat_matrix.results import Malformed

ROOT = Path(__file__).parents[2]
ROWS = integrations.rows()

REPORT = """<testsuites><testsuite>
<testcase name="test_losses[trl-0.12.2-kto]" />
<testcase name="test_losses[trl-1.16.0]"><failure message="off" /></testcase>
<testcase name="test_other"><skipped message="none" /></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def evidence(tmp_path):
    file = tmp_path / "tests.json"
    run = {"outcomes": {"passed": 3}, "stacks": ["trl-0.12.2", "trl-1.16.0"]}
    stack = {name: [next(s for s in integrations.stacks() if _pins(s, row))] for name, row in ROWS.items()}
    found = {name: {**run, "stacks": stack[name], "command": row.command} for name, row in ROWS.items()}
    file.write_text(json.dumps(found))

    def changed(name, **changes):
        file.write_text(json.dumps({**found, name: {**found[name], **changes}}))
        return file

    return changed


def _pins(stack, row):
    try:
        return bool(integrations.releases(row, [stack]))
    except Malformed:
        return False


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_row_names_tests_and_a_page_that_exist(row):
    files = [Path(ROOT, word) for word in row.tests if word.startswith("tests/")]
    assert files
    for file in files:
        assert "pytest.mark.slow" in file.read_text(encoding="utf-8"), file
    assert (ROOT / "docs" / row.page).with_suffix(".md").exists()


def test_the_table_has_every_row(evidence):
    name = next(iter(ROWS))
    table = integrations_table.made(evidence(name, outcomes={"passed": 5}))
    assert len(table.splitlines()) == 2 + len(ROWS)
    assert "| 5 passed |" in table.splitlines()[2]
    assert all(row.what in table for row in ROWS.values())


@pytest.mark.parametrize(
    "changes",
    [{"outcomes": {"passed": 4, "failure": 1}}, {"outcomes": {"skipped": 1}}, {"outcomes": {}}, {"command": "pytest"}],
)
def test_a_row_whose_tests_did_not_all_pass_is_an_error(evidence, changes):
    name = next(iter(ROWS))
    with pytest.raises(Malformed, match=f"--rows {name}"):
        integrations_table.made(evidence(name, **changes))


def test_a_report_is_read(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    found = integrations.read(tmp_path / "report.xml")
    assert found == {
        "test_losses[trl-0.12.2-kto]": "passed", "test_losses[trl-1.16.0]": "failure", "test_other": "skipped",
    }  # fmt: skip


def test_stacks_are_found_in_names_of_tests():
    assert integrations._stack("test_losses[trl-0.12.2-kto]") == "trl-0.12.2"
    assert integrations._stack("test_losses[kto-trl-0.12.2]") == "trl-0.12.2"
    assert integrations._stack("test_losses[fused-head-trl-1.16.0]") == "fused-head-trl-1.16.0"
    assert integrations._stack("test_losses[trl-0.12.20]") == integrations._stack("test_losses") == ""


def test_a_stack_that_does_not_pin_the_package_is_an_error():
    row = integrations.Row("x", "liger-kernel", "", (), "", "")
    assert integrations.releases(row, ["fused-losses"]) == ["0.8.5"]
    with pytest.raises(Malformed, match="does not pin liger-kernel"):
        integrations.releases(row, ["trl-1.16.0"])
