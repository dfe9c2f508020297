"""README, CI and other documents agree with the code."""

import importlib
import inspect
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fa2patch
from compat_matrix.environments import tomllib

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readmes_test_command():
    command = next(line.strip() for line in README.splitlines() if "-m pytest" in line and "-m venv" in line)
    assert command in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("file", [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], ids=lambda path: path.name)
def test_links_and_pictures_exist(file):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", file.read_text()):
        assert (file.parent / target).exists(), target


PUBLIC = re.findall(
    r"^\.\. auto(?:function|class):: ([\w.]+)", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented_with_all_that_it_takes(name):
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    said = inspect.getdoc(found)
    taken = (
        [] if inspect.isclass(found) else [*inspect.signature(found).parameters]
    )  # few classes are for users to make
    assert said and not [each for each in taken if not re.search(rf"\b{each}\b", said)]


def test_public_names_are_there_and_in_the_reference():
    assert all(getattr(fa2patch, name).__doc__ for name in fa2patch.__all__)
    assert {*fa2patch.__all__} <= {part for name in PUBLIC for part in name.split(".")} | {"Fa2PatchError"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = (".ci", ".conda", ".github", "compat_matrix", "docs", "examples", "fa2patch", "tests")
WRITTEN = ("", ".html", ".jinja", ".json", ".md", ".py", ".svg", ".toml", ".yaml", ".yml")
# A repository or a site that is this project's, by its own name or by its owner's.
ADDRESS = re.compile(
    r"(?:github\.com|githubusercontent\.com|uses:) *[/ ]((?:[\w-]+/fa2patch|fa2patch/[\w-]+))(?![\w-])"
    r"|([\w-]+\.github\.io/fa2patch)(?![\w-])"
)


def texts(root):
    # The paths and texts of everything that is written by hand or made from it.
    written = [*root.glob("*.md"), *root.glob("*.toml")]
    written += [file for folder in FOLDERS for file in (root / folder).rglob("*")]
    for file in written:
        made = {"evidence", "_build", "__pycache__"} & {*file.parts}
        if file.is_file() and not made and file.suffix in WRITTEN:
            yield file.relative_to(root), file.read_text(encoding="utf-8")


def addresses(root):
    # Every address of the project outside pyproject.toml: where it stands, and the repository or the site.
    return [
        (path, found[1] or found[2])
        for path, text in texts(root)
        if path.name != "pyproject.toml"
        for found in ADDRESS.finditer(text)
    ]


def home(root):
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]
    repository, site = (urls[name].partition("//")[2].rstrip("/") for name in ("Repository", "Homepage"))
    assert all(url.partition("//")[2].startswith((repository, site)) for url in urls.values())
    return {repository.partition("/")[2], site}


def test_every_address_is_the_one_of_project_urls():
    found = addresses(ROOT)
    assert len(found) > 10
    assert [one for one in found if one[1] not in home(ROOT)] == []


def test_addresses_into_the_repository_and_the_site_name_files_that_exist():
    repository, site = sorted(home(ROOT), key=len)
    files = re.compile(
        rf"(?:github\.com/{repository}/(?:blob|tree|raw)|githubusercontent\.com/{repository})/main/([\w./-]+)"
    )
    pages = re.compile(rf"{re.escape(site)}/([\w/-]+)\.html")
    found = [(path, name) for path, text in texts(ROOT) for name in files.findall(text)]
    found += [
        (path, "compat_matrix/matrix.html" if name == "matrix" else f"docs/{name}.md")
        for path, text in texts(ROOT)
        for name in pages.findall(text)
    ]
    assert len(found) > 10
    assert [one for one in found if not (ROOT / one[1].rstrip(".")).exists()] == []


def test_readme_has_absolute_links_and_pictures_only():
    # PyPI shows README too, and resolves no relative address. An anchor of README itself works in both places.
    targets = re.findall(r"\]\(([^)\s]+)", README) + re.findall(r"\b(?:href|src|srcset)=[\"']([^\"']+)", README)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_no_owner_is_left_open():
    assert [path for path, text in texts(ROOT) if "OWNER" + "/" in text] == []


def test_the_line_that_moves_the_project_moves_every_address(tmp_path):
    for path, text in texts(ROOT):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    line = (ROOT / "docs" / "releasing.md").read_text().split("```sh\n")[1].split("```")[0]
    script = f"set -e\ngit init -q . && git add -A\n{line}"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    owner = "someone"
    assert home(tmp_path) == {f"{owner}/fa2patch", f"{owner}.github.io/fa2patch"}
    assert {where for _, where in addresses(tmp_path)} == home(tmp_path)
    assert len(addresses(tmp_path)) == len(addresses(ROOT))
    recipe = (tmp_path / ".conda" / "recipe.yaml").read_text()
    assert "pypi.org/packages/source/f/fa2patch/fa2patch-$" in recipe, "this is not the repository"


RECIPE = yaml.safe_load(re.sub(r"\$\{\{.*?\}\}", "X", (ROOT / ".conda" / "recipe.yaml").read_text()))
CONDA_NAMES = {"torch": "pytorch"}


def conda(requirement):
    parsed = Requirement(requirement)
    return f"{CONDA_NAMES.get(parsed.name, parsed.name)} {parsed.specifier}".strip()


def test_the_conda_recipe_is_what_pyproject_says():
    python = f"python {PROJECT['requires-python']}"
    assert set(RECIPE["requirements"]["run"]) == {python, *map(conda, PROJECT["dependencies"])}
    assert set(RECIPE["requirements"]["host"]) == {python, "pip", "hatchling"}
    (cli,) = (test["requirements"]["run"] for test in RECIPE["tests"] if "requirements" in test)
    assert cli == list(map(conda, PROJECT["optional-dependencies"]["cli"]))
    assert RECIPE["context"]["version"] == fa2patch.__version__
    assert RECIPE["build"]["python"]["entry_points"] == [f"{n} = {at}" for n, at in PROJECT["scripts"].items()]
    about = RECIPE["about"]
    assert (about["summary"], about["license"]) == (PROJECT["description"], PROJECT["license"])
    assert {about["homepage"], about["repository"], about["documentation"]} <= set(PROJECT["urls"].values())


def ci(name, root, *arguments):
    done = subprocess.run(["bash", str(root / ".ci" / name), *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr


def test_only_a_tag_of_this_version_with_a_dated_section_may_be_released(tmp_path):
    for name in (".ci/tag", "fa2patch/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    version = fa2patch.__version__
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"# Changelog\n\n## {version} (unreleased)\n")
    code, said = ci("tag", tmp_path, f"v{version}")
    assert code == 1 and f"## {version} (YYYY-MM-DD)" in said and "(unreleased)" in said
    changelog.write_text(f"# Changelog\n\n## {version} (2026-12-01)\n\n## 0.0.1 (2026-01-01)\n")
    assert ci("tag", tmp_path, f"v{version}") == (0, "")
    code, said = ci("tag", tmp_path, "v0.0.1")
    assert code == 1 and f"expected the tag v{version}" in said


def test_the_changelog_has_a_section_for_this_version():
    assert re.search(rf"^## {re.escape(fa2patch.__version__)} \(", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_what_is_supported_is_said_as_it_is():
    page = (ROOT / "docs" / "releasing.md").read_text()
    blocks = tomllib.loads((ROOT / "compat_matrix" / "versions.toml").read_text())["version"]
    minors = [tuple(map(int, name.split(".")[:2])) for name in blocks if re.fullmatch(r"[\d.]+", name)]
    oldest, newest = (".".join(map(str, minor)) for minor in (min(minors), max(minors)))
    torch = next(Requirement(one).specifier for one in PROJECT["dependencies"] if one.startswith("torch"))
    pythons = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    said = (
        f"supports Transformers {oldest} to {newest}, torch {str(torch)[2:]} and later, and Python {pythons[0]} to "
        f"{pythons[-1]}."
    )
    assert said in " ".join(page.split())
    assert PROJECT["requires-python"] == f">={pythons[0]}"
