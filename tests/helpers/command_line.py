"""Commands of ``fa2patch``, run in this process."""

import json

from click.testing import CliRunner

from fa2patch.cli.commands import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def output(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(said):
    # click before 8.2 puts stderr in front of the JSON.
    return json.loads(said[said.index("{") : said.rindex("}") + 1])


def on_one_line(said):
    return " ".join(said.split())
