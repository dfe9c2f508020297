"""Every fence of README and the documentation runs as it stands, with tiny models under the names that it loads."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from snippets import ROOT, Snippet, pages, snippets
from tiny_hub import make_data, make_models

import fa2patch
from compat_matrix.ecosystem.stacks import Stack, stacks

SNIPPETS = [snippet for page in pages() for snippet in snippets(page)]
# It is not installed here: the stand-in of compat_matrix computes it, in a process of its own.
APART = "flash-attn"

ON_A_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
# accelerate and DeepSpeed need this without a GPU. The first variable would switch DeepSpeed off.
DEEPSPEED_ON_A_CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def here(needs: tuple[str, ...]) -> bool:
    for one in map(Requirement, needs):
        if one.name == APART:
            continue
        try:
            if not one.specifier.contains(importlib.metadata.version(one.name), prereleases=True):
                return False
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


RUN = [snippet for snippet in SNIPPETS if not snippet.not_run and not snippet.file and here(snippet.needs)]


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    # The data that the pages load are in this folder. The models are added as they are needed.
    home = tmp_path_factory.mktemp("home")
    make_data(home)
    return home


@pytest.fixture
def names():
    # A kernel of a page keeps these names, and so its models, alive until they are cleared.
    names: dict[str, object] = {"__name__": "__main__"}
    yield names
    names.clear()


def _param(snippet: Snippet) -> Any:
    # A page's snippet is slow, because the pages have so many. README's are run on every change.
    marks = [] if snippet.name.startswith("README") else [pytest.mark.slow]
    return pytest.param(snippet, id=snippet.name, marks=marks)


@pytest.mark.parametrize("snippet", map(_param, RUN))
def test_runs(snippet: Snippet, home: Path, names, tmp_path, monkeypatch):
    make_models("".join([snippet.setup, snippet.code, *(code for _, code in snippet.files)]), home)
    for entry in home.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    for name, value in (DEEPSPEED_ON_A_CPU if "deepspeed" in snippet.needs else ON_A_CPU).items():
        monkeypatch.setenv(name, value)
    # TRL 1.x trains in bfloat16 by default, which Trainer accepts with a GPU, or on a CPU that was asked for.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True, raising=False)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # inductor: minutes
    if snippet.language == "console":
        for name, code in snippet.files:
            (tmp_path / name).write_text(code)
        run_commands(snippet, tmp_path)
    elif snippet.raises:
        with pytest.raises(getattr(fa2patch.errors, snippet.raises)):
            run_python(snippet, names)
    elif APART in snippet.needs:
        run_apart(snippet, tmp_path)
    else:
        run_python(snippet, names)
        check_trainer(names)


@pytest.mark.parametrize("needs", sorted({one.needs for one in SNIPPETS if one.needs and not one.not_run}), ids=str)
def test_needs_are_met_here_or_elsewhere(needs):
    # Otherwise no test would run the snippet: it needs this environment or a block of ecosystem/stacks.toml.
    asked = [one for one in map(Requirement, needs) if one.name != APART]
    found = map(packages, stacks().values())
    elsewhere = any(all(one.name in has and one.specifier.contains(has[one.name]) for one in asked) for has in found)
    assert elsewhere or here(needs)


def packages(stack: Stack) -> dict[str, str]:
    pins = [pin.partition("==") for pin in stack.environment.requirements]
    return {name: version for name, _, version in pins}


def run_python(snippet: Snippet, names: dict[str, object]) -> None:
    # The code keeps its page's line numbers, so that a traceback points into the page. What a comment behind a
    # ``print``, or in the line below it, says must be printed.
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", category=UserWarning, module=r"(?!__main__).*")
        exec(compile(snippet.setup, f"{snippet.page} (setup)", "exec"), names)
        exec(compile("\n" * (snippet.line - 1) + snippet.code, str(ROOT / snippet.page), "exec"), names)
    for said in re.findall(r"^ *print\(.*\)(?:  |\n)# (.+)$", snippet.code, re.M):
        assert said in printed.getvalue().splitlines(), f"prints not {said!r} but:\n{printed.getvalue()}"


def check_trainer(names: dict[str, object]) -> None:
    # A trainer of a page must isolate the documents of the batches that its own loader gives.
    trainer = names.get("trainer")
    batch = next(iter(trainer.get_train_dataloader())) if trainer is not None else {}
    if "position_ids" in batch:
        found = fa2patch.verify(trainer.model, batch=dict(batch), max_documents=2)
        assert len(found.documents) > 1, f"{sorted(batch)}: nothing is packed"


def run_apart(snippet: Snippet, folder: Path) -> None:
    # Another Python takes the stand-in for flash-attn.
    (folder / "snippet.py").write_text(snippet.setup + snippet.code)
    paths = [str(ROOT / "tests/helpers"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    run(
        [sys.executable, str(Path(__file__).with_name("with_flash_attn.py")), "snippet.py"],
        folder,
        variables,
        snippet.name,
    )


def run_commands(snippet: Snippet, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "COLUMNS": "100"}
    said = ""
    for command in snippet.commands:
        words = shlex.split(re.sub(r"^fa2patch\b", "python -m fa2patch", command))
        said += run([sys.executable if word == "python" else word for word in words], folder, variables, command)
    assert snippet.prints in said, said[-3000:]


def run(words: list[str], folder: Path, variables: dict[str, str], what: str) -> str:
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{what}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
