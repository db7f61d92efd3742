"""Trials of evaluation steps: whether samples give the numbers that their halves give together.

A standard deviation over samples, a contrastive loss or a prediction that is standardised over its batch do not. The
batches of such a step are not split: it has no backward, so one microbatch costs little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_hybrid.collectives.agreement import StepBroken
from lightning_hybrid.errors import PartitionError, StepError
from lightning_hybrid.pipeline.loss_weights.check_loss_is_microbatch_mean import is_same
from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.select_recorded_trace import Call, ChosenTraces
from lightning_hybrid.pipeline.step_runner_interface_and_results import StepResult
from lightning_hybrid.step.batch.split import BatchSplitter, split
from lightning_hybrid.step.objects.pytree import flatten

# Trials have batch numbers of their own: random numbers depend on them.
_OTHER = 2**40


class EvaluationTrials:
    """Tries each step of evaluation once, on the samples of two microbatches of its first batch."""

    def __init__(self, trial: Callable[[Call, Any, int], StepResult]) -> None:
        """Prepare. Args: trial: Runs a call on a batch in a number of microbatches, and undoes it; collective."""
        self._trial = trial
        self._tried: set[str] = set()

    def differing(self, call: Call, chosen: ChosenTraces, splitter: BatchSplitter | None) -> str:
        """What differs, the same on every rank; "" if nothing does, or the step was tried before.

        Args:
            call: The call of the step.
            chosen: Its microbatches.
            splitter: Splits batches, where the user has passed one.
        """
        count = len(chosen.microbatches)
        if count == 1 or call.name in self._tried:
            return ""
        self._tried.add(call.name)
        some = split(chosen.batch, max(1, count // 2), splitter)[0][0]
        first, second = (dataclasses.replace(call, number=call.number - number) for number in (_OTHER, 2 * _OTHER))
        try:
            whole = self._trial(first, some, 1)
            found = _difference(whole, self._trial(first, some, 2), chosen.variants[0])
            # Random numbers, or a clock: then nothing is known.
            if not found or _difference(whole, self._trial(second, some, 1), chosen.variants[0]):
                return ""
        except (StepError, PartitionError, StepBroken):  # so few samples are no batch to this step
            return ""
        return f"{found} as combined from halves of them"


def _difference(one: StepResult, other: StepResult, variant: TraceVariant) -> str:
    is_rounded = any(value.dtype in ("float16", "bfloat16") for value in variant.recording.graph.values)
    for (entry, a), (_, b) in zip(one.logs, other.logs, strict=False):
        if math.isfinite(b) and not is_same(a, b, torch.float16 if is_rounded else entry.dtype):
            return f"it logs {entry.name!r}, which is {a:.6g} for some samples and {b:.6g}"
    for x, y in zip(*map(_tensors, (one.output, other.output)), strict=False):
        scale, error = (float(t.abs().max()) if t.numel() else 0.0 for t in (x, x - y if x.shape == y.shape else x[:0]))
        if math.isfinite(error) and not is_same(scale + error, scale, torch.float16 if is_rounded else x.dtype):
            return f"what it returns is up to {scale:.6g} for some samples and differs by up to {error:.6g}"
    return ""


def _tensors(output: Any) -> list[Tensor]:
    leaves = [torch.as_tensor(leaf) for leaf in flatten(output)[0] if isinstance(leaf, float | Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]
