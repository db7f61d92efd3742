"""Capture of the ``self.log`` calls of each microbatch, as log entries of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.patching import replace
from lightning_hybrid.pipeline.results.log_entry import NUMBER, Entry, Key, keys_of
from lightning_hybrid.step.standins.tensors import MARK, is_absent


class _Call(NamedTuple):
    """One call of ``self.log`` in one microbatch; attributes as of an ``Entry``, for this microbatch.

    Attributes:
        what: The logged object, if it is not a number.
        node_value: Index of the logged value in the step graph.
        origin: The call of a metric that has returned it, if one has.
        is_python: Whether it was a Python number.
        is_integer: Whether it was an integer tensor.
    """

    name: str
    what: Any
    value: float
    kwargs: dict[str, Any]
    dtype: torch.dtype
    node_value: int | None
    guess: float
    origin: Any
    is_python: bool
    is_integer: bool


class LogCapture:
    """Replaces ``LightningModule.log`` while a step runs."""

    def __init__(self, num_microbatches: int, has_guessed: Callable[[], bool] = bool) -> None:
        """Set up for so many runs of a step; ``has_guessed`` returns whether a number may come from a recorded size."""
        self._count, self._has_guessed = num_microbatches, has_guessed
        self._calls: dict[int, list[_Call]] = {}

    def microbatch(
        self, root: nn.Module, index: int, origin: Callable[[Any], Any] = lambda value: None
    ) -> AbstractContextManager[None]:
        """Capture the calls of one run of the step; a second run (another stage of this rank) adds its values.

        ``origin`` returns the call of a metric that has returned a value.
        """
        return _CaptureContext(self._calls, root, index, self._has_guessed, origin)

    def entries(self) -> list[Entry]:
        """One entry per key and call; values of microbatches that have not logged it are NaN."""
        entries: dict[Key, Entry] = {}
        for index in range(self._count):
            calls = self._calls.get(index, [])
            for key, call in zip(keys_of(call.name for call in calls), calls, strict=True):
                what = call.what
                metric, other = (what, NUMBER) if isinstance(what, Metric) else (None, what)
                if key not in entries:
                    values, guesses = [math.nan] * self._count, [math.nan] * self._count
                    sizes: list[int | None] = [None] * self._count
                    entries[key] = Entry(call.name, metric, call.kwargs, values, sizes, call.dtype, guesses, other)
                entry = entries[key]
                entry.kwargs, entry.sizes[index] = call.kwargs, call.kwargs.get("batch_size")
                entry.values[index], entry.guesses[index] = call.value, call.guess
                entry.value, entry.origin = call.node_value, call.origin
                entry.is_python, entry.is_integer = call.is_python, call.is_integer
        return list(entries.values())


class _CaptureContext(AbstractContextManager[None]):
    """Replaces ``root.log``. A class, not a generator: it is entered before every forward."""

    def __init__(
        self,
        rows: dict[int, list[_Call]],
        root: nn.Module,
        index: int,
        has_guessed: Callable[[], bool],
        origin: Callable[[Any], Any],
    ) -> None:
        self._origin = origin
        self._rows, self._root, self._index, self._has_guessed = rows, root, index, has_guessed
        self._calls: list[_Call] = []

    def __enter__(self) -> None:
        self._undo = replace(self._root, "log", self._log, reason="captures logs of a microbatch")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._undo()
        if error is None:
            calls, earlier = self._calls, self._rows.get(self._index)
            if earlier is not None and len(earlier) == len(calls):
                pairs = zip(earlier, calls, strict=True)
                calls = [old if math.isnan(new.value) and not math.isnan(old.value) else new for old, new in pairs]
            self._rows[self._index] = calls

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        kwargs.update(zip(names, args, strict=False))
        with torch._C.DisableTorchFunction():  # reading a value to log is no part of the step
            number = _number(name, value)
            what = value if number is None or isinstance(value, Metric) else NUMBER
            _, index = getattr(value, MARK, None) or (None, None)
            exact, guess = math.nan if number is None else number, math.nan
            if not isinstance(value, Tensor | Metric) and self._has_guessed():
                exact, guess = guess, exact
            self._calls.append(
                _Call(name, what, exact, kwargs, _dtype(value), index, guess, self._origin(value), *_kind(value))
            )


def _kind(value: Any) -> tuple[bool, bool]:
    """Whether a logged value is a Python number, and whether it is an integer tensor."""
    is_tensor = isinstance(value, Tensor)
    return not is_tensor and not isinstance(value, Metric), is_tensor and not _is_real(value.dtype)


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dtype(value: Any) -> torch.dtype:
    default = torch.get_default_dtype()
    return torch.promote_types(value.dtype, default) if isinstance(value, Tensor) else default


def _number(name: str, value: Any) -> float | None:
    """The logged value as a number; NaN if it is on another rank, None if it is no number."""
    if isinstance(value, Metric):
        value = getattr(value, "_forward_cache", None)
        if value is None:
            return float("nan")
    if is_absent(value):
        return float("nan")
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"self.log({name!r}, ...) needs one number, but the tensor has shape {tuple(value.shape)}")
        return float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
