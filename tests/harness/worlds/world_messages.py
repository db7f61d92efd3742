"""Messages between the two sides of a world.

Free of torch: pytest itself imports this file, and starts fast for tests without ranks.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# A rank that is stopped inside a task writes its stack first. Lightning installs no handler for this signal.
STOP_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Task:
    """One call on every rank of a world.

    Attributes:
        number: counts the tasks of the world, from 0.
        module_name: pytest's name of the function's module.
        module_path: its file.
        call: the pickled function, its positional and its keyword arguments.
        main_port: a free port on loopback, for code that opens its own store.
        capture: whether to write the task's output to a file instead of showing it.
    """

    number: int
    module_name: str
    module_path: str
    call: bytes
    main_port: int
    capture: bool


@dataclass(frozen=True)
class Idle:
    """All ranks have reported: the process group of the last task can be destroyed."""


@dataclass(frozen=True)
class Stop:
    """End the process."""


@dataclass(frozen=True)
class Report:
    """The outcome of a task on one rank: a pickled result, or the error text."""

    outcome: Literal["passed", "skipped", "failed"]
    result: bytes = b""
    text: str = ""


def output_path(folder: str, rank: int) -> Path:
    """The file with the output of a rank's current task."""
    return Path(folder) / f"output-{rank}"


def stack_path(folder: str, rank: int) -> Path:
    """Where a rank of a world writes its stack when it is stopped."""
    return Path(folder) / f"stack-{rank}"
