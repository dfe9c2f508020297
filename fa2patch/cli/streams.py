"""Standard output as it is found: in another encoding, closed, or on a full disk."""

from __future__ import annotations

import codecs
import io
import os
import sys

import click

# Where the encoding of stdout lacks a character that commands print, this stands for it. Others become a question mark.
PLAIN = {"…": "...", "█": "#", "•": "*", "→": "->", "µ": "u"}


def usable_streams() -> None:
    # Nobody wishes to read a closed stream, so what is written there is dropped.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # Python found the descriptor closed
            setattr(sys, name, _dropped())
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="fa2patch")


def _dropped() -> io.TextIOWrapper:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(PLAIN.get(character, "?") for character in lost), error.end


codecs.register_error("fa2patch", _in_plain_characters)


def cannot_write(error: OSError) -> None:
    # The process ends with one line about what could not be read or written.
    if error.errno is None:
        raise error
    what = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "the output"
    click.echo(f"Error: {what}: {os.strerror(error.errno)}", err=True)
    sys.stdout = _dropped()  # Python flushes it at the end, which would fail again
    sys.exit(2)
