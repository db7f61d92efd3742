"""Log entries: one per key and call of ``self.log`` in a step, with a value for each microbatch; their reduction."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torchmetrics import Metric

NUMBER = object()  # in place of a logged object, where a number was logged

Key: TypeAlias = tuple[str, int]  # the logged name, and how often the step has logged it before


def keys_of(names: Iterable[str]) -> Iterator[Key]:
    """The keys of the names that one run of a step logs, in the order of its calls."""
    times: Counter[str] = Counter()
    for name in names:
        yield name, times[name]
        times[name] += 1


class MeasuredLogs(Protocol):
    """What a comparison of a batch with its parts has found of logged keys; attributes as of ``LossWeighting``."""

    @property
    def keys(self) -> frozenset[Key]:
        """Keys that weigh by samples."""

    @property
    def reductions(self) -> tuple[tuple[Key, str], ...]:
        """Keys that are known to be a mean, sum or extreme of those of parts."""

    @property
    def unexplained(self) -> tuple[tuple[Key, float, float], ...]:
        """Keys that are none of these."""


@dataclass
class Entry:
    """One call of ``self.log`` over all microbatches.

    Attributes:
        name: The logged key.
        metric: The Metric object logged, if it was one; its value is that of the step.
        guesses: By microbatch, a Python number computed from a recorded size, which another rank may know exactly; NaN
            otherwise.
        other: The logged object, if it is no number at all; an overridden ``log`` may accept it.
        value: Index of the logged value in the step graph, if it is one.
        kwargs: The other arguments of the call, those of the last microbatch.
        values: By microbatch; NaN where the value is on another rank.
        sizes: The ``batch_size`` argument, by microbatch.
        origin: The call of a metric that has returned the logged value, if one has.
        is_python: Whether a Python number was logged.
        is_integer: Whether an integer tensor was logged: a count.
        dtype: The dtype of the logged tensor, at least torch's default; numbers have the default, as in Lightning.
    """

    name: str
    metric: Metric | None
    kwargs: dict[str, Any]
    values: list[float]
    sizes: list[int | None]
    dtype: torch.dtype = torch.float32
    guesses: list[float] = dataclasses.field(default_factory=list)
    other: Any = NUMBER
    value: int | None = None
    origin: Any = None
    is_python: bool = False
    is_integer: bool = False

    @property
    def is_number(self) -> bool:
        """Whether it was a number, or a Metric with one."""
        return self.other is NUMBER

    @property
    def is_plain(self) -> bool:
        """Whether it was a number that is no value of the step's graph, nor that of a metric."""
        return self.is_number and self.value is None and self.metric is None and self.origin is None

    @property
    def how(self) -> str:
        """Name of the reduction: "mean", "sum", "max", "min", or that of the user's function."""
        how = self.kwargs.get("reduce_fx", "mean")
        name = how if isinstance(how, str) else getattr(how, "__name__", "")
        return "mean" if name == "avg" else name

    def combine(self, weights: Sequence[float], counts: Sequence[int | None], over: str = "") -> float:
        """The value of the batch, from those of the microbatches; ``reduce_fx`` then reduces over batches and replicas.

        Args:
            weights: Weights of all microbatches; the values of those that have not logged it are NaN.
            counts: Their numbers of samples.
            over: How the value depends on the samples, where it is known: "sum", "max", "min", "mean".
        """
        logged = [index for index, value in enumerate(self.values) if not math.isnan(value)] or range(len(self.values))
        values = [self.values[index] for index in logged]
        is_of_metric = self.metric is not None or self.origin is not None  # then each is that of the batch already
        if (
            not is_of_metric
            and over != "mean"
            and (how := over or self._known_reduction([counts[index] for index in logged], values))
        ):
            plain: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
            return float(plain[how](values))
        total = 1.0 if len(logged) == len(weights) else sum(weights[index] for index in logged) or 1.0
        return sum(value * (weights[index] / total) for value, index in zip(values, logged, strict=True))

    def _known_reduction(self, counts: Sequence[int | None], values: Sequence[float]) -> str:
        """How a number that no analysis has explained depends on the samples; "" for a mean."""
        if self.is_integer:
            return "sum"
        # What no analysis has explained is taken for what its reduction makes: `x.max().item()` with "max".
        by_name = self.how if self.value is None and self.how in ("sum", "max", "min") else ""
        if not self.is_python:
            return by_name
        pairs = [(value, count or 0) for value, count in zip(values, counts, strict=True)]
        is_count = all(value == count or (count > 1 and value % count == 0) for value, count in pairs)
        if self.how == "sum" and values[0] and is_count:  # samples or tokens; a logged epoch is none
            return "sum"
        return "max" if len(set(values)) == 1 else by_name

    def with_values(self, values: list[float], sizes: list[int | None]) -> Entry:
        """A copy of the entry with the values and sizes of other microbatches."""
        return dataclasses.replace(self, values=values, sizes=sizes)

    def total_kwargs(self) -> dict[str, Any]:
        """Arguments of one ``log`` call for all microbatches: the batch sizes are summed."""
        sizes = [size for size in self.sizes if size is not None]
        return {**self.kwargs, "batch_size": sum(sizes)} if sizes else self.kwargs


def keyed(entries: Sequence[Entry]) -> Iterator[tuple[Key, Entry]]:
    """Entries of one step with their keys, in the order of its calls."""
    return zip(keys_of(entry.name for entry in entries), entries, strict=True)


def describe_unexplained(step: str, key: Key, full: float, mean: float) -> str:
    """The warning about a logged number for which nothing gives that of a batch from those of its parts."""
    return (
        f"{step} logs {key[0]!r}, which is {full:.6g} for a batch and {mean:.6g} as the mean over parts of it: no mean,"
        " sum, maximum or minimum of the parts gives that of the batch. So a mean over microbatches is logged."
        " Log means and sums over samples and torch functions of them under stages, or a metric of torchmetrics, whose"
        " values are those of the batch, or pass num_microbatches=1 (docs/semantics/logging_and_metrics.md)"
    )
