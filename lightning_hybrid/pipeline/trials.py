"""Trials of evaluation steps: whether the microbatches of a batch give its numbers.

Some samples are run as one batch and as its halves, and all that a step leaves is compared: what it logs and returns,
what it stores on modules, and the states of metrics. A batch is split only where the two agree, and where that is no
coincidence: a whole number, such as a count of 0 or a largest length, may be the same in both by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hybrid.batch.denominators import Mean
from lightning_hybrid.batch.merge import Argument, Leaf
from lightning_hybrid.batch.split import BatchSplitter, batch_size_of, split
from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import PartitionError, StepError
from lightning_hybrid.pipeline.logs import Key, NumberKey, keyed, size_of
from lightning_hybrid.pipeline.measure import MOST_PARTS
from lightning_hybrid.pipeline.reductions import is_close, reductions_of
from lightning_hybrid.pipeline.runner import StepResult
from lightning_hybrid.pipeline.stages.traces import Call, Microbatches
from lightning_hybrid.pipeline.stored import is_value
from lightning_hybrid.step.objects.pytree import flatten
from lightning_hybrid.text import contrasted

# Trials have batch numbers of their own: random numbers depend on them.
_OTHER = 2**40


class Trial(NamedTuple):
    """A run of a step whose effects are undone."""

    result: StepResult
    arguments: Sequence[Mapping[Argument, float]]  # numbers that metrics of this rank were given, by microbatch
    stored: Mapping[str, Any]  # what it has stored on the modules of this rank, by place

    def sizes(self) -> dict[Leaf, list[int]]:
        """The batch sizes that are given with logged numbers, by microbatch."""
        sizes = {size_of(key): entry.sizes for key, entry in keyed([entry for entry, _ in self.result.logs])}
        return {key: given for key, each in sizes.items() if (given := [size for size in each if size is not None])}

    def totals(self, arguments: Iterable[Argument]) -> dict[Argument, float]:
        """The sums over microbatches of numbers that metrics were given; NaN where one has none."""
        return {key: sum(each.get(key, math.nan) for each in self.arguments) for key in arguments}

    def left(self) -> dict[str, Any]:
        """All values that the step leaves, by what it does with them."""
        logged = zip(keyed([entry for entry, _ in self.result.logs]), self.result.logs, strict=True)
        numbers = {key: n if entry.is_plain else torch.tensor(n) for (key, entry), (_, n) in logged if entry.is_number}
        returned = enumerate(flatten(self.result.output)[0])
        return {
            **{_logs(key): number for key, number in numbers.items()},
            **{f"returns a value (leaf {index})": leaf for index, leaf in returned if is_value(leaf)},
            **{f"stores {place}": leaf for place, leaf in self.stored.items()},
        }

    def doubtful(self, metrics: Collection[str], *, reads_content: bool) -> str:
        """Find a number that the trial leaves in doubt; "" if there is none.

        Numbers of Python are plain constants and sizes unless the step ``reads_content``; what ``metrics`` (FQNs) store
        follows from their arguments.
        """
        guessed = {_logs(key) for key in self.result.guessed if not isinstance(key, Argument)}
        for what, value in self.left().items():
            kind, _, place = what.partition(" self.")
            is_number = not isinstance(value, Tensor | numpy.ndarray) or value.ndim == 0
            if kind == "stores" and any(place.startswith(f"{fqn}.") for fqn in metrics):
                continue
            if what.startswith("logs") and what not in guessed:
                continue
            if is_number and (reads_content or isinstance(value, Tensor)) and not _is_telling(float(value)):
                return f"it {what}, which is {float(value):.6g} for some samples and may depend on them in several ways"
        return ""


class EvaluationTrials:
    """Tries each step of evaluation once, on the samples of two microbatches of its first batch."""

    def __init__(self, metrics: Collection[str], trial: Callable[[Call, int], Trial], group: dist.ProcessGroup) -> None:
        """Prepare for a module with these ``metrics`` (FQNs).

        ``trial`` runs a call in a number of microbatches, and undoes it; collective over the pipeline's ``group``.
        """
        self._metrics, self._trial, self._group = metrics, trial, group
        self._tried: dict[str, dict[NumberKey, str]] = {}
        self._stored: dict[str, Collection[str]] = {}  # where each step has stored something on modules of this rank

    def reductions(self, name: str) -> Mapping[NumberKey, str]:
        """How microbatches make batch sizes that a step logs, and numbers that it gives to metrics of this rank."""
        return self._tried.get(name, {})

    def stored(self, name: str) -> Collection[str]:
        """Where a step has stored something on modules of this rank, when it was tried."""
        return self._stored.get(name, ())

    def why_unsplit(
        self, call: Call, chosen: Microbatches, splitter: BatchSplitter | None, *, reads_content: bool
    ) -> str:
        """Why batches of a step must not be split, the same on every rank; "" if they may, or it was tried before."""
        if len(chosen) == 1 or call.name in self._tried:
            return ""
        self._tried[call.name] = {}
        some = split(chosen.batch, max(1, len(chosen) // 2), splitter)[0][0]
        first, second = (replace(call, batch=some, number=call.number - number) for number in (_OTHER, 2 * _OTHER))
        joint, halves = self._on_all_ranks(first, 1), self._on_all_ranks(first, 2)
        if joint is None or halves is None:
            return ""
        self._stored[call.name] = frozenset(joint.stored) | frozenset(halves.stored)
        is_rounded = any(value.dtype in ("float16", "bfloat16") for value in chosen.graph.values)
        rounding = torch.float16 if is_rounded else torch.float32
        self._tried[call.name], doubts = _measured(joint, halves, split(some, 2, splitter)[1], rounding)
        if self.first(str(self._tried[call.name] or "")):
            halves = self._on_all_ranks(first, 2) or halves
        if splitter is None:
            doubts = self._coincidence(first, joint) or doubts
        found = _differences(joint, halves, rounding)
        # Random numbers, or a clock: then nothing is known.
        if self.first("".join(found)) and (other := self._on_all_ranks(second, 1)) is not None:
            found = {what: text for what, text in found.items() if what not in _differences(joint, other, rounding)}
        doubt = doubts or halves.doubtful(self._metrics, reads_content=reads_content)
        return self.first(next(iter(found.values()), doubt))

    def _coincidence(self, call: Call, joint: Trial) -> str:
        """A doubt about whole numbers given to metrics that are sums over halves, and not over samples, by chance."""
        measured = self._tried[call.name].items()
        sums = joint.totals([key for key, how in measured if isinstance(key, Argument) and how == "sum"])
        whole = {key: number for key, number in sums.items() if not _is_telling(number)}
        size = min(batch_size_of(call.batch) or 0, MOST_PARTS)
        if size < 3 or not self.first(str(whole or "")):
            return ""
        many = self._on_all_ranks(call, size)
        if many is None or many.totals(whole) != whole:
            return "it calls a metric with a whole number that is a sum over parts of a batch by chance"
        return ""

    def _on_all_ranks(self, call: Call, count: int) -> Trial | None:
        """A trial; None where it fails on any rank, as so few samples may be no batch to this step."""
        found, error = None, ""
        try:
            found = self._trial(call, count)
        except (StepError, PartitionError, StepBroken) as reason:
            error = type(reason).__name__
        return None if self.first(error) else found

    def first(self, text: str) -> str:
        """The first text of all ranks that is not empty; collective."""
        rows = [text] * self._group.size()
        dist.all_gather_object(rows, text, group=self._group)
        return next(filter(None, rows), "")


def _measured(joint: Trial, split: Trial, weights: list[float], dtype: torch.dtype) -> tuple[dict[NumberKey, str], str]:
    """How parts make batch sizes, and the numbers given to metrics; and a doubt about another number, or ""."""
    measured: dict[NumberKey, str] = {}
    sizes = joint.sizes()
    for key, parts in split.sizes().items():
        full = sum(sizes.get(key, ()))
        if sum(parts) != full and set(parts) != {full}:
            return {}, f"it {key.place} of {full} for some samples and {parts} for parts of them"
        measured[key] = "sum" if sum(parts) == full else "max"
    for argument in (key for key in split.result.guessed if isinstance(key, Argument)):
        number = joint.totals([argument])[argument]
        of_parts = [each.get(argument, math.nan) for each in split.arguments]
        how = reductions_of(Mean(number, [of_parts]), [[weights]], dtype) if len(of_parts) == len(weights) else []
        # The last number, or the largest, may be any of these by chance.
        if how == ["sum"]:
            measured[argument] = "sum"
        elif "mean" in how and "sum" not in how and _is_telling(number):
            measured[argument] = "mean"
        else:
            made = f"it calls the metric {argument.metric!r} with a number (argument {argument.name})"
            return {}, f"{made}, which is {number:.6g} for some samples and {of_parts} for parts of them"
    return measured, ""


def _differences(one: Trial, other: Trial, rounding: torch.dtype) -> dict[str, str]:
    """What differs between two trials, with a description."""
    found = {}
    left, others = one.left(), other.left()
    for what in dict.fromkeys((*left, *others)):
        if what not in left or what not in others:
            found[what] = f"it {what} for some samples, and does not for halves of them, or reversely"
            continue
        x, y = (torch.as_tensor(value).detach() for value in (left[what], others[what]))
        if x.shape != y.shape:
            found[what] = f"it {what}, which has shape {list(x.shape)} for some samples and {list(y.shape)}"
        elif not is_close(x, y, rounding):
            up_to = "" if x.numel() == 1 else "up to "
            a, b = contrasted(*(float(t.abs().max() if up_to else t) for t in (x, y)))
            found[what] = f"it {what}, which is {up_to}{a} for some samples and {up_to}{b}"
    return {what: f"{text} as combined from halves of them" for what, text in found.items()}


def _logs(key: Key) -> str:
    return f"logs {key[0]!r}" + (f" (call {key[1] + 1})" if key[1] else "")


def _is_telling(number: float) -> bool:
    """Whether equal results for a batch and its halves prove something: whole numbers may be equal by chance."""
    return math.isfinite(number) and number != round(number)
