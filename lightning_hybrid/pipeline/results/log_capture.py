"""A capture of ``self.log`` calls, microbatch by microbatch, logged once per step and on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid.patching import replace
from lightning_hybrid.step.standins.absent_tensors import MARK, is_absent

_NUMBER = object()


Key: TypeAlias = tuple[str, int]  # what was logged, and how often the step has logged that name before


def keys_of(names: Iterable[str]) -> Iterator[Key]:
    """The keys of the names that one run of a step logs, in the order of its calls."""
    times: Counter[str] = Counter()
    for name in names:
        yield name, times[name]
        times[name] += 1


@dataclass
class Entry:
    """One call of ``self.log`` over all microbatches.

    Attributes:
        name: The logged key.
        metric: The Metric object logged, if it was one; its value is that of the step.
        guesses: By microbatch, a number of Python's that this rank logs where another may know better; NaN otherwise.
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
    guesses: list[float] = dataclasses.field(default_factory=list)
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

    def combine(self, weights: Sequence[float]) -> float:
        """The value of the whole step, as ``reduce_fx`` says, of the microbatches that have logged it.

        Args:
            weights: Of all microbatches; the values of those that have not logged it are NaN.
        """
        known = [place for place, value in enumerate(self.values) if not math.isnan(value)] or range(len(self.values))
        values = [self.values[place] for place in known]
        if self.how == "mean":
            total = 1.0 if len(known) == len(weights) else sum(weights[place] for place in known) or 1.0
            return sum(value * (weights[place] / total) for value, place in zip(values, known, strict=True))
        plain: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
        if self.how in plain:
            return float(plain[self.how](values))
        return float(self.kwargs["reduce_fx"](torch.tensor(values, dtype=torch.float64)))

    def with_values(self, values: list[float], sizes: list[int | None]) -> Entry:
        """The same call over other microbatches."""
        return dataclasses.replace(self, values=values, sizes=sizes)

    def total_kwargs(self) -> dict[str, Any]:
        """Arguments for the one call that stands for all: the batch sizes are summed."""
        known = [size for size in self.sizes if size is not None]
        return {**self.kwargs, "batch_size": sum(known)} if known else self.kwargs


def keyed(entries: Sequence[Entry]) -> Iterator[tuple[Key, Entry]]:
    """Entries of one step with their keys, in the order of its calls."""
    return zip(keys_of(entry.name for entry in entries), entries, strict=True)


class _Call(NamedTuple):
    """One call of ``self.log`` in one microbatch; attributes as of an ``Entry``, for this microbatch.

    Attributes:
        what: What was logged, if it is not a number.
        place: Which value of the step it is.
    """

    name: str
    what: Any
    value: float
    kwargs: dict[str, Any]
    dtype: torch.dtype
    place: int | None
    guess: float


class LogCapture:
    """Takes the place of ``LightningModule.log`` while stages run."""

    def __init__(self, num_microbatches: int, has_guessed: Callable[[], bool] = bool) -> None:
        """Args: num_microbatches: how often the step runs. has_guessed: whether a number may be made of a guess now."""
        self._count, self._has_guessed = num_microbatches, has_guessed
        self._calls: dict[int, list[_Call]] = {}

    def microbatch(self, root: nn.Module, index: int) -> AbstractContextManager[None]:
        """Catch what one run of the step logs; a further run (another stage of this rank) adds what it knows."""
        return _Catching(self._calls, root, index, self._has_guessed)

    def entries(self) -> list[Entry]:
        """One entry per key and call, where some microbatches need not have logged it: their values are NaN."""
        found: dict[Key, Entry] = {}
        for index in range(self._count):
            calls = self._calls.get(index, [])
            for key, call in zip(keys_of(call.name for call in calls), calls, strict=True):
                what = call.what
                metric, other = (what, _NUMBER) if isinstance(what, Metric) else (None, what)
                if key not in found:
                    values, guesses = [math.nan] * self._count, [math.nan] * self._count
                    sizes: list[int | None] = [None] * self._count
                    found[key] = Entry(call.name, metric, call.kwargs, values, sizes, call.dtype, guesses, other)
                entry = found[key]
                entry.kwargs, entry.sizes[index] = call.kwargs, call.kwargs.get("batch_size")
                entry.values[index], entry.guesses[index] = call.value, call.guess
                entry.value = call.place
        return list(found.values())


class _Catching(AbstractContextManager[None]):
    """Takes the place of ``root.log``. A class, not a generator: it is entered before every forward."""

    def __init__(
        self, rows: dict[int, list[_Call]], root: nn.Module, index: int, has_guessed: Callable[[], bool]
    ) -> None:
        self._rows, self._root, self._index, self._has_guessed = rows, root, index, has_guessed
        self._calls: list[_Call] = []

    def __enter__(self) -> None:
        self._undo = replace(self._root, "log", self._log)

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
            what = value if number is None or isinstance(value, Metric) else _NUMBER
            _, index = getattr(value, MARK, None) or (None, None)
            known, guess = math.nan if number is None else number, math.nan
            if not isinstance(value, Tensor | Metric) and self._has_guessed():
                known, guess = guess, known
            self._calls.append(_Call(name, what, known, kwargs, _dtype(value), index, guess))


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
