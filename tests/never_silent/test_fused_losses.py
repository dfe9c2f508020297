"""Liger, cut-cross-entropy and TRL's fused head, with the real packages: each check is right or refused."""

import json
import subprocess
import sys

import pytest

from compat_matrix.ecosystem import stacks

STACKS = {name: stack for name, stack in stacks.stacks().items() if stack.checks}


@pytest.mark.slow
@pytest.mark.parametrize("name, check", [(name, check) for name, stack in STACKS.items() for check in stack.checks])
def test_a_loss_of_another_package_is_right_or_refused(name, check, tmp_path):
    command = [sys.executable, "-m", "compat_matrix.ecosystem", "--stacks", name, "--checks", check]
    done = subprocess.run([*command, "--evidence", str(tmp_path)], capture_output=True, text=True, timeout=1800)
    file = tmp_path / f"{name}.json"
    assert file.exists(), done.stderr[-3000:]
    finding = json.loads(file.read_text(encoding="utf-8"))["checks"][check]
    assert finding["ok"] and finding["cases"], finding


def test_every_check_of_a_stack_is_there():
    from compat_matrix.ecosystem.checks import NAMED

    assert {check for stack in STACKS.values() for check in stack.checks} == {*NAMED}
