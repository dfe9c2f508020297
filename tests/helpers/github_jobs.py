"""Runs a job of a GitHub workflow on this machine, in a fresh clone with nothing installed.

Scripts are run as GitHub runs them: by ``bash -e`` with pipefail, with the variables of workflow, job and step. The
actions that this project uses are replaced by what they leave behind: a clone, a Python, uv, a folder of artifacts.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import yaml

ROOT = Path(__file__).parents[2]
# Variables that a step gets from this process, and the beginnings of others.
KEPT, PASSED_ON = ("LANG", "TERM", "TMPDIR"), ("PIP_", "UV_", "SSL_")

# uv finds these Pythons here. It downloads others, as it does on GitHub.
PYTHONS = sorted(Path.home().glob(".pyenv/versions/*/bin"))


class StepFailed(AssertionError):
    # A script exits with another code than 0. The message has the end of what it printed.
    pass


@dataclass
class Machine:
    """A machine for one job."""

    folder: Path  # empty at first
    artifacts: Path  # the folder that artifacts are uploaded to and downloaded from
    values: dict[str, str] = field(default_factory=dict)  # what expressions such as ``inputs.model`` stand for
    # They replace those of the workflow. None removes one.
    variables: dict[str, str | None] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # names of steps that are left out
    prepare: Callable[[Path], object] = Path.resolve  # changes the clone before the first script
    tools: list[Path] = field(default_factory=list)  # folders of the programs that actions have installed

    def run(self, workflow: str, job: str) -> list[str]:
        # Returns the names of the steps that were left out, or have a condition. An expression that is not in
        # ``values``, or an unknown action, is a KeyError.
        spec = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8"))
        settings = spec["jobs"][job]
        for name in ("home", "temporary", "workspace"):
            (self.folder / name).mkdir(parents=True)
        left_out = []
        for step in settings["steps"]:
            if step.get("if", "always()") != "always()" or step.get("name") in self.without:
                left_out.append(step["name"])
            elif "uses" in step:
                self._action(step["uses"].partition("@")[0], step.get("with", {}))
            else:
                given = {**spec.get("env", {}), **settings.get("env", {}), **step.get("env", {})}
                self._script(step, given)
        return left_out

    def filled(self, text: Any) -> str:
        return re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: self.values[found[1]], str(text))

    @property
    def _workspace(self) -> Path:
        return self.folder / "workspace"

    def _script(self, step: dict[str, Any], given: dict[str, Any]) -> None:
        variables = {**self._bare(), **{name: self.filled(value) for name, value in given.items()}}
        for name, value in self.variables.items():
            variables.pop(name, None)
            variables.update({} if value is None else {name: value})
        file = self.folder / "step.sh"
        file.write_text(self.filled(step["run"]), encoding="utf-8")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)],
            cwd=self._workspace,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise StepFailed(f"{step.get('name', step['run'])}: exit code {done.returncode}\n{_end(done.stdout)}")

    def _bare(self) -> dict[str, str]:
        # GitHub's variables, and those by which pip and uv find packages here.
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(PASSED_ON)}
        if "PIP_FIND_LINKS" in kept:
            kept["UV_FIND_LINKS"] = kept["PIP_FIND_LINKS"]
        return {
            **kept,
            "UV_CACHE_DIR": str(self.artifacts.parent / "uv"),
            "PIP_CACHE_DIR": str(self.artifacts.parent / "pip"),
            "HOME": str(self.folder / "home"),
            "PATH": ":".join(map(str, [*self.tools, f"{sys.base_prefix}/bin", "/usr/bin", "/bin", *PYTHONS])),
            "GITHUB_WORKSPACE": str(self._workspace),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary.md"),
            "GITHUB_REF_NAME": self.values.get("github.ref_name", "main"),
            "RUNNER_TEMP": str(self.folder / "temporary"),
        }

    def _action(self, name: str, given: dict[str, Any]) -> None:
        actions = {
            "actions/checkout": self._checkout,
            "actions/setup-python": self._python,
            "astral-sh/setup-uv": self._uv,
            "actions/upload-artifact": self._upload,
            "actions/upload-pages-artifact": self._upload,
            "actions/download-artifact": self._download,
        }
        actions[name](given)

    def _checkout(self, given: dict[str, Any]) -> None:
        target = self._workspace / given.get("path", ".")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)
        self.prepare(target)

    def _python(self, given: dict[str, Any]) -> None:
        # It has pip and nothing else.
        home = self.folder / "python"
        subprocess.run([str(Path(sys.base_prefix) / "bin" / "python3"), "-m", "venv", str(home)], check=True)
        self.tools.append(home / "bin")

    def _uv(self, given: dict[str, Any]) -> None:
        home = self.folder / "uv"
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        subprocess.run([str(home / "bin" / "pip"), "install", "-q", "uv"], check=True)
        alone = self.folder / "tools"  # uv without the Python beside it
        alone.mkdir()
        (alone / "uv").symlink_to(home / "bin" / "uv")
        self.tools.append(alone)

    def _upload(self, given: dict[str, Any]) -> None:
        target = self.artifacts / self.filled(given.get("name", "github-pages"))
        target.mkdir(parents=True, exist_ok=True)
        for pattern in self.filled(given["path"]).split():
            found = glob.glob(str(self._workspace / pattern))
            if not found:
                raise StepFailed(f"nothing to upload at {pattern}")
            for file in map(Path, found):
                copy = shutil.copytree if file.is_dir() else shutil.copy
                copy(str(file), str(target / file.name))

    def _download(self, given: dict[str, Any]) -> None:
        target = self._workspace / given["path"]
        for folder in self.artifacts.glob(given.get("pattern") or given["name"]):
            shutil.copytree(folder, target, dirs_exist_ok=True)


def _end(printed: str) -> str:
    # The lines with a warning or an error, and the last ones.
    lines = printed.splitlines()
    told = [line for line in lines[:-40] if re.search(r"warning|error", line, re.IGNORECASE)]
    return "\n".join([*told[-20:], *lines[-40:]])
