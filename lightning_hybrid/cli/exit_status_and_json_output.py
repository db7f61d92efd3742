"""The exit statuses of every subcommand, the error of an invalid command line, and output as JSON."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

OK, PROBLEM, USAGE, REFUSED = 0, 1, 2, 3

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
