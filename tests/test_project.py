"""The papers agree with the code."""

import re
from pathlib import Path

import pytest

import fa2patch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FAMILIES = {
    "Llama": "llama", "Mistral": "mistral", "Falcon": "falcon", "Mixtral": "mixtral", "Phi 1": "phi", "Qwen2 ": "qwen2",
    "Gemma": "gemma", "StableLM": "stablelm", "OLMo": "olmo", "DBRX": "dbrx", "Qwen2MoE": "qwen2_moe", "Phi-3": "phi3",
    "Granite": "granite", "StarCoder2": "starcoder2",
}  # fmt: skip


def test_ci_runs_the_readmes_test_command():
    command = next(line.strip() for line in README.splitlines() if line.endswith("-m pytest") and "venv" in line)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_readme_names_every_family_of_the_registry():
    assert {row.model_type for row in fa2patch.architectures()} == set(FAMILIES.values())
    for name in FAMILIES:
        assert f"| {name}" in README or f", {name}" in README, name


@pytest.mark.parametrize("file", [path for path in ROOT.glob("*.md")], ids=lambda path: path.name)
def test_links_and_pictures_exist(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
        assert (ROOT / target).exists(), target


def test_public_names_are_there_and_documented():
    for name in fa2patch.__all__:
        assert getattr(fa2patch, name).__doc__, name
