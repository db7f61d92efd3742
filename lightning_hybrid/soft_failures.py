"""The one place that all tables, pictures, estimates and monitors go through: one that fails ends no run.

Only what a rank does by itself goes through it. A rank that leaves a collective out would let the others wait for ever,
so ranks exchange a row in any case, and that of one that failed says so.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()


@contextmanager
def only_informs(what: str) -> Iterator[None]:
    """Context, or decorator, of code whose result only informs: an error in it is a warning, and the run goes on.

    Args:
        what: The subject of the warning, such as "the start table".
    """
    try:
        yield
    except Exception as error:
        note_failure(what, error)


def note_failure(what: str, error: Exception) -> None:
    """Warn of an error, once in a process; its traceback goes to the log, at the level of debugging."""
    text = f"{type(error).__name__}: {error}"
    if (what, text) in _warned:
        return
    _warned.add((what, text))
    _log.debug("%s failed", what, exc_info=error)
    # The place is in this package, whose warnings are printed without one.
    warnings.warn(f"{what} failed, and the run goes on without: {text}", stacklevel=1)
