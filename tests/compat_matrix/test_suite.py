"""``python -m compat_matrix.suite`` runs a folder of tests in each version's environment, here always this Python."""

import sys

import pytest

from compat_matrix import environments, suite

NEWEST = environments.newest().name
OUT = "import pytest\n\n\n@pytest.mark.skip(reason='no such cache')\ndef test_out(): ...\n"
GOOD = OUT + "\n\ndef test_good():\n    pass\n"


@pytest.fixture
def made(monkeypatch):
    # Every environment is the Python that runs this test. The fixture returns the versions that were asked for.
    versions = []

    def make(version, folder):
        versions.append(version)
        return sys.executable

    monkeypatch.setattr(environments, "make", make)
    return versions


def test_every_version_gets_a_line_with_its_counts_and_the_reasons_of_what_was_skipped(made, tmp_path, capsys):
    (tmp_path / "test_some.py").write_text(GOOD)
    assert suite.main([str(tmp_path), "--versions", "4.36.2", NEWEST]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["4.36.2", NEWEST], "in the order asked for"
    assert all("1 passed, 0 failed, 1 skipped (1 x no such cache)" in line for line in lines)
    assert {version.transformers for version in made} == {"4.36.2", NEWEST}
    assert all("pytest" in version.requirements and "torch==2.13.0" in version.requirements for version in made)


@pytest.mark.parametrize(
    "file, said",
    [
        (GOOD + "\n\ndef test_bad():\n    assert 2 + 2 == 5, 'sums'\n", "test_some::test_bad: AssertionError: sums"),
        pytest.param("import no_such_package\n", "no_such_package", marks=pytest.mark.slow),
        ("import os\n\n\ndef test_crash():\n    os._exit(7)\n", "pytest ended with 7 and without a report"),
        pytest.param(OUT, "no test passed", marks=pytest.mark.slow),
        ("", "no test passed"),
    ],
    ids=["fails", "is not imported", "breaks off", "is skipped", "is not there"],
)
def test_the_exit_code_says_that_a_test(made, tmp_path, capsys, file, said):
    (tmp_path / "test_some.py").write_text(file)
    assert suite.main([str(tmp_path), "--versions", NEWEST]) == 1
    counts, failure = capsys.readouterr().out.splitlines()[:2]
    assert "1 failed" in counts and said in failure


def test_an_environment_that_cannot_be_made_fails_its_own_version_only(monkeypatch, tmp_path, capsys):
    def make(version, folder):
        if version.transformers == "4.36.2":
            raise RuntimeError("uv pip install failed")
        return sys.executable

    monkeypatch.setattr(environments, "make", make)
    (tmp_path / "test_some.py").write_text(GOOD)
    assert suite.main([str(tmp_path), "--versions", "4.36.2", NEWEST]) == 1
    broken, good, why = capsys.readouterr().out.splitlines()
    assert broken.startswith("4.36.2: 0 passed, 1 failed") and good.startswith(f"{NEWEST}: 1 passed, 0 failed")
    assert why == "4.36.2 FAILED RuntimeError: uv pip install failed"
