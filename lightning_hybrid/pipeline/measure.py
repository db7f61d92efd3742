"""A test, without gradients, whether the loss of a batch is the mean of its microbatches' losses.

It is not where an objective mixes samples (contrastive pairs, a term for the full batch). Then microbatches train
another objective than single-process training, as gradient accumulation would. Where the loss is a mean over unmasked
tokens, microbatches weigh by their number of these (``batch.denominators``).
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.batch.denominators import Count, Mean, error_bound, find_counts
from lightning_hybrid.batch.split import BatchSplitter, copied_batch, split, split_unevenly
from lightning_hybrid.errors import is_out_of_memory
from lightning_hybrid.params.gradient_hooks import without_registrations
from lightning_hybrid.pipeline.compare import GradientMatch, describe_difference
from lightning_hybrid.pipeline.logs import Key, LogCapture, keyed
from lightning_hybrid.pipeline.runtime.rollback import StepSnapshot
from lightning_hybrid.randomness.generators import GeneratorStates
from lightning_hybrid.randomness.keyed import KeyedRandomness
from lightning_hybrid.step.tracing.recording import find_loss

# Relative differences that rounding may cause, by dtype.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2


class LossWeighting(NamedTuple):
    """The weighting of the parts of a batch in its loss.

    Attributes:
        counts: Counts by which parts weigh; several if they have agreed so far; by samples if empty.
        keys: Logged keys that weigh by samples even so.
        differing: The loss of the batch, and the mean of its parts' losses by samples, if they differ.
        loss: The losses of the batch and its parts; None where they could not be computed.
        scales_gradients: Whether parts weigh where their gradients reach a parameter (``ParameterGradients``), as
            measured; None where both ways to weigh give the gradients of the batch, or were not compared.
        norms: The norm of the gradients of the batch, and of those of its parts, if no weights give the former.
        reductions: What logged keys of the batch are of those of its parts: their "mean", "sum", "max" or "min".
        unexplained: Logged keys of the batch that are none of these, with their number and the mean of those of parts.
    """

    counts: tuple[Count, ...] = ()
    keys: frozenset[Key] = frozenset()
    differing: tuple[float, float] | None = None
    loss: Mean | None = None
    scales_gradients: bool | None = None
    norms: tuple[float, float] | None = None
    reductions: tuple[tuple[Key, str], ...] = ()
    unexplained: tuple[tuple[Key, float, float], ...] = ()

    @property
    def mixes(self) -> bool:
        """Whether no weights of parts give the loss of the batch, or its gradients."""
        return self.norms is not None or (self.differing is not None and not self.counts)

    def first_with_weights(
        self, batches: Sequence[tuple[Any, Sequence[Any], list[float]]]
    ) -> tuple[Any, Sequence[Any], list[float], list[float]]:
        """The first batch whose parts all weigh in its loss, if any: with its parts, their shares, their weights."""
        weighted = [(batch, parts, samples, self.of(parts, samples)) for batch, parts, samples in batches]
        return next((each for each in weighted if all(each[3])), weighted[0])

    def with_gradients(self, found: GradientMatch | None) -> LossWeighting:
        """Add what a comparison of gradients has found."""
        if found is None or self.mixes or (found.of_losses and found.of_gradients):
            return self
        if found.of_losses or found.of_gradients:
            return self._replace(scales_gradients=found.of_gradients)
        return self._replace(norms=found.norms)

    def why_unsplit(self) -> str:
        """The warning where no weights are right; empty otherwise."""
        if self.norms is not None:
            return describe_difference(self.norms)
        return describe_mixing(self.differing) if self.mixes and self.differing is not None else ""

    def describe(self, batch: Any) -> str:
        """The weighting by a count, for messages, with the place of its tensor in a batch."""
        return f"each microbatch is weighted by its {self.counts[0].describe(batch)}" if self.counts else ""

    def of(self, parts: Sequence[Any], by_samples: Sequence[float]) -> list[float]:
        """The weights of the parts of a batch in its loss; ``by_samples`` where there is no count."""
        return (self.counts and self.counts[0].weights(parts)) or list(by_samples)


class _Result(NamedTuple):
    """What a part of a batch gives: its loss, the dtype of its rounding, and its logged means."""

    loss: float
    dtype: torch.dtype
    logs: dict[Key, float]


def agree_on_weighting(group: dist.ProcessGroup | None, local: LossWeighting) -> LossWeighting:
    """Agree with the ranks of all replicas on the weighting of one step; collective."""
    rows: list[LossWeighting] = [local] * dist.get_world_size(group)
    dist.all_gather_object(rows, local, group=group)
    found = next((row for row in rows if row.mixes), None) or next((row for row in rows if row.counts), local)
    ways = {row.scales_gradients for row in rows} - {None}
    return found._replace(scales_gradients=ways.pop() if len(ways) == 1 else None)


def measure_weighting(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    count: int,
    splitter: BatchSplitter | None,
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
    is_fatal: Callable[[Exception], bool] | None = None,
    origin: Callable[[Any], Any] = lambda value: None,
) -> LossWeighting:
    """Measure the weighting of the parts of a batch; by samples also where it cannot be measured.

    Modules are in eval mode meanwhile, without dropout and with normalization by sample; a step that still draws random
    numbers or returns no loss is not measured. All effects of the step are rolled back.

    Args:
        root: The user's module; this rank can run it.
        step: The user's step, of a batch.
        batch: The full batch.
        count: Number of parts to split the batch into.
        splitter: Splits batches, where the user has passed one.
        randomness: Its generators are restored.
        context: Entered around each run of the step.
        is_fatal: Whether an error of the step is raised; the weighting is not measured otherwise, or if None.
        origin: Returns the call of a metric that has returned a value: such are no means over parts.
    """
    # Copies, since the step may write into its batch.
    partitions = [split(copied_batch(batch), count, splitter)]
    if splitter is None:  # the divisor of a mean may be equal in all parts of an even split
        partitions.append(split_unevenly(copied_batch(batch)))
    batch = copied_batch(batch)
    partitions = [(parts, weights) for parts, weights in partitions if parts]
    how = count, randomness, context, is_fatal, origin
    found = _losses_of(root, step, [[batch], *(parts for parts, _ in partitions)], *how)
    if found is None:
        return LossWeighting()
    if len(found) < 1 + sum(len(parts) for parts, _ in partitions):
        partitions = partitions[:1]
    dtype = found[0].dtype
    sample_weights = [weights for _, weights in partitions]
    mean = _mean([one.loss for one in found], sample_weights)
    keys = frozenset[Key].intersection(*(frozenset(one.logs) for one in found))
    logged = {key: _mean([one.logs[key] for one in found], sample_weights) for key in sorted(keys)}
    hows = {key: _reductions(each, sample_weights, dtype) for key, each in logged.items()}
    # Zeros are of any kind. What is equal in all parts, such as a norm of weights, is their mean.
    reductions = tuple((key, how[0]) for key, how in hows.items() if len(how) == 1 or (how and "sum" not in how))
    unexplained = tuple((key, logged[key].full, _mean_of(logged[key], sample_weights)) for key in hows if not hows[key])
    counts, differing = find_counts(mean, batch, partitions, dtype), _differing(mean, sample_weights, dtype)
    if not counts:
        return LossWeighting(differing=differing, loss=mean, reductions=reductions, unexplained=unexplained)
    count_weights = [counts[0].weights(parts) or weights for parts, weights in partitions]

    def is_by_samples(key: Key) -> bool:
        by_samples, by_counts = (error_bound(logged[key], each, dtype) for each in (sample_weights, count_weights))
        return not by_samples and bool(by_counts)

    unexplained = tuple(each for each in unexplained if error_bound(logged[each[0]], count_weights, dtype))
    by_samples = frozenset(filter(is_by_samples, keys))
    return LossWeighting(counts, by_samples, differing, mean, reductions=reductions, unexplained=unexplained)


def _losses_of(
    root: nn.Module,
    step: Callable[[Any], Any],
    partitions: Sequence[Sequence[Any]],
    count: int,
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
    is_fatal: Callable[[Exception], bool] | None,
    origin: Callable[[Any], Any],
    *,
    with_graph: bool = False,
) -> list[_Result] | None:
    """The loss and the logged means of each part, partition by partition; None if they cannot be compared.

    A step that fails after the first ``count + 1`` runs leaves complete results of the first two partitions (the batch,
    and its even split) only. One that fails without a graph, as it takes a gradient itself, is run again with one.
    """
    found: list[_Result] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(randomness.isolated())
        stack.enter_context(_evaluating(root))
        stack.enter_context(without_registrations(root))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        before = GeneratorStates(randomness.device)
        try:
            for parts in partitions:
                of_parts = []
                for part in parts:
                    logs = LogCapture(1)
                    with torch.set_grad_enabled(with_graph), context(), logs.microbatch(root, 0, origin):
                        loss = find_loss(step(part))
                        if not isinstance(loss, Tensor) or loss.numel() != 1:
                            return None
                        dtype = rounded_as(loss)
                    of_parts.append(_Result(float(loss.detach()), dtype, _numbers(logs)))
                found += of_parts
            if not before.are_unchanged():
                return None
        except Exception as error:  # the step needs a graph, more samples, or more memory than there is
            if is_fatal is not None and is_fatal(error):
                raise
            if is_out_of_memory(error) or (found and (len(found) <= count or not before.are_unchanged())):
                return None
    if not found and not with_graph:
        return _losses_of(root, step, partitions, count, randomness, context, is_fatal, origin, with_graph=True)
    return found or None


def _numbers(logs: LogCapture) -> dict[Key, float]:
    entries = [(key, entry) for key, entry in keyed(logs.entries()) if entry.metric is None and entry.origin is None]
    return {key: entry.values[0] for key, entry in entries if math.isfinite(entry.values[0])}


def _reductions(logged: Mean, weights: list[list[float]], dtype: torch.dtype) -> list[str]:
    """How the parts' numbers may give a logged number of the batch: as "mean", "sum", "max" or "min"."""
    hows: dict[str, Callable[[Sequence[float]], float]] = {"sum": sum, "max": max, "min": min}
    bound = _ROUNDING.get(dtype, _ROUNDING_OF_HALF) * (abs(logged.full) or 1.0)
    found = [how for how, of in hows.items() if all(abs(of(parts) - logged.full) <= bound for parts in logged.parts)]
    return found if error_bound(logged, weights, dtype) else ["mean", *found]


