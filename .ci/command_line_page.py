"""Write docs/reference/command_line.md: every command with its `--help` and an example.

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

# Examples of the commands whose `--help` shows none.
EXAMPLES = {
    "lightning-hybrid": "lightning-hybrid --version",
    "lightning-hybrid verify": "lightning-hybrid verify examples/digits.py:ResNet --data examples/digits.py:Digits "
    "--data.batch_size 16 --module.channels 8 --layout pp=2",
    "lightning-hybrid checkpoint": "lightning-hybrid checkpoint inspect model.ckpt",
    "lightning-hybrid checkpoint convert": "lightning-hybrid checkpoint convert model.ckpt one.ckpt",
    "lightning-hybrid checkpoint inspect": "lightning-hybrid checkpoint inspect model.ckpt",
    "lightning-hybrid checkpoint verify": "lightning-hybrid checkpoint verify model.ckpt",
}


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
    """The text of the page.

    Raises:
        KeyError: A command has no example.
    """
    sections = [HEAD]
    with mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"):
        for parser in commands(main_parser()):
            text = parser.format_help().strip()
            example = "" if "example:" in text else f"\nExample:\n\n```console\n$ {EXAMPLES[parser.prog]}\n```\n"
            sections.append(f"## `{parser.prog}`\n\n```text\n{text}\n```\n{example}")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
