"""Comparisons of a batch with its microbatches: whether their losses and gradients add up to the batch's.

They do not where an objective mixes samples (contrastive pairs, a term for the full batch). Then microbatches train
another objective than single-process training, as gradient accumulation would. Where the loss is a mean over unmasked
tokens, microbatches weigh by their number of these (``batch.denominators``).

An autograd function may add a gradient of its own, and a hook may clip one by its norm: such backwards are not linear,
so their microbatches need not add up to the batch even where the losses do. Both ways to weigh microbatches
(``pipeline.runtime.gradients``) are tried; where neither gives the gradients of the batch, it is not split.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.batch.denominators import SAMPLES, Count, Mean, error_bound, find_counts
from lightning_hybrid.batch.merge import REDUCTIONS, Argument, Leaf
from lightning_hybrid.batch.metrics import FullBatchMetrics
from lightning_hybrid.batch.split import BatchSplitter, batch_size_of, copied_batch, sizes_of, split, split_unevenly
from lightning_hybrid.errors import is_out_of_memory
from lightning_hybrid.pipeline.frequencies import FrequencyScaling
from lightning_hybrid.pipeline.left import Left, LeftValues, joined_tensors, numbers_of
from lightning_hybrid.pipeline.logs import Key, LogCapture, NumberKey, keyed, size_of
from lightning_hybrid.pipeline.reasons import describe_difference, describe_lost, describe_mixing, describe_scaled
from lightning_hybrid.pipeline.reductions import (
    difference_of,
    is_close,
    is_decided,
    is_same,
    nearest_number,
    nearest_reductions,
    reductions_of,
    rounded_as,
)
from lightning_hybrid.pipeline.runtime.gradients import without_hooks
from lightning_hybrid.pipeline.undone import UndoneRuns, undone_runs
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.recording.units import has_backward_hooks
from lightning_hybrid.step.standins.numbers import is_known
from lightning_hybrid.step.tracing.recording import find_loss

# Relative differences of the gradients of a parameter that rounding may cause; other dtypes are too coarse for a test.
_ROUNDING_OF_GRADIENTS = {torch.float64: 1e-7, torch.float32: 2e-2}
MOST_PARTS = 16  # of a batch whose whole numbers are compared
_LEAST = 1e-2  # gradients smaller than this share of the largest are compared with that share


class LossWeighting(NamedTuple):
    """The weighting of the parts of a batch in its loss."""

    # counts by which parts weigh; several if they have agreed so far; by samples if empty
    counts: tuple[Count, ...] = ()
    # logged keys, and arguments of metrics, that weigh by samples even so
    keys: frozenset[NumberKey] = frozenset()
    # the loss of the batch, and the mean of its parts' losses by samples, if they differ
    differing: tuple[float, float] | None = None
    loss: Mean | None = None  # the losses of the batch and its parts; None where they could not be computed
    # whether parts weigh where their gradients reach a parameter (``ParameterGradients``), as measured; None where both
    # ways to weigh give the gradients of the batch, or were not compared
    scales_gradients: bool | None = None
    # the norms of the gradients of the batch, and of its parts' joint gradients, if no weights give the former
    norms: tuple[float, float] | None = None
    lost: str = ""  # what the batch leaves, and no combination of what its parts leave
    scaled: str = ""  # the line of an embedding that divides gradients by counts over the batch, if there is one
    # how parts make a number of the batch, logged or given to a metric: "mean", "sum", "max" or "min"
    reductions: tuple[tuple[NumberKey, str], ...] = ()
    # in which of these ways it may be, as far as batches have shown
    candidates: tuple[tuple[NumberKey, tuple[str, ...]], ...] = ()
    # other such numbers: the batch's, what parts make nearest to it, and how
    unexplained: tuple[tuple[NumberKey, float, float, str], ...] = ()
    # how parts make a logged number that none of these ways has told yet, or none tells
    nearest: tuple[tuple[Key, str], ...] = ()

    @property
    def mixes(self) -> bool:
        """Whether no weights of parts give the loss of the batch, or its gradients."""
        return (
            bool(self.scaled or self.lost) or self.norms is not None or (self.differing is not None and not self.counts)
        )

    @property
    def undecided(self) -> Mapping[NumberKey, tuple[str, ...]]:
        """The numbers that another batch must explain by its parts: 0, true in all, or of 16 bits and largest too."""
        return {key: how for key, how in self.candidates if len(how) > 1 and not is_decided(how)}

    def with_evidence(self, other: LossWeighting) -> LossWeighting:
        """The same weighting, with what another comparison has shown about numbers."""
        known = dict(self.candidates)
        candidates = {key: tuple(h for h in how if h in known.get(key, how)) or how for key, how in other.candidates}
        candidates = {**known, **candidates}
        decided = {key: how[0] for key, how in candidates.items() if is_decided(how)}
        reductions = {**dict(other.reductions), **dict(self.reductions), **decided}
        nearest = {**dict(self.nearest), **dict(other.nearest)}
        changed = self._replace(candidates=tuple(candidates.items()), reductions=tuple(reductions.items()))
        return changed._replace(nearest=tuple((key, how) for key, how in nearest.items() if key not in reductions))

    def why_unsplit(self) -> str:
        """The warning where no weights are right; empty otherwise."""
        if self.scaled:
            return describe_scaled(self.scaled)
        if self.lost:
            return describe_lost(self.lost)
        if self.norms is not None:
            return describe_difference(self.norms)
        return describe_mixing(self.differing) if self.mixes and self.differing is not None else ""

    def describe(self, batch: Any) -> str:
        """The weighting by a count, for messages, with the place of its tensor in a batch."""
        return f"each microbatch is weighted by its {self.counts[0].describe(batch)}" if self.counts else ""

    def of(self, parts: Sequence[Any], by_samples: Sequence[float]) -> list[float]:
        """The weights of the parts of a batch in its loss; ``by_samples`` where there is no count."""
        return (self.counts and self.counts[0].weights(parts)) or list(by_samples)


def agree_on_weighting(group: dist.ProcessGroup | None, local: LossWeighting) -> LossWeighting:
    """Agree with the ranks of all replicas on the weighting of one step; collective."""
    rows: list[LossWeighting] = [local] * dist.get_world_size(group)
    dist.all_gather_object(rows, local, group=group)
    counted = sorted((row for row in rows if row.counts), key=lambda row: SAMPLES in row.counts)  # the surest first
    found = next((row for row in rows if row.mixes), None) or next(iter(counted), local)
    for row in rows:
        found = found.with_evidence(row)
    ways = {row.scales_gradients for row in rows} - {None}
    return found._replace(scales_gradients=ways.pop() if len(ways) == 1 else None)


class _Result(NamedTuple):
    """What a part of a batch gives: its loss, the dtype of its rounding, numbers that it logs or gives metrics."""

    loss: float
    dtype: torch.dtype
    logs: dict[NumberKey, float]
    left: Left  # what it leaves for other code
    flags: frozenset[Key]  # what it logs as bool


@dataclass(frozen=True)
class Comparison:
    """Runs a step on a batch and on its parts, to compare them. All effects of the step are rolled back.

    A step that draws random numbers, or returns no loss, is not compared. All ranks run it equally often, whatever
    numbers it gives on one of them: in each run, layers and the user's code may communicate.
    """

    root: nn.Module  # the user's module; this rank can run it
    step: Callable[[Any], Any]  # the user's step, of a batch
    randomness: KeyedRandomness  # its generators are restored
    context: Callable[[], AbstractContextManager[Any]]  # entered around each run of the step
    largest: Callable[[int], int]  # returns the largest number of all ranks; collective
    is_fatal: Callable[[Exception], bool]  # whether an error of the step is raised; otherwise nothing is compared
    around_backward: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext  # entered around each backward
    # copies of these are called inside of a step; what they return is no mean over parts
    metrics: FullBatchMetrics = field(default_factory=FullBatchMetrics)
    left: LeftValues = field(default_factory=LeftValues)  # of what the step leaves for other code

    def measure(self, batch: Any, count: int, splitter: BatchSplitter | None) -> LossWeighting:
        """Measure how ``count`` parts of a batch weigh in its loss; by samples also where it cannot be measured.

        Each part begins in the state in which the batch did. Dropout is off, and layers that normalize over samples use
        their running statistics; all modules are in eval mode only if the step draws random numbers otherwise.
        """
        # Copies, since the step may write into its batch.
        partitions = [split(copied_batch(batch), count, splitter)]
        if splitter is None:  # the divisor of a mean may be equal in all parts of an even split
            partitions.append(split_unevenly(copied_batch(batch)))
        batch = copied_batch(batch)
        partitions = [(parts, weights) for parts, weights in partitions if parts]
        runs = [[batch], *(parts for parts, _ in partitions)]
        with FrequencyScaling() as lookups:
            found = self._all_results(runs, count)
        is_lost = self._any_rank(found is None or bool(lookups.line))
        if found is None or lookups.line:
            return LossWeighting(scaled=lookups.line)
        if len(found) < 1 + sum(len(parts) for parts, _ in partitions):
            partitions = partitions[:1]
        dtype = found[0].dtype
        sample_weights = [weights for _, weights in partitions]
        mean = _mean([one.loss for one in found], sample_weights)
        counts, differing = find_counts(mean, batch, partitions, dtype), difference_of(mean, sample_weights, dtype)
        count_weights = [counts[0].weights(parts) or weights for parts, weights in partitions] if counts else []
        weightings = [sample_weights, count_weights] if counts else [sample_weights]
        keys = frozenset[NumberKey].intersection(*(frozenset(one.logs) for one in found))
        keys = frozenset(key for key in keys if math.isfinite(found[0].logs[key]))
        logged = {key: _mean([one.logs[key] for one in found], sample_weights) for key in sorted(keys)}
        hows = {key: reductions_of(each, weightings, dtype) for key, each in logged.items()}
        hows |= {key: [how for how in hows[key] if how in ("max", "min")] for key in found[0].flags & keys}
        single = {key: how[0] for key, how in hows.items() if len(how) == 1 and how[0] in REDUCTIONS}
        single = {key: how for key, how in single.items() if how != "sum" or logged[key].full.is_integer()}
        by_chance = self._coincidences(single, found[0].logs, batch, dtype) if splitter is None and not is_lost else {}
        hows |= {key: [] for key in by_chance}
        # Zeros are of any kind. What is equal in all parts, such as a norm of weights, is their mean.
        reductions = tuple((key, how[0]) for key, how in hows.items() if is_decided(how))
        shown = LossWeighting(reductions=reductions, candidates=tuple((key, tuple(how)) for key, how in hows.items()))
        unexplained = tuple(
            (key, logged[key].full, by_chance[key], single[key])
            if key in by_chance
            else nearest_number(key, logged[key], sample_weights)
            for key in hows
            if not hows[key]
        )
        shown = shown._replace(nearest=nearest_reductions(hows, unexplained))
        lost = self._lost([one.left for one in found], partitions[0], dtype)
        if not counts:
            return _without_leaves(shown._replace(differing=differing, loss=mean, unexplained=unexplained, lost=lost))

        def is_by_samples(key: NumberKey) -> bool:
            by_samples, by_counts = (error_bound(logged[key], each, dtype) for each in (sample_weights, count_weights))
            return not by_samples and bool(by_counts)

        by_samples = frozenset(filter(is_by_samples, keys))
        weighting = LossWeighting(counts, by_samples, differing, mean, reductions=reductions, unexplained=unexplained)
        return _without_leaves(weighting._replace(candidates=shown.candidates, nearest=shown.nearest, lost=lost))

    def _coincidences(
        self, hows: Mapping[NumberKey, str], full: Mapping[NumberKey, float], batch: Any, dtype: torch.dtype
    ) -> dict[NumberKey, float]:
        """The numbers of a batch that few parts of it give in this way, and many do not; with what the latter give.

        Halves often have as many entries above their means as the batch has above its own; single samples have none.
        A half may have as many classes as the batch; and the first entry of a batch is that of its first half.
        """
        if not self._any_rank(bool(hows)):
            return {}
        count = -self.largest(-min(batch_size_of(batch) or 1, MOST_PARTS))  # as many as each rank has samples for
        found = (self._all_results([split(copied_batch(batch), count)[0]], count) if count > 2 else None) or []
        logs = [one.logs for one in found]
        common = [key for key in hows if logs and all(key in each for each in logs)]
        made = {key: float(REDUCTIONS[hows[key]]([each[key] for each in logs])) for key in common}
        return {key: number for key, number in made.items() if not is_same(full[key], number, dtype)}

    def _all_results(self, partitions: Sequence[Sequence[Any]], count: int) -> list[_Result] | None:
        """The results of ``_results`` with all numbers that each part leaves."""
        found = self._results(partitions, count, trains=True)
        found = self._results(partitions, count) if self._any_rank(found is None) else found
        for one, numbers in zip(found, numbers_of([one.left for one in found]), strict=True) if found else ():
            one.logs.update(numbers.items())
        return found

    def _any_rank(self, condition: bool) -> bool:
        return bool(self.largest(int(condition)))

    def _lost(self, left: Sequence[Left], partition: tuple[Sequence[Any], Sequence[float]], dtype: torch.dtype) -> str:
        """A tensor that the batch leaves, and its parts as joined do not; "" if there is none."""
        parts, weights = partition
        for place, one, other in joined_tensors(left[0], left[1 : 1 + len(parts)], weights, sizes_of(parts)):
            if one.shape != other.shape or not is_close(one, other, dtype):
                return f"{place} of shape {list(one.shape)} for a batch"
        return ""

    def _results(
        self, partitions: Sequence[Sequence[Any]], count: int, *, with_graph: bool = False, trains: bool = False
    ) -> list[_Result] | None:
        """The loss and the logged means of each part, partition by partition; None if they cannot be compared.

        A step that fails after the first ``count + 1`` runs leaves complete results of the first two partitions (the
        batch, and its even split) only. One that fails without a graph, as it takes a gradient itself, is run again
        with one.
        """
        found, is_comparable = list[_Result](), True
        with undone_runs(self.root, self.randomness, trains=trains) as before:
            try:
                for parts in partitions:
                    of_parts = []
                    for part in parts:
                        before.undo()
                        self.left.begin()
                        loss, dtype, logs, output = self._run(part, with_graph=with_graph)
                        if not isinstance(loss, Tensor) or loss.numel() != 1:
                            is_comparable = False  # other ranks may have losses, so it goes on
                            continue
                        numbers, flags = _numbers(logs, self.metrics.take_numbers()), _flags(logs)
                        of_parts.append(_Result(float(loss.detach()), dtype, numbers, self.left.of(output), flags))
                    found += of_parts
                is_comparable &= before.are_unchanged()
            except Exception as error:  # the step needs a graph, more samples, or more memory than there is
                if self.is_fatal(error):
                    raise
                is_short = found and (len(found) <= count or not before.are_unchanged())
                is_comparable &= not (is_out_of_memory(error) or is_short)
        if not with_graph and self._any_rank(is_comparable and not found):
            return self._results(partitions, count, with_graph=True, trains=trains)
        return found if found and is_comparable else None

    def _run(self, part: Any, *, with_graph: bool) -> tuple[Any, torch.dtype, LogCapture, Any]:
        """Run the step; its loss, the dtype of its rounding, what it logs, and its output."""
        logs = LogCapture(1)
        self.metrics.take_numbers()  # of a run that has failed
        with (
            torch.set_grad_enabled(with_graph),
            self.context(),
            logs.microbatch(self.root, 0, self.metrics.origin),
            self.metrics.microbatch(0, is_full=False),
        ):
            output = self.step(part)
            loss = find_loss(output)
            return loss, rounded_as(loss) if isinstance(loss, Tensor) else torch.float32, logs, output

    def with_gradients(
        self,
        found: LossWeighting,
        batches: Sequence[tuple[Any, Sequence[Any], list[float]]],
        *,
        is_nonlinear: bool,
        calls_hooks: bool = False,
    ) -> LossWeighting:
        """Add which way to weigh parts gives the gradients of their batch, if code of the user runs in its backward.

        Collective over the ranks of ``largest``: a layer may be gathered from all of them. The step runs in training
        mode without dropout.

        Args:
            found: How parts weigh in the loss.
            batches: Each with its parts and their shares of the samples; the first whose parts all weigh is compared.
            is_nonlinear: Whether the forward leaves code of the user for the backward.
            calls_hooks: Whether hooks on parameters see the gradients of parts; otherwise they see the sum of these.
        """
        weighted = [(batch, parts, samples, found.of(parts, samples)) for batch, parts, samples in batches]
        given = next((each for each in weighted if all(each[3])), weighted[0])
        parameters = [p for p in self.root.parameters() if p.requires_grad]
        is_nonlinear |= any(map(has_backward_hooks, self.root.modules()))
        if calls_hooks:
            is_nonlinear |= any(parameter._backward_hooks for parameter in parameters)
        if not self._any_rank(is_nonlinear and all(given[2])):
            return found
        with undone_runs(self.root, self.randomness, parameters) as runs:
            try:
                with contextlib.nullcontext() if calls_hooks else without_hooks(self.root):
                    compared = self._compared(parameters, runs, *given)
            except Exception as error:  # it needs more samples, or more memory than there is
                if self.is_fatal(error):
                    raise
                return found
        if compared is None or found.mixes:
            return found
        by_losses, by_gradients, norms = compared
        if by_losses or by_gradients:
            return found if by_losses and by_gradients else found._replace(scales_gradients=by_gradients)
        return found._replace(norms=norms)

    def _gradients(self, parameters: Sequence[nn.Parameter], part: Any, seed: float) -> list[Tensor | None]:
        """The gradients in the shapes of the parameters, if the gradient of the loss is ``seed``; none if it is 0."""
        loss, dtype, *_ = self._run(copied_batch(part), with_graph=True)
        if not seed and not (isinstance(loss, Tensor) and loss.requires_grad):
            return []  # it has run as on other ranks; otherwise the loss may be 0 / 0
        if dtype is torch.float16:
            raise TypeError("gradients of half precision are too coarse for a comparison")
        with self.around_backward():
            found = torch.autograd.grad([loss], parameters, [torch.full_like(loss, seed)], allow_unused=True)
        return [one if one is None else one.to_dense() if one.is_sparse else one for one in found] if seed else []

    def _compared(
        self,
        parameters: Sequence[nn.Parameter],
        runs: UndoneRuns,
        batch: Any,
        parts: Sequence[Any],
        samples: Sequence[float],
        losses: Sequence[float],
    ) -> tuple[bool, bool, tuple[float, float]] | None:
        """Whether the weights of losses, and of gradients, give the gradients of the batch; and norms.

        These are the norm of the gradients of the batch, and of its parts' by the better weighting.
        """
        full = self._gradients(parameters, batch, 1.0)
        dtypes = {gradient.dtype for gradient in full if gradient is not None}
        near = max((_ROUNDING_OF_GRADIENTS.get(dtype, math.inf) for dtype in dtypes), default=math.inf)
        if not runs.undo() or near == math.inf:
            return None

        def joined(factors: Sequence[float], seeds: Sequence[float]) -> tuple[float, float] | None:
            """The largest relative error of the gradients of a parameter, and the norm of all of them."""
            sums: list[Tensor | None] = [None] * len(full)
            for part, factor, seed in zip(parts, factors, seeds, strict=True):
                for index, one in enumerate(self._gradients(parameters, part, seed)):
                    if one is not None:
                        before = sums[index]
                        sums[index] = one * factor if before is None else before + one * factor
                if not runs.undo():
                    return None
            largest = max(_norm(one) for one in full)
            errors = [
                _norm(a if b is None else b if a is None else a - b) / (max(_norm(a), _LEAST * largest) or 1.0)
                for a, b in zip(full, sums, strict=True)
            ]
            return max(errors), math.hypot(*map(_norm, sums))

        by_loss = joined([1.0] * len(parts), losses)
        by_gradient = joined(samples, [loss / weight for loss, weight in zip(losses, samples, strict=True)])
        norm = math.hypot(*map(_norm, full))
        if by_loss is None or by_gradient is None or not math.isfinite(norm):
            return None
        return by_loss[0] <= near, by_gradient[0] <= near, (norm, min(by_loss, by_gradient)[1])


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.detach().double().norm())


def _flags(logs: LogCapture) -> frozenset[Key]:
    return frozenset(key for key, entry in keyed(logs.entries()) if entry.is_bool)


def _without_leaves(weighting: LossWeighting) -> LossWeighting:
    """The weighting of a step which does not leave what is unexplained, as its batches are not split then."""
    lost, unexplained = weighting.lost, []
    for each in weighting.unexplained:
        if isinstance(each[0], Leaf):
            lost = lost or f"{each[0].place}{each[0].path}, which is {each[1]:.6g} for a batch"
        else:
            unexplained.append(each)
    return weighting._replace(lost=lost, unexplained=tuple(unexplained))


def _numbers(logs: LogCapture, arguments: Mapping[Argument, float]) -> dict[NumberKey, float]:
    entries = [(key, entry) for key, entry in keyed(logs.entries()) if entry.metric is None and entry.origin is None]
    found: list[tuple[NumberKey, float]] = [(key, entry.values[0]) for key, entry in entries]
    found += [(size_of(key), float(size)) for key, entry in keyed(logs.entries()) for size in entry.sizes if size]
    return {key: number for key, number in (*found, *arguments.items()) if is_known(number)}


def _mean(numbers: list[float], weights: list[list[float]]) -> Mean:
    """The number of a batch with its parts' numbers, partition by partition."""
    remaining = iter(numbers[1:])
    return Mean(numbers[0], [[next(remaining) for _ in of] for of in weights])


def describe_uncompared() -> str:
    """The warning where there is no memory to compare gradients."""
    return (
        "the backward of training_step runs an autograd function or a hook of yours, and there is no memory to compare"
        " the gradients of two samples with those of each: they are trained as if it were linear, or added a gradient"
        " of its own (lightning-hybrid explain-error backward-uncompared)"
    )
