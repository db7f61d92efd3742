"""Which lines of code call which functions of torch while a unit runs: two runs that agree in it branch alike."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch.overrides import TorchFunctionMode

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
