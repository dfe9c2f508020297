"""README, CI and other documents agree with the code."""

import re
from pathlib import Path

import pytest

import fa2patch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command():
    command = next(line.strip() for line in README.splitlines() if line.endswith("-m pytest") and "venv" in line)
    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("file", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda path: path.name)
def test_links_and_pictures_exist(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
        assert (file.parent / target).exists(), target


def test_public_names_are_there_and_documented():
    for name in fa2patch.__all__:
        assert getattr(fa2patch, name).__doc__, name
