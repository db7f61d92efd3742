"""Log entries: one per key and call of ``self.log`` in a step, with a value for each microbatch; their reduction."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hybrid import patching
from lightning_hybrid.batch.merge import REDUCTIONS, Argument, Leaf
from lightning_hybrid.host_copies import HostReads, is_plain
from lightning_hybrid.step.standins.marks import mark_in_any_run
from lightning_hybrid.step.standins.numbers import ABSENT, is_known
from lightning_hybrid.step.standins.tensors import is_absent
from lightning_hybrid.text import contrasted

NUMBER = object()  # in place of a logged object, where a number was logged

Key: TypeAlias = tuple[str, int]  # the logged name, and how often the step has logged it before
NumberKey: TypeAlias = Key | Argument | Leaf  # of a number that is logged, given to a metric, or left otherwise


def keys_of(names: Iterable[str]) -> Iterator[Key]:
    """The keys of the names that one run of a step logs, in the order of its calls."""
    times: Counter[str] = Counter()
    for name in names:
        yield name, times[name]
        times[name] += 1


@dataclass
class Entry:
    """One call of ``self.log`` over all microbatches."""

    name: str  # the logged key
    metric: Metric | None  # the Metric object logged, if it was one; its value is that of the step
    kwargs: dict[str, Any]  # the other arguments of the call, those of the last microbatch
    values: list[float]  # by microbatch; ``ABSENT`` where the value is on another rank, or was not logged
    sizes: list[int | None]  # the ``batch_size`` argument, by microbatch
    # the dtype of the logged tensor, at least torch's default; numbers have the default, as in Lightning
    dtype: torch.dtype = torch.float32
    # by microbatch, a Python number computed from a recorded size, which another rank may know exactly; ``ABSENT``
    # otherwise
    guesses: list[float] = field(default_factory=list)
    other: Any = NUMBER  # the logged object, if it is no number at all; an overridden ``log`` may accept it
    value: int | None = None  # index of the logged value in the step graph, if it is one
    origin: Any = None  # the call of a metric that has returned the logged value, if one has
    is_python: bool = False  # whether a Python number was logged
    is_integer: bool = False  # whether an integer tensor was logged: a count
    is_bool: bool = False  # whether a tensor of bool was logged, which has no mean

    @property
    def is_number(self) -> bool:
        """Whether it was a number, or a Metric with one."""
        return self.other is NUMBER

    @property
    def is_plain(self) -> bool:
        """Whether it was a number from outside of the step's graph, and no metric's value."""
        return self.is_number and self.value is None and self.metric is None and self.origin is None

    @property
    def how(self) -> str:
        """Name of the reduction: "mean", "sum", "max", "min", or the name of the user's function."""
        how = self.kwargs.get("reduce_fx", "mean")
        name = how if isinstance(how, str) else getattr(how, "__name__", "")
        return "mean" if name == "avg" else name

    def combine(self, weights: Sequence[float], counts: Sequence[int | None], over: str = "") -> float:
        """The value of the batch, from the microbatches' values; ``reduce_fx`` then reduces over batches and replicas.

        ``over`` is how the value depends on the samples, where it is known: "sum", "max", "min", "mean".
        """
        logged: Sequence[int] = [index for index, value in enumerate(self.values) if is_known(value)]
        logged = logged or range(len(self.values))
        # A mean over no element weighs nothing; another NaN is a number like others, which no maximum may hide.
        logged = [index for index in logged if weights[index] or not math.isnan(self.values[index])] or logged
        values = [self.values[index] for index in logged]
        if (diverged := next(filter(math.isnan, values), None)) is not None:
            return diverged
        is_whole = all(float(value).is_integer() for value in values)
        if is_whole and over in ("max", "min") and self.how in REDUCTIONS and self.how != over:
            over = ""  # measured by chance: a count of rows, say, which depends on the mean over the batch
        is_of_metric = self.metric is not None or self.origin is not None  # then each is that of the batch already
        if (
            not is_of_metric
            and over != "mean"
            and (how := over or self._known_reduction([counts[index] for index in logged], values))
        ):
            return float(REDUCTIONS[how](values))
        total = 1.0 if len(logged) == len(weights) else sum(weights[index] for index in logged) or 1.0
        return sum(value * (weights[index] / total) for value, index in zip(values, logged, strict=True))

    def _known_reduction(self, counts: Sequence[int | None], values: Sequence[float]) -> str:
        """How a number that no analysis has explained depends on the samples; "" for a mean."""
        if self.is_integer or self.is_bool:
            return "sum" if self.is_integer else "max"
        # What no analysis has explained is taken for what its reduction makes: `x.max().item()` with "max".
        by_name = self.how if self.value is None and self.how in ("sum", "max", "min") else ""
        if not self.is_python:
            return by_name
        pairs = [(value, count or 0) for value, count in zip(values, counts, strict=True)]
        is_count = all(value == count or (count > 1 and value % count == 0) for value, count in pairs)
        if self.how == "sum" and values[0] and is_count:  # samples or tokens; a logged epoch is none
            return "sum"
        return "max" if len(set(values)) == 1 else by_name

    def set_value(self, value: float) -> None:
        """Let every microbatch have the value of the batch."""
        self.values = [value] * len(self.values)

    def with_values(self, values: list[float], sizes: list[int | None]) -> Entry:
        """A copy of the entry with the values and sizes of other microbatches."""
        return replace(self, values=values, sizes=sizes)

    def reduce_sizes(self, how: str) -> None:
        """Combine the batch sizes of the microbatches where they are known to be no sum: a constant is equal in all."""
        sizes = [size for size in self.sizes if size is not None]
        if sizes and how not in ("", "sum"):
            self.sizes = [REDUCTIONS.get(how, max)(sizes)]

    def total_kwargs(self) -> dict[str, Any]:
        """Arguments of one ``log`` call for all microbatches: the batch sizes are summed."""
        sizes = [size for size in self.sizes if size is not None]
        return {**self.kwargs, "batch_size": sum(sizes)} if sizes else self.kwargs


