"""A test, without gradients, whether the loss of a batch is the mean of its microbatches' losses.

It is not where an objective mixes samples (contrastive pairs, a term for the whole batch). Then parts of a batch train
another objective than one process does, as gradient accumulation would. Where it is a mean over the tokens that labels
leave, and their like, parts weigh by their number of these (``step.batch_means.counts_in_batch``).
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

from lightning_hybrid.pipeline.results.log_capture import Key, LogCapture, keyed
from lightning_hybrid.pipeline.runtime.step_rollback import StepStart
from lightning_hybrid.randomness.keyed_draws import GeneratorStates, KeyedRandomness
from lightning_hybrid.step.batch.microbatch import BatchSplitter, copied_batch, split, split_unevenly
from lightning_hybrid.step.batch_means.counts_in_batch import Count, Mean, find_counts, worth_finding
from lightning_hybrid.step.tracing.recording import find_loss

# Relative differences that rounding may make, by the kind of numbers.
_ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
_ROUNDING_OF_HALF = 5e-2
_APART = 0.1  # beyond what terms that weigh in several ways make of a loss


class Weighing(NamedTuple):
    """How parts of a batch weigh in the loss of it.

    Attributes:
        counts: By any of these counts, which are the same so far; none by their samples.
        keys: What the step logs that weighs by samples even so, as the batch has shown.
        differing: The loss of the batch, and the mean of its parts' by samples, if they are not the same.
        loss: Of the batch and its parts; None where that could not be tried.
    """

    counts: tuple[Count, ...] = ()
    keys: frozenset[Key] = frozenset()
    differing: tuple[float, float] | None = None
    loss: Mean | None = None

    @property
    def mixes(self) -> bool:
        """Whether no weights of parts give the loss of the batch."""
        return self.differing is not None and not self.counts

    def __str__(self) -> str:
        """For messages."""
        return f"microbatches weigh by what the loss is a mean over: {self.counts[0]}" if self.counts else ""

    def of(self, parts: Sequence[Any], by_samples: Sequence[float]) -> list[float]:
        """The weights of the parts of a batch in its loss."""
        return (self.counts and self.counts[0].weights(parts)) or list(by_samples)


def agreed_by(group: dist.ProcessGroup | None, mine: Weighing) -> Weighing:
    """What the ranks of all replicas have found of one step; collective.

    Args:
        group: These ranks; all if None.
        mine: What this rank has found.
    """
    rows: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, mine, group=group)
    return next((row for row in rows if row.mixes), None) or next((row for row in rows if row.counts), mine)


def weighing_of(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    count: int,
    splitter: BatchSplitter | None,
    randomness: KeyedRandomness,
    context: Callable[[], AbstractContextManager[Any]],
) -> Weighing:
    """How parts of a batch weigh; by their samples also where that cannot be tried.

    Modules evaluate meanwhile, so that they drop nothing and normalize each sample alone; a step that draws random
    numbers even so is not tried, nor one that returns no loss then. Nothing that the step does stays.

    Args:
        root: The user's module; this rank can run it.
        step: The user's step, of a batch.
        batch: The whole batch.
        count: Parts that the batch is cut into.
        splitter: Of the user, for batches.
        randomness: Its generators are left as they were.
        context: Entered around each run of the step.
    """
    # Of copies, since the step may write into its batch.
    partitions = [split(copied_batch(batch), count, splitter)]
    if splitter is None:  # what a mean is taken over may be the same number in all parts of one of them
        partitions.append(split_unevenly(copied_batch(batch)))
    batch = copied_batch(batch)
    partitions = [(parts, weights) for parts, weights in partitions if parts]
    found: list[tuple[Tensor, dict[Key, float]]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(randomness.isolated())
        stack.enter_context(_as_it_was(root))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        before = GeneratorStates(randomness.device)
        try:
            for parts in ([batch], *(parts for parts, _ in partitions)):
                of_parts = []
                for part in parts:
                    logs = LogCapture(1)
                    with torch.no_grad(), context(), logs.microbatch(root, 0):
                        loss = find_loss(step(part))
                    if not isinstance(loss, Tensor) or loss.numel() != 1:
                        return Weighing()
                    of_parts.append((loss, _numbers(logs)))
                found += of_parts
            if not before.still_stand():
                return Weighing()
        except Exception:  # the step asks for gradients, for more samples, or for more memory than there is
            if len(found) <= count or not before.still_stand():
                return Weighing()
            partitions = partitions[:1]
    dtype = found[0][0].dtype
    by_samples = [weights for _, weights in partitions]
    mean = _mean([float(loss) for loss, _ in found], by_samples)
    known, differing = find_counts(mean, batch, partitions, dtype), _differing(mean, by_samples, dtype)
    if not known:
        return Weighing(differing=differing, loss=mean)
    by_count = [known[0].weights(parts) or weights for parts, weights in partitions]

    def is_by_samples(key: Key) -> bool:
        logged = _mean([logs[key] for _, logs in found], by_samples)
        return not worth_finding(logged, by_samples, dtype) and bool(worth_finding(logged, by_count, dtype))

    keys = frozenset[Key].intersection(*(frozenset(logs) for _, logs in found))
    return Weighing(known, frozenset(key for key in keys if is_by_samples(key)), differing, mean)


def _numbers(logs: LogCapture) -> dict[Key, float]:
    means = ((key, entry) for key, entry in keyed(logs.entries()) if entry.how == "mean")
    return {key: entry.values[0] for key, entry in means if math.isfinite(entry.values[0])}


def _mean(numbers: list[float], weights: list[list[float]]) -> Mean:
    """Of the number of a batch, and those of its parts, partition by partition."""
    left = iter(numbers[1:])
    return Mean(numbers[0], [[next(left) for _ in of] for of in weights])


def _differing(loss: Mean, weights: list[list[float]], dtype: torch.dtype) -> tuple[float, float] | None:
    near = _ROUNDING_OF_HALF if torch.is_autocast_enabled() else _ROUNDING.get(dtype, _ROUNDING_OF_HALF)
    for parts, of in zip(loss.parts, weights, strict=True):
        mean = sum(part * weight for part, weight in zip(parts, of, strict=True))
        if math.isfinite(loss.whole) and not math.isclose(loss.whole, mean, rel_tol=near, abs_tol=near * 1e-3):
            return loss.whole, mean
    return None


def outside(loss: Mean, weights: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The loss of a batch and the nearest mean of its parts', if none of several weights nor what lies between fits.

    Args:
        loss: Of the batch, and of the parts of its first partition.
        weights: That may be those of the parts: each stands for one of the terms of the loss.
    """
    known = loss.parts[0]
    means = [sum(one * weight for one, weight in zip(known, of, strict=True) if weight) for of in weights]
    near = min(max(loss.whole, min(means)), max(means))
    return (loss.whole, near) if abs(near - loss.whole) > _APART * abs(loss.whole) else None


def describe_mixing(found: tuple[float, float], then: str = "") -> str:
    """What to tell the user of losses that differ.

    Args:
        found: Of a batch, and the mean of its parts'.
        then: What is done about it; nothing by default.
    """
    then = then or "The mean over microbatches is what training minimises, as with gradient accumulation"
    return (
        f"the objective mixes samples: the loss of a batch is {found[0]:.6g}, the mean of the losses of its parts is"
        f" {found[1]:.6g}. {then}. For a mean over what labels or a mask leave, pass"
        " microbatch_weight=function(microbatch) -> count"
    )


@contextlib.contextmanager
def _as_it_was(root: nn.Module) -> Iterator[None]:
    """The modules evaluate inside, and are afterwards as they were before."""
    modes = [(module, module.training) for module in root.modules()]
    start = StepStart(root, copied=math.inf)
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        start.restore()
        for module, mode in modes:
            module.training = mode
