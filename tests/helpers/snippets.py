"""The code of README and the documentation, as tests run it.

A fence of Python is run by itself, in a folder of its own. An HTML comment, which readers do not see, says what else a
fence needs:

- ``<!-- setup`` ... ``-->`` holds code that runs before every later fence of its page, and replaces the one before it;
- ``<!-- keep -->`` before a fence: later fences of its page start with it, as the page says to its readers;
- ``<!-- needs: trl>=0.12, trl<0.20 -->`` before a fence: it is for environments that have these packages;
- ``<!-- file: train.py -->`` before a fence: it is written to this file, and a later ``console`` fence runs it;
- ``<!-- raises: PackedWithCache -->`` before a fence: it ends in this error;
- ``<!-- prints: 2 processes -->`` before a console fence: its commands' output holds this;
- ``<!-- not run: why -->`` before a fence: it is not run.

In a ``console`` fence, lines that start with ``$`` are commands. ``pip`` commands are not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PART = re.compile(
    r"^<!-- (?P<word>setup|keep|needs|file|raises|prints|not run)(?::? ?)(?P<said>.*?)-->$"
    r"|^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Snippet:
    page: str  # relative to the repository
    line: int  # the number of its first line of code
    language: str  # ``python`` or ``console``
    code: str
    setup: str  # the code that runs before it
    needs: tuple[str, ...]  # the requirements of its environment, such as ``trl<0.20``
    raises: str  # the name of the error in which it ends, or nothing
    prints: str  # what the output of its commands holds, or nothing
    not_run: str  # the reason, or nothing
    file: str  # the name of the file that it is written to, or nothing
    files: tuple[tuple[str, str], ...]  # the files that a console fence's page has written before it: (name, text)

    @property
    def name(self) -> str:
        # It is the name of its test.
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        # Commands of pip are left out.
        lines = re.sub(r"\\\n\s*", "", self.code).splitlines()
        found = [line[1:].strip() for line in lines if line.startswith("$")]
        return [command for command in found if not re.match(r"(uv )?pip |git |python3? -m venv", command)]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    found: list[Snippet] = []
    setup, said, files = "", {}, ()  # type: str, dict[str, str], tuple[tuple[str, str], ...]
    for part in _PART.finditer(text):
        if part["word"] == "setup":
            setup = part["said"].strip() + "\n"
        elif part["word"]:
            said[part["word"]] = part["said"].strip()
        elif part["language"] in ("python", "console"):
            code = re.sub(rf"^{part['indent']}", "", part["code"], flags=re.M)
            file = said.get("file", "")
            found.append(
                Snippet(
                    str(page.relative_to(ROOT)),
                    text.count("\n", 0, part.start("code")) + 1,
                    part["language"],
                    code,
                    setup,
                    tuple(one.strip() for one in said.get("needs", "").split(",") if one.strip()),
                    said.get("raises", ""),
                    said.get("prints", ""),
                    said.get("not run", ""),
                    file,
                    files,
                )
            )
            if "keep" in said:
                setup += code
            if file:
                files = (*files, (file, code))
            said = {}
        else:
            said = {}
    return found
