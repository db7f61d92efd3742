"""Catch what a step logs, microbatch by microbatch, to log it once per step and on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.patching import replace
from lightning_hybrid.step.absent import MARK, is_absent

_NUMBER = object()


@dataclass
class Entry:
    """One call of ``self.log`` over all microbatches.

    Attributes:
        name: The logged key.
        metric: The Metric object logged, if it was one; its value is that of the step.
        other: What was logged, if it was no number at all, which is for an overridden ``log`` to understand.
        value: Which value of the step it is, if it is one.
        kwargs: The other arguments of the call, those of the last microbatch.
        values: By microbatch; NaN where the value lives on another rank.
        sizes: The ``batch_size`` given, by microbatch.
        dtype: Of the logged tensor, at least torch's default; numbers get the default, as Lightning gives them.
    """

    name: str
    metric: Metric | None
    kwargs: dict[str, Any]
    values: list[float]
    sizes: list[int | None]
    dtype: torch.dtype = torch.float32
    other: Any = _NUMBER
    value: int | None = None

    @property
    def is_number(self) -> bool:
        """Whether it was a number, or a Metric with one."""
        return self.other is _NUMBER

    @property
    def how(self) -> str:
        """Name of the reduction: "mean", "sum", "max", "min", or that of the user's function."""
        how = self.kwargs.get("reduce_fx", "mean")
        name = how if isinstance(how, str) else getattr(how, "__name__", "")
        return "mean" if name == "avg" else name

    def combine(self, values: Sequence[float], weights: Sequence[float]) -> float:
        """The value of the whole step out of those of its microbatches, as ``reduce_fx`` says."""
        if self.how == "mean":
            return sum(value * weight for value, weight in zip(values, weights, strict=True))
        plain: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
        if self.how in plain:
            return float(plain[self.how](values))
        return float(self.kwargs["reduce_fx"](torch.tensor(list(values), dtype=torch.float64)))

    def combine_known(self, weights: Sequence[float]) -> float:
        """As ``combine``, of the microbatches that have logged it; the values of others are NaN."""
        known = [place for place, value in enumerate(self.values) if not math.isnan(value)] or range(len(self.values))
        total = sum(weights[place] for place in known) or 1.0
        shares = weights if len(known) == len(weights) else [weights[place] / total for place in known]
        return self.combine([self.values[place] for place in known], shares)

    def with_values(self, values: list[float], sizes: list[int | None]) -> Entry:
        """The same call over other microbatches."""
        return dataclasses.replace(self, values=values, sizes=sizes)

    def total_kwargs(self) -> dict[str, Any]:
        """Arguments for the one call that stands for all: the batch sizes are summed."""
        known = [size for size in self.sizes if size is not None]
        return {**self.kwargs, "batch_size": sum(known)} if known else self.kwargs


# Key, what was logged if it is not a number, number, other arguments, dtype, which value of the step it is.
_Call = tuple[str, Any, float, dict[str, Any], torch.dtype, int | None]


class LogCapture:
    """Takes the place of ``LightningModule.log`` while stages run."""

    def __init__(self, num_microbatches: int) -> None:
        """Args: num_microbatches: how often the step runs."""
        self._count = num_microbatches
        self._calls: dict[int, list[_Call]] = {}

    def microbatch(self, root: nn.Module, index: int) -> AbstractContextManager[None]:
        """Catch what one run of the step logs; a further run (another stage of this rank) adds what it knows."""
        return _Catching(self._calls, root, index)

    def known_entries(self) -> list[Entry]:
        """One entry per key and call, where some microbatches need not have logged it: their values are NaN."""
        found: dict[tuple[str, int], Entry] = {}
        for index in range(self._count):
            seen: dict[str, int] = {}
            for name, what, value, kwargs, dtype, place in self._calls.get(index, []):
                number = seen[name] = seen.get(name, -1) + 1
                metric, other = (what, _NUMBER) if isinstance(what, Metric) else (None, what)
                if (name, number) not in found:
                    nothing: list[int | None] = [None] * self._count
                    found[name, number] = Entry(name, metric, kwargs, [math.nan] * self._count, nothing, dtype, other)
                entry = found[name, number]
                entry.kwargs, entry.values[index], entry.sizes[index] = kwargs, value, kwargs.get("batch_size")
                entry.value = place
        return list(found.values())

    def entries(self) -> list[Entry]:
        """One entry per call, in the order of the calls.

        Raises:
            ValueError: The microbatches did not log the same keys.
        """
        rows = [self._calls.get(index, []) for index in range(self._count)]
        names = [[name for name, *_ in row] for row in rows]
        if any(other != names[0] for other in names):
            raise ValueError(f"the microbatches of one step log different keys: {names}; log the same in each")
        return [
            Entry(
                name=columns[-1][0],
                metric=columns[-1][1] if isinstance(columns[-1][1], Metric) else None,
                kwargs=columns[-1][3],
                values=[column[2] for column in columns],
                sizes=[column[3].get("batch_size") for column in columns],
                dtype=columns[-1][4],
                other=_NUMBER if isinstance(columns[-1][1], Metric) else columns[-1][1],
                value=columns[0][5] if all(column[5] == columns[0][5] for column in columns) else None,
            )
            for columns in zip(*rows, strict=True)
        ]


class _Catching(AbstractContextManager[None]):
    """Takes the place of ``root.log``. A class, not a generator: it is entered before every forward."""

    def __init__(self, rows: dict[int, list[_Call]], root: nn.Module, index: int) -> None:
        self._rows, self._root, self._index = rows, root, index
        self._calls: list[_Call] = []

    def __enter__(self) -> None:
        self._undo = replace(self._root, "log", self._log)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._undo()
        if error is None:
            calls, earlier = self._calls, self._rows.get(self._index)
            if earlier is not None and len(earlier) == len(calls):
                calls = [new if not math.isnan(new[2]) else old for old, new in zip(earlier, calls, strict=True)]
            self._rows[self._index] = calls

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        kwargs.update(zip(names, args, strict=False))
        with torch._C.DisableTorchFunction():  # reading a value to log is no part of the step
            number = _number(name, value)
            what = value if number is None or isinstance(value, Metric) else _NUMBER
            _, index = getattr(value, MARK, None) or (None, None)
            self._calls.append((name, what, math.nan if number is None else number, kwargs, _dtype(value), index))


def _dtype(value: Any) -> torch.dtype:
    default = torch.get_default_dtype()
    return torch.promote_types(value.dtype, default) if isinstance(value, Tensor) else default


def _number(name: str, value: Any) -> float | None:
    """What is logged as a number; NaN if it lives elsewhere, None if it is none."""
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
