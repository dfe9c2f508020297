"""The workflows name only modules, options, extras and files that exist, and ask for no unneeded rights."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from compat_matrix import environments

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
FILES = {file.stem: file for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
WORKFLOWS = {name: yaml.safe_load(file.read_text(encoding="utf-8")) for name, file in FILES.items()}
STEPS = [
    (f"{name}: {job}", step)
    for name, workflow in WORKFLOWS.items()
    for job, spec in workflow["jobs"].items()
    for step in spec["steps"]
]
SCRIPTS = [(where, re.sub(r"\$\{\{.*?\}\}", "X", step["run"])) for where, step in STEPS if "run" in step]
CALLS = [
    (where, module, line[match.end() :])
    for where, script in SCRIPTS
    for line in script.splitlines()
    for match in re.finditer(r"python3? -m (\S+)", line)
    for module in [match[1]]
]
OURS = [call for call in CALLS if call[1].startswith("compat_matrix")]
every_workflow = pytest.mark.parametrize("name", WORKFLOWS)

# What a job may do beyond reading. The tokens of the last two change what the public sees.
RIGHTS = {
    ("matrix", "report"): {"contents": "read", "issues": "write"},
    ("pages", "deploy"): {"pages": "write", "id-token": "write"},
    ("release", "publish"): {"id-token": "write"},
}

PUBLISHING = {"actions/download-artifact", "actions/deploy-pages", "pypa/gh-action-pypi-publish"}
# Actions whose major version is a branch instead of a tag.
BRANCHES = {"pypa/gh-action-pypi-publish@release/v1"}


def triggers(workflow):
    return workflow[True]  # YAML 1.1 reads the key "on" as a boolean


def options(text):
    return re.findall(r"(?<!\S)--[a-z][a-z-]*", text.split("|")[0].split(">")[0])


def test_the_workflows_are_there():
    assert set(WORKFLOWS) == {"tests", "matrix", "gpu", "packing-matrix", "pages", "release"}
    assert OURS and SCRIPTS


@every_workflow
def test_rights_are_few_and_actions_are_of_a_major_version(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    for where, step in STEPS:
        if where.startswith(f"{name}:") and step.get("uses", "") not in {"", *BRANCHES}:
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]), step["uses"]
            if "checkout" in step["uses"]:
                assert step["with"]["persist-credentials"] is False, where
    for job, settings in WORKFLOWS[name]["jobs"].items():
        assert settings["timeout-minutes"]
        assert settings.get("permissions", {}) == RIGHTS.get((name, job), {})


@pytest.mark.parametrize(("name", "job"), [where for where, rights in RIGHTS.items() if "id-token" in rights])
def test_a_job_that_publishes_runs_no_code_of_ours_and_needs_an_environment(name, job):
    settings = WORKFLOWS[name]["jobs"][job]
    assert {step.get("uses", "a script").partition("@")[0] for step in settings["steps"]} <= PUBLISHING
    assert settings["environment"]["name"] == {"pages": "github-pages", "release": "pypi"}[name]
    assert settings["needs"]


def test_what_is_released_was_checked_as_a_wheel_and_has_the_tags_version():
    release = WORKFLOWS["release"]
    assert triggers(release) == {"push": {"tags": ["v*"]}}
    assert release["jobs"]["publish"]["needs"] == ["build", "wheel"] and release["jobs"]["wheel"]["needs"] == "build"
    scripts = {where: [script for at, script in SCRIPTS if at == f"release: {where}"] for where in ("build", "wheel")}
    tag, *rest = scripts["build"]
    assert tag == 'bash .ci/tag "$GITHUB_REF_NAME"' and rest[-1].startswith("python -m twine check --strict")
    assert scripts["wheel"] == ["bash .ci/wheel dist/*.whl"]
    assert "bash .ci/wheel .dist/*.whl" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("name", ["pages", "release"])
def test_only_the_repositorys_own_pushes_publish(name):
    assert set(triggers(WORKFLOWS[name])) <= {"push", "workflow_dispatch"}


def test_the_docs_extra_has_what_conf_py_imports():
    conf = (ROOT / "docs" / "conf.py").read_text()
    extra = (ROOT / "pyproject.toml").read_text().split("\ndocs = [")[1].split("]")[0]
    named = {*re.findall(r'^    "(\w+)",$', conf, re.M), *re.findall(r'^html_theme = "(\w+)"', conf, re.M)}
    assert len(named) > 2 and {name.replace("_", "-") for name in named} <= {*re.findall(r'"([\w-]+)"', extra)}


def test_scripts_of_ours_exist():
    called = {file for _, script in SCRIPTS for file in re.findall(r"bash (\S+)", script)}
    assert called == {".ci/run", ".ci/tag", ".ci/wheel"} and all((ROOT / file).is_file() for file in called)


FORMS = {file.stem: yaml.safe_load(file.read_text()) for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")}


def test_issue_forms_ask_for_what_a_fault_is_found_with():
    assert set(FORMS) == {"config", "wrong_number", "refused", "other"}
    for name, form in FORMS.items():
        if name == "config":
            continue
        assert form["name"] and form["description"] and form["body"], name
        parts = {part["id"]: part for part in form["body"] if part["type"] != "markdown"}
        assert len(parts) == len(form["body"]) and {"doctor", "config"} <= {*parts}, name
        assert parts["doctor"]["attributes"]["label"] == "fa2patch doctor --json"
        asked = {part for part in parts if parts[part].get("validations", {}).get("required")}
        assert asked >= ({"doctor", "config"} if name != "other" else {"what"}), name


@every_workflow
def test_what_is_somebody_elses_word_reaches_no_script_as_text(name):
    for where, step in STEPS:
        if where.startswith(f"{name}:"):
            assert "${{" not in step.get("run", ""), f"{where}: hand it over in env"


@pytest.mark.parametrize(("where", "module", "rest"), CALLS)
def test_modules_exist(where, module, rest):
    if module not in ("venv", "build", "twine", "sphinx"):  # in the extras dev and docs
        assert importlib.util.find_spec(module), where


@pytest.mark.parametrize(("where", "module", "rest"), OURS)
def test_our_modules_have_these_options(where, module, rest):
    spec = importlib.util.find_spec(module)
    file = Path(spec.origin)
    source = (file.parent / "__main__.py" if file.name == "__init__.py" else file).read_text(encoding="utf-8")
    for option in options(rest):
        assert f'"{option}"' in source, f"{where}: {module} has no {option}"
    for command in re.findall(r"^ (\w+)", rest):
        assert f'"{command}"' in source, f"{where}: {module} has no {command}"


def test_the_command_line_has_these_options():
    pytest.importorskip("click")
    from fa2patch.cli.commands import main

    found = 0
    for where, script in SCRIPTS:
        if "fa2patch" in script and " matrix " in script:
            known = {name for parameter in main.get_command(None, "matrix").params for name in parameter.opts} | {
                "--help"
            }
            named = re.findall(r"options\+?=\((.*)\)", script) + re.findall(r"fa2patch\"? matrix (.*)", script)
            assert {option for text in named for option in options(text)} <= known, where
            found += 1
    assert found == 2


def test_extras_and_files_exist():
    extras = re.findall(
        r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text().split("optional-dependencies]")[1], re.M
    )
    for where, script in SCRIPTS:
        for extra in re.findall(r"\[(\w+)\]\"", script):
            assert extra in extras, f"{where}: no extra {extra}"
        for file in re.findall(r"pip install .*-c (\S+)", script):
            assert (ROOT / file).exists(), f"{where}: no file {file}"
    for where, step in STEPS:
        for key in ("cache-dependency-path", "cache-dependency-glob"):
            for file in str(step.get("with", {}).get(key, "")).split():
                assert (ROOT / file.replace(".fa2patch/", "")).exists(), f"{where}: no file {file}"


def test_the_tests_are_the_readmes():
    readme = (ROOT / "README.md").read_text()
    command = next(line.strip() for line in readme.splitlines() if "-m pytest" in line and "-m venv" in line)
    assert any(script.strip() == command for where, script in SCRIPTS if where == "tests: tests")
    assert {"push", "pull_request"} <= {*triggers(WORKFLOWS["tests"])}
    assert WORKFLOWS["tests"]["jobs"]["tests"]["strategy"]["matrix"]["python"] == [
        "3.9",
        "3.10",
        "3.11",
        "3.12",
        "3.13",
    ]


def test_only_what_comes_next_may_fail():
    check = WORKFLOWS["matrix"]["jobs"]["check"]
    assert check["strategy"]["fail-fast"] is False
    may_fail = " || ".join(f"matrix.version == '{name}'" for name in environments.NEXT)
    assert check["continue-on-error"] == f"${{{{ {may_fail} }}}}"


def test_the_reusable_workflow_takes_what_its_page_says():
    inputs = triggers(WORKFLOWS["packing-matrix"])["workflow_call"]["inputs"]
    page = (ROOT / "compat_matrix" / "README.md").read_text()
    text = FILES["packing-matrix"].read_text()
    for name in inputs:
        assert f"`{name}`" in page and f"inputs.{name}" in text, name
    example = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    (job,) = example["jobs"].values()
    assert set(job["with"]) <= set(inputs)
    assert {name for name, settings in inputs.items() if settings.get("required")} <= set(job["with"])
    assert job["uses"].split("@")[0].endswith("/.github/workflows/packing-matrix.yml")


def test_scripts_are_words_that_a_shell_can_read():
    for where, script in SCRIPTS:
        for line in script.splitlines():
            shlex.split(line.partition("  #")[0]), where
