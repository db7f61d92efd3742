"""A trace of which lines of code call which functions of torch while a unit runs."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.objects.source_folders import PACKAGE, TENSOR, TORCH

Step = tuple[Any, tuple[tuple[CodeType, int], ...]]


class CodePath(TorchFunctionMode):
    """Notes each function of torch that is called, and the lines that lead to it, from where the mode was entered.

    Attributes:
        steps: In the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._bottom: Any = None

    def __enter__(self) -> CodePath:
        super().__enter__()
        self._bottom = sys._getframe(1)
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lines = []
        frame: Any = sys._getframe(1)
        while frame is not None and frame is not self._bottom:
            lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self.steps.append((func, tuple(lines)))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._bottom = None
        super().__exit__(*error)


def is_of_user(frame: tuple[CodeType, int]) -> bool:
    """Whether code is neither torch's nor this package's."""
    return not frame[0].co_filename.startswith((TORCH, PACKAGE))


def calls_of(steps: Iterable[Step]) -> dict[int, str]:
    """The lines of user code from which torch is called, each as one number that is the same on every rank.

    Args:
        steps: What a ``CodePath`` has noted.
    """
    found = {}
    for function, frames in steps:
        if any(code.co_filename.startswith(TENSOR) for code, _ in frames):
            continue
        users = [frame for frame in frames if is_of_user(frame)]
        if users:
            called = getattr(function, "__name__", "") if frames[0] == users[0] else ""  # by the user, not by torch
            where = [(Path(code.co_filename).name, code.co_name, line) for code, line in users]
            found[zlib.crc32(repr((called, where)).encode())] = f"{users[0][0].co_filename}:{users[0][1]}"
    return found