def keyed(entries: Sequence[Entry]) -> Iterator[tuple[Key, Entry]]:
    """Entries of one step with their keys, in the order of its calls."""
    return zip(keys_of(entry.name for entry in entries), entries, strict=True)


def size_of(key: Key) -> Leaf:
    """The batch size that is given with a logged number."""
    return Leaf("logs with a batch_size", key[1], key[0])


def describe_unexplained(step: str, key: NumberKey, full: float, made: float, how: str) -> str:
    """The warning about a number, logged or given to a metric, that the numbers of its batch's parts do not give."""
    what, word = f"logs {key[0]!r}", {"max": "maximum", "min": "minimum"}.get(how, how)
    if isinstance(key, Argument):
        what = f"calls the metric {key.metric!r} with a number (argument {key.name})"
    of_batch, of_parts = contrasted(full, made)
    return (
        f"{step} {what}, which is {of_batch} for a batch and {of_parts} as the {word} over parts of it: no mean,"
        f" sum, maximum or minimum of the parts gives that of the batch. So the {word} over microbatches is taken."
        " Log means and sums over samples and torch functions of them under stages, or a metric of torchmetrics, whose"
        " values are those of the batch, or pass num_microbatches=1 (lightning-hybrid explain-error logged-number)"
    )


def describe_undecided(name: str) -> str:
    """The warning about a logged number that no batch has explained by its microbatches."""
    return (
        f"training_step logs {name!r}, which its microbatches gave in several ways in all batches that were compared"
        " (0, or true), and do not now: this number may be one microbatch's. The next batch shows how they make it"
        " (lightning-hybrid explain-error logged-undecided)"
    )


