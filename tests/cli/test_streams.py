"""Standard output and the terminal as a newcomer may have them: no command ends in a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from command_line import output, run

from fa2patch.cli import doctor

LINES = [
    ("kernels",),
    ("kernels", "--json"),
    ("architectures",),
    ("plan", "LENGTHS", "--max-tokens", "200"),
    ("--help",),
]
every_command = pytest.mark.parametrize("line", LINES, ids=" ".join)


@pytest.fixture
def shell(tmp_path):
    (tmp_path / "lengths.txt").write_text("5 6 7 100")

    def started(line, redirected="", **variables):
        line = [str(tmp_path / "lengths.txt") if word == "LENGTHS" else word for word in line]
        command = ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "fa2patch", *line]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, **variables}
        return subprocess.run(command, capture_output=True, env=environment)

    return started


@every_command
def test_an_encoding_that_lacks_characters(shell, line):
    done = shell(line, PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and done.stdout, done.stderr


def test_bars_are_drawn_in_plain_characters(shell):
    assert b"#" * 13 in shell(LINES[3], PYTHONIOENCODING="latin-1").stdout


@every_command
def test_a_closed_stdout(shell, line):
    done = shell(line, ">&-")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is full")
@every_command
def test_a_full_disk(shell, line):
    done = shell(line, "> /dev/full")
    assert (done.returncode, done.stderr) == (2, b"Error: the output: No space left on device\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is full")
def test_a_file_that_cannot_be_written(monkeypatch):
    found = {"ok": True, "packages": {}, "kernels": [], "python": "", "platform": "", "torch": "", "gpus": []}
    tried = dict.fromkeys(("alone", "alone_without_cache", "patched"), {"state": "isolated"})
    found |= {**tried, "seam": "", "why": "", "known": None, "defects": [], "advice": []}
    monkeypatch.setattr(doctor, "diagnose", lambda doing: found)
    result = run("doctor", "--svg", "/dev/full")
    assert result.exit_code == 2 and "/dev/full cannot be written: No space left" in result.output


@pytest.mark.parametrize("columns", ["abc", "0", "-5", ""])
def test_a_width_that_is_no_number(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", "120")
    expected = output("kernels")
    monkeypatch.setenv("COLUMNS", columns)
    assert output("kernels") == expected


def test_a_narrow_terminal_gets_a_list(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = [line.rstrip() for line in output("kernels").splitlines()]
    assert "flash_attn" in lines and "  what: FlashAttention 2" in lines and max(map(len, lines)) <= 40


def test_doctor_says_what_it_does(monkeypatch):
    said = []
    monkeypatch.setattr(doctor, "_with_tiny_llama", lambda: {"patched": {"state": "isolated"}, "alone": {"state": ""},
                                                             "alone_without_cache": {"state": ""}})  # fmt: skip
    doctor.diagnose(said.append)
    assert len(said) == 2 and "importing" in said[0] and "tiny Llama" in said[1]
