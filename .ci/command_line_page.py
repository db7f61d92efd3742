"""Write docs/reference/command_line.md: every command with its `--help`, which shows an example.

PYTHONPATH=. python .ci/command_line_page.py
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from lightning_hybrid import cli

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command_line.md"

HEAD = """\
# Command line

Installing the package installs the command `lightning-hybrid`; `python -m lightning_hybrid.cli` is the same. Written by
`python .ci/command_line_page.py` from the output of `--help`; a test fails if a command or an option is missing.
More about two of them: [verify your module](../verify.md), [checkpoints](../checkpoints.md#on-the-command-line).
"""


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


def page() -> str:
    """The text of the page."""
    sections = [HEAD]
    with mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"):
        for parser in commands(main_parser()):
            text = parser.format_help().strip()
            assert "example:" in text, f"the help of {parser.prog} shows no example"
            sections.append(f"## `{parser.prog}`\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
