"""What Python prints of an error that ends a run: the frames of the user's code, on the rank that failed.

Between the user's ``fit`` and the user's step lie a hundred frames of Lightning, torch and this package. They are shown
where they are the news: an error that this package did not raise on purpose, and in Python's development mode.
"""

from __future__ import annotations

import contextlib
import linecache
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning
import torch

_OWN = str(Path(__file__).resolve().parents[2])
# By which this package runs operations of the user, and the backward of them.
_OPERATIONS = "func(", "run_backward("
_LINE = "_hybrid3d_line"  # in an error: what is printed of it, "" for frames, and after how many seconds
# "<string>" has the methods that dataclasses write.
_LIBRARIES = ("<string>", contextlib.__file__, _OWN, *lightning.__path__, *torch.__path__)


def shorten(error: BaseException, line: str = "", *, seconds: float = 0) -> None:
    """Let Python print an error that nothing catches by frames of the user's code.

    Args:
        error: The error, which is not changed.
        line: What is printed instead, where given.
        seconds: Time before the line, for another rank to print what the line refers to.
    """
    if sys.flags.dev_mode:
        return
    error.__dict__[_LINE] = line, seconds
    if not isinstance(sys.excepthook, Shortening):
        sys.excepthook = Shortening(sys.excepthook)


class Shortening:
    """Prints errors as the hook ``before`` does, but briefly if this package refuses something, or by `shorten`."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        """Print an error that nothing has caught."""
        line, seconds = vars(error).get(_LINE, (None, 0))
        if line:
            time.sleep(seconds)
            # In one call: ranks share the terminal, and print would write the newline in a second one.
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        else:
            is_shortened = line is not None or any(_is_refusal(frame) for frame in [*_frames(frames)][-1:])
            self.before(kind, error, trim(error).__traceback__ if is_shortened else frames)


def is_of_library(file: str) -> bool:
    """Whether a file belongs to Lightning, torch or this package."""
    return file.startswith(_LIBRARIES)


def trim(error: BaseException) -> BaseException:
    """Leave only frames of the user's code in an error's traceback, and an operation of another library that failed."""
    frames = list(_frames(error.__traceback__))
    if frames and not _is_unexpected(frames[-1]):
        kept = [each for each in frames if not _is_of_library(each)]
        if frames[-1] not in kept and not (_is_raise(frames[-1]) or _is_operation(frames[-1])):
            kept.append(frames[-1])
        trace = None
        for each in reversed(kept):
            trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
        error.__traceback__ = trace
    if error.__context__ is not None:
        trim(error.__context__)
    return error


def _is_unexpected(last: TracebackType) -> bool:
    """Whether an error comes from this package, and neither on purpose nor from an operation of the user."""
    return _file(last).startswith(_OWN) and not (_is_raise(last) or _is_operation(last))


def _is_refusal(last: TracebackType) -> bool:
    """Whether this package raises an error on purpose; its message says more than the line that raises it."""
    return _file(last).startswith(_OWN) and _is_raise(last)


def _is_raise(frame: TracebackType) -> bool:
    return linecache.getline(_file(frame), frame.tb_lineno).lstrip().startswith("raise")


def _is_operation(frame: TracebackType) -> bool:
    return any(call in linecache.getline(_file(frame), frame.tb_lineno) for call in _OPERATIONS)


def _is_of_library(frame: TracebackType) -> bool:
    is_program = _file(frame) == "<string>" and frame.tb_frame.f_globals.get("__name__") == "__main__"  # python -c
    return is_of_library(_file(frame)) and not is_program


def _frames(frames: TracebackType | None) -> Iterator[TracebackType]:
    while frames is not None:
        yield frames
        frames = frames.tb_next


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
