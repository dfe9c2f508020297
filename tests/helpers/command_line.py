"""Commands of ``fa2patch``, run in this process."""

import json

from click.testing import CliRunner

from fa2patch.cli.commands import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def output(*arguments):
    """Return what a command says that exits with 0."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(said):
    """Return the JSON in the output. click before 8.2 puts stderr in front of it."""
    return json.loads(said[said.index("{") : said.rindex("}") + 1])


def on_one_line(said):
    return " ".join(said.split())
