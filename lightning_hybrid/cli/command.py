"""What every subcommand has: its parser, exit statuses, the error of an invalid command line, files, JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OK, PROBLEM, USAGE, REFUSED = 0, 1, 2, 3
_LARGEST_COUNT = 1_000_000_000
READER_ENDED = 141  # what a shell gives for a process that is ended by SIGPIPE

EXIT_STATUSES = """exit status: 0 ok; 1 numbers differ, or a problem was found; 2 invalid command line;
3 a layout or a step is refused. An error in your own code gives its traceback and 1"""


# What Lightning takes; named here since an import of it takes seconds.
PRECISIONS = (
    "32-true", "32", "bf16-mixed", "bf16", "16-mixed", "16", "bf16-true", "16-true", "64-true", "64",
    "transformer-engine", "transformer-engine-float16",
)  # fmt: skip


class UsageError(Exception):
    """The command line is invalid."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turn the ValueErrors of code that parses arguments into a ``UsageError``."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int] | None,
    *,
    text: str,
    description: str,
    example: str,
    json: str = "print JSON",
) -> argparse.ArgumentParser:
    """Add a subcommand that ``run`` carries out, or that has subcommands of its own, to the subparsers of argparse."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if run is not None:
        parser.add_argument("--json", action="store_true", help=json)
        parser.set_defaults(run=run)
    return parser


def check_counts(parsed: argparse.Namespace, *names: str) -> None:
    """Refuse arguments that are below 1, or larger than any count, where they are given."""
    for name in names:
        value = getattr(parsed, name)
        if value is not None and not 1 <= value <= _LARGEST_COUNT:
            range_ = "1 or more" if value < 1 else f"{_LARGEST_COUNT:,} at most"
            raise UsageError(f"--{name.replace('_', '-')} {value}; use {range_}")


def write_text(path: Path, text: str, flag: str) -> None:
    """Write the file that a flag names."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {error}") from error


def print_json(content: Any) -> None:
    """Print an object of plain values as JSON; numbers that are not finite become text, such as "nan"."""
    print(json.dumps(_finite(content), indent=2, allow_nan=False))


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content