def _mean(numbers: list[float], weights: list[list[float]]) -> Mean:
    """The number of a batch with its parts' numbers, partition by partition."""
    remaining = iter(numbers[1:])
    return Mean(numbers[0], [[next(remaining) for _ in of] for of in weights])


def _mean_of(logged: Mean, weights: list[list[float]]) -> float:
    """The mean over the parts of the first partition."""
    return sum(part * weight for part, weight in zip(logged.parts[0], weights[0], strict=True))


def _differing(loss: Mean, weights: list[list[float]], dtype: torch.dtype) -> tuple[float, float] | None:
    for parts, of in zip(loss.parts, weights, strict=True):
        mean = sum(part * weight for part, weight in zip(parts, of, strict=True))
        if not is_same(loss.full, mean, dtype):
            return loss.full, mean
    return None


def rounded_as(loss: Tensor) -> torch.dtype:
    """The dtype in which a scalar loss was computed; call it inside of autocast."""
    return torch.float16 if torch.is_autocast_enabled(loss.device.type) else loss.dtype


def is_same(full: float, mean: float, dtype: torch.dtype) -> bool:
    """Whether the loss of a batch, of this dtype, equals its microbatches' but for rounding, or is not finite."""
    near = _ROUNDING.get(dtype, _ROUNDING_OF_HALF)
    return not math.isfinite(full) or math.isclose(full, mean, rel_tol=near, abs_tol=near * 1e-3)


def describe_mixing(found: tuple[float, float]) -> str:
    """The warning about an objective that mixes samples: ``found`` is its loss, and the mean of its parts' losses."""
    return (
        f"the objective mixes samples: the loss of a batch is {found[0]:.6g}, the mean of the losses of its"
        f" microbatches or shares is {found[1]:.6g}. So batches are not split. To train the mean over microbatches, as"
        " gradient accumulation does, pass microbatch_weight=function(microbatch) -> its weight, such as a count of"
        " tokens or samples (docs/semantics/losses.md)"
    )


@contextlib.contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Set the modules to eval mode inside, and restore their state afterwards."""
    modes = [(module, module.training) for module in root.modules()]
    start = StepSnapshot(root, copied=math.inf)
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        start.restore()
        for module, mode in modes:
            module.training = mode
