"""The names under which steps log plain numbers, and no metric of torchmetrics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torchmetrics import Metric

from lightning_hybrid.patching import around


@contextlib.contextmanager
def record_logged_numbers(module: Any, names: set[str]) -> Iterator[None]:
    """Context of a step; ``names`` receives the names of the numbers that it logs."""

    def log(original: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, Metric):
            names.add(name)
        return original(name, value, *args, **kwargs)

    undo = around(module, "log", log, reason="the reference")
    try:
        yield
    finally:
        undo()