class LogCapture:
    """Replaces ``LightningModule.log`` while a step runs.

    Attributes:
        reads: What the host reads with the logged tensors.
    """

    def __init__(self, num_microbatches: int, has_guessed: Callable[[], bool] = bool) -> None:
        """Set up for so many runs of a step; ``has_guessed`` returns whether a number may come from a recorded size."""
        self.reads = HostReads()
        self._count, self._has_guessed = num_microbatches, has_guessed
        self._runs: dict[int, list[list[Entry]]] = {}  # by microbatch: the calls of its runs, entries of one value
        self._unread: list[tuple[Entry, int]] = []  # entries whose value is a tensor, with its number in `reads`

    def microbatch(
        self, root: nn.Module, index: int, origin: Callable[[Any], Any] = lambda value: None
    ) -> AbstractContextManager[None]:
        """Capture the calls of one run of the step; a second run (another stage of this rank) adds its values.

        ``origin`` returns the call of a metric that has returned a value.
        """
        return _CaptureContext(self, root, index, origin)

    def entries(self) -> list[Entry]:
        """One entry per key and call; values of microbatches that have not logged it are ``ABSENT``."""
        for entry, number in self._unread:
            entry.set_value(float(self.reads.take(number)))
        self._unread = []
        entries: dict[Key, Entry] = {}
        for index in range(self._count):
            for key, one in keyed(functools.reduce(_joined, self._runs.get(index, [[]]))):
                if key not in entries:
                    values, guesses = [ABSENT] * self._count, [ABSENT] * self._count
                    entries[key] = replace(one, values=values, guesses=guesses, sizes=[None] * self._count)
                entry = entries[key]
                entry.kwargs, entry.value, entry.origin = one.kwargs, one.value, one.origin or entry.origin
                entry.is_python, entry.is_integer, entry.is_bool = one.is_python, one.is_integer, one.is_bool
                entry.values[index], entry.guesses[index] = one.values[0], one.guesses[0]
                entry.sizes[index] = one.sizes[0]
        return list(entries.values())

    def entry(self, name: str, value: Any, kwargs: dict[str, Any], origin: Any) -> Entry:
        """One call in one microbatch; ``origin`` is the call of a metric that has returned the value, if one has."""
        is_tensor, metric = isinstance(value, Tensor), value if isinstance(value, Metric) else None
        number = _number(name, value)
        exact, guess = number if isinstance(number, float) else ABSENT, ABSENT
        if not is_tensor and metric is None and self._has_guessed():
            exact, guess = guess, exact
        made = Entry(
            *(name, metric, kwargs, [exact], [kwargs.get("batch_size")], _dtype(value), [guess]),
            other=value if number is None and metric is None else NUMBER,
            value=mark_in_any_run(value),
            origin=origin,
            is_python=not is_tensor and metric is None,
            is_integer=is_tensor and value.dtype is not torch.bool and not value.is_floating_point(),
            is_bool=is_tensor and value.dtype is torch.bool,
        )
        if isinstance(number, Tensor):
            self._unread.append((made, self.reads.add(number)))
        return made

    def add_run(self, index: int, calls: list[Entry]) -> None:
        """Add the calls of one run of a microbatch."""
        self._runs.setdefault(index, []).append(calls)


class _CaptureContext(AbstractContextManager[None]):
    """Replaces ``root.log``. A class, not a generator: it is entered before every forward."""

    def __init__(self, capture: LogCapture, root: nn.Module, index: int, origin: Callable[[Any], Any]) -> None:
        self._capture, self._root, self._index, self._origin = capture, root, index, origin
        self._calls: list[Entry] = []

    def __enter__(self) -> None:
        self._undo = patching.replace(self._root, "log", self._log, reason="captures logs of a microbatch")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._undo()
        if error is None:
            self._capture.add_run(self._index, self._calls)

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        kwargs.update(zip(names, args, strict=False))
        with torch._C.DisableTorchFunction():  # reading a value to log is no part of the step
            self._calls.append(self._capture.entry(name, value, kwargs, self._origin(value)))


def _joined(earlier: Sequence[Entry], calls: Sequence[Entry]) -> Sequence[Entry]:
    """The calls of two runs of a microbatch, with the values that either has."""
    if len(earlier) != len(calls):
        return calls
    pairs = zip(earlier, calls, strict=True)
    return [old if is_known(old.values[0]) and not is_known(new.values[0]) else new for old, new in pairs]


def _dtype(value: Any) -> torch.dtype:
    default = torch.get_default_dtype()
    return torch.promote_types(value.dtype, default) if isinstance(value, Tensor) else default


def _number(name: str, value: Any) -> float | Tensor | None:
    """The logged number; ``ABSENT`` if it is on another rank, None if it is none. A tensor is copied, and not read."""
    if isinstance(value, Metric):
        value = getattr(value, "_forward_cache", None)
        if value is None:
            return ABSENT
    if is_absent(value):
        return ABSENT
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"self.log({name!r}, ...) needs one number, but the tensor has shape {tuple(value.shape)}")
        can_wait = is_plain(value) and not torch._C._are_functorch_transforms_active()
        return value.detach().clone() if can_wait else float(value.detach())
    return float(value) if isinstance(value, Real) else None  # Lightning refuses arrays, also of one number
