"""The command ``lightning-hybrid explain-error world-size``: the entry of the documentation that a message names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from lightning_hybrid.cli.command import OK, UsageError, add_command, print_json
from lightning_hybrid.text import meant

_LEAST_QUOTED = 10  # characters: shorter quotes are in messages of others
_EXAMPLE = """example:
  lightning-hybrid explain-error world-size
  lightning-hybrid explain-error "ValueError: Tried to step 9 times. The specified number of total steps is 8"

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
    page = (Path(__file__).parents[1] / "errors.md").read_text(encoding="utf-8")
    entries = _entries(page)
    name = wanted.rpartition("#")[2]
    found = {name: entries[name]} if name in entries else {}
    found = found or {name: text for name, text in entries.items() if wanted.lower() in text.lower()}
    found = found or {name: entries[name] for name in _quoted_in(page, wanted)}
    if not found:
        raise UsageError(f"no error is named {wanted!r}{meant(name, entries)}")
    return found


def _quoted_in(page: str, message: str) -> list[str]:
    """Return the entries that quote the most of a whole message, with its names and numbers where they have gaps."""
    sizes: dict[str, int] = {}
    for name, quotes in re.findall(r'^- <a id="([\w-]+)"></a>(.+?) \([^()]+\): ', page, re.MULTILINE):
        for quote in re.findall(r"`([^`]+)`", quotes):
            parts = [part for part in quote.split("...") if part.strip()]
            size = sum(map(len, parts))
            if size >= _LEAST_QUOTED and re.search(".*?".join(map(re.escape, parts)), message, re.DOTALL):
                sizes[name] = max(size, sizes.get(name, 0))
    return [name for name, size in sizes.items() if size == max(sizes.values())]


def _entries(page: str) -> dict[str, str]:
    """Return the text of each entry of the page, without marks of Markdown."""
    found = re.findall(r'^- <a id="([\w-]+)"></a>(.*)$', page, re.MULTILINE)
    return {name: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "") for name, text in found}
