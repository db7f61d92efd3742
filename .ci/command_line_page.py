"""Write the `--help` of every command, which shows an example, into docs/command_line.md.

PYTHONPATH=. python .ci/command_line_page.py
"""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from lightning_hybrid import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command_line.md"

# After such a line stands the help of one command, in a fenced block.
MARK = "<!-- help: {} -->"
# What the page says once: usage lines repeat the options, lists of commands the sections; every command has --help and
# exit statuses.
LEFT_OUT = (
    r"\Ausage: .*?\n\n",
    r"^  -h, --help +show this help message and exit\n",
    r"\n\nexit status:.*\Z",
    r" --module\.NAME VALUE and --data\.NAME VALUE are arguments.*?config file of LightningCLI\.",
    r"^positional arguments:\n  \{.*?\n\n",
    r"\noptions:\n(?=\n)",
)


class _ParserFound(Exception):
    """Carries the parser of the command out of its `main`."""


def main_parser() -> argparse.ArgumentParser:
    """The parser of `lightning-hybrid`, with all its commands."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _ParserFound(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            cli.main([])
        except _ParserFound as found:
            return found.args[0]
    raise AssertionError("the command parsed nothing")


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its commands, outer ones first."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from commands(command)


def shown_help(parser: argparse.ArgumentParser) -> str:
    """The help of a command without what the page says once."""
    shown = parser.format_help().strip()
    assert "example:" in shown, f"the help of {parser.prog} shows no example"
    for pattern in LEFT_OUT:
        shown = re.sub(pattern, "", shown, flags=re.DOTALL | re.MULTILINE)
    return shown.strip()


def page() -> str:
    """The text of the page, in which the help of each command is that of today."""
    text = PAGE.read_text()
    with mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"):
        for parser in commands(main_parser()):
            mark, shown = MARK.format(parser.prog), shown_help(parser)
            assert text.count(mark) == 1, f"{PAGE.name} needs one line {mark}"
            before, _, after = text.partition(mark)
            after = re.sub(r"\A\n\n```text\n.*?\n```\n", "", after, flags=re.DOTALL)
            text = f"{before}{mark}\n\n```text\n{shown}\n```\n{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
