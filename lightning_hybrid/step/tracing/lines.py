"""A trace of the torch functions that a unit calls, with the source lines that call them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

from lightning_hybrid.step.objects.names import EXPERT_RANKS, PACKAGE, TENSOR, TORCH

TorchCall = tuple[Any, tuple[tuple[CodeType, int], ...]]


class TorchCallSites(TorchFunctionMode):
    """Records each call of a torch function, with the stack of lines down to where the mode was entered.

    Attributes:
        calls: The calls in order: function, and its frames from the innermost outwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TorchCall] = []
        self._entry_frame: Any = None

    def __enter__(self) -> TorchCallSites:
        super().__enter__()
        self._entry_frame = sys._getframe(1)
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lines = []
        frame: Any = sys._getframe(1)
        while frame is not None and frame is not self._entry_frame:
            lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        self.calls.append((func, tuple(lines)))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        self._entry_frame = None
        super().__exit__(*error)


def is_user_frame(frame: tuple[CodeType, int]) -> bool:
    """Whether a frame belongs neither to torch nor to this package."""
    return not frame[0].co_filename.startswith((TORCH, PACKAGE))


def user_call_sites(calls: Iterable[TorchCall]) -> dict[int, str]:
    """Maps a hash of each stack of user lines that calls torch, equal on every rank, to its ``file:line``."""
    found = {}
    for function, frames in calls:
        if any(code.co_filename.startswith(TENSOR) for code, _ in frames):
            continue
        users = [frame for frame in frames if is_user_frame(frame)]
        inner = frames[: frames.index(users[0])] if users else ()
        if any(code.co_filename.startswith(EXPERT_RANKS) for code, _ in inner):  # around experts, whose own code counts
            continue
        if users:
            # By the user, not by torch; function modes of this package may lie between.
            is_direct = all(code.co_filename.startswith(PACKAGE) for code, _ in inner)
            called = getattr(function, "__name__", "") if is_direct else ""
            where = [(Path(code.co_filename).name, code.co_name, line) for code, line in users]
            found[zlib.crc32(repr((called, where)).encode())] = f"{users[0][0].co_filename}:{users[0][1]}"
    return found
