"""The newest release is that of versions.toml's last block. This keeps the texts that say it: ``--write``, ``--check``.

Commands take ``--versions newest``, Python has ``environments.newest()``, and a shell has the line that this prints.
Only texts that people read name the number.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from .. import environments

# how texts say which releases are supported
_RANGE = re.compile(r"(\b4\.34 to )\d+\.\d+\b")

# The line of tests/constraints.txt with what the tests run with. A comment behind it says why it is held back.
_PIN = re.compile(r'(?m)^(transformers==)[\d.]+(; python_version >= "3\.11")$')


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m compat_matrix.follow.newest", description=__doc__)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--write", action="store_true", help="write it into README, docs and tests/constraints.txt")
    how.add_argument("--check", action="store_true", help="fail if one of them says another release")
    given = parser.parse_args(arguments)
    stale = {file: new for file, old, new in texts(environments.HERE.parent) if old != new}
    for file, text in stale.items():
        if given.write:
            file.write_text(text, encoding="utf-8")
        if given.check:
            print(f"{file} does not say the newest release. Run python -m compat_matrix.follow.newest --write")
    if not given.check:
        print(environments.newest().transformers)
    return int(given.check and bool(stale))


def texts(root: Path) -> Iterator[tuple[Path, str, str]]:
    # Each text is yielded as its file, what it says, and what it should say.
    release = environments.newest().transformers
    minor = ".".join(release.split(".")[:2])
    for file in (root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "tests" / "constraints.txt"):
        old = file.read_text(encoding="utf-8")
        new = _RANGE.sub(rf"\g<1>{minor}", old)
        yield file, old, _PIN.sub(rf"\g<1>{release}\g<2>", new) if file.suffix == ".txt" else new


if __name__ == "__main__":
    sys.exit(main())
