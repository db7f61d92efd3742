"""The command ``lightning-hybrid explain-error world-size``: the entry of the documentation that a message names."""

from __future__ import annotations

import argparse
import difflib
import re
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, UsageError, add_command, print_json

_EXAMPLE = """example:
  lightning-hybrid explain-error world-size

exit status: 0 ok; 2 there is no such entry"""


def add_to(commands: Any) -> None:
    """Add the subcommand to the subparsers of argparse."""
    parser = add_command(
        commands,
        "explain-error",
        run,
        text="what an error means, and what to do",
        description="Prints the cause of an error and what to do: the entry that a note below the message names.",
        example=_EXAMPLE,
    )
    parser.add_argument("name", nargs="+", help="of the entry, or any words of the message")


def run(parsed: argparse.Namespace) -> int:
    """Print the entries, and return the exit status."""
    found = find(" ".join(parsed.name))
    if parsed.json:
        print_json(found)
    else:
        print("\n\n".join(f"{name}\n  {text}" for name, text in found.items()))
    return OK


def find(wanted: str) -> dict[str, str]:
    """Return the entry of a name, or those that have the words, as text by name.

    Raises:
        UsageError: There is none; names the nearest.
    """
    entries = _entries((Path(__file__).parents[1] / "errors.md").read_text(encoding="utf-8"))
    name = wanted.rpartition("#")[2]
    found = {name: entries[name]} if name in entries else {}
    found = found or {name: text for name, text in entries.items() if wanted.lower() in text.lower()}
    if not found:
        near = difflib.get_close_matches(name, entries, n=5, cutoff=0.4)
        raise UsageError(f"no error is named {wanted!r}{'; the nearest are ' if near else ''}{', '.join(near)}")
    return found


def _entries(page: str) -> dict[str, str]:
    """Return the text of each entry of the page, without marks of Markdown."""
    found = re.findall(r'^- <a id="([\w-]+)"></a>(.*)$', page, re.MULTILINE)
    return {name: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "") for name, text in found}
