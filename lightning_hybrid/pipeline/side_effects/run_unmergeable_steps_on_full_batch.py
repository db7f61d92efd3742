"""Steps whose batches are not split: side effects that cannot be joined from microbatches, or another path of code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_hybrid.pipeline.stages.recording_partitioned_into_stages import TraceVariant
from lightning_hybrid.pipeline.stages.select_recorded_trace import Call, TraceCache
from lightning_hybrid.step.batch.split import batch_size_of, sizes_of
from lightning_hybrid.step.objects.cache import BoundedLRUDict
from lightning_hybrid.step.recording.kept import why_not_mergeable

# Batches may come in ever new sizes.
_MAX_REASONS = 512


class UnsplitSteps:
    """Selects the steps of one module whose batches are not split.

    Attributes:
        names: Names of such steps, so far.
    """

    def __init__(self, choice: TraceCache, warn: Callable[[str, str], None]) -> None:
        """Set up on a trace cache; ``warn`` is called once with the name of such a step, and the reason."""
        self.names: set[str] = set()
        self._traces, self._warn = choice, warn
        self._reasons: BoundedLRUDict[tuple[TraceVariant, int | None, bool], str] = BoundedLRUDict(_MAX_REASONS)

    def adopts(
        self,
        call: Call,
        variants: Sequence[TraceVariant],
        batch: Any,
        microbatches: Sequence[Any],
        *,
        is_returned: bool,
    ) -> bool:
        """Whether the batches of a step must not be split, from now on.

        Args:
            call: The call of the step.
            variants: The trace of each microbatch.
            batch: The full batch.
            microbatches: The batch, split.
            is_returned: Whether the output of the step is read.
        """
        for variant, samples in dict.fromkeys(zip(variants, sizes_of(microbatches), strict=True)):
            key = variant, samples, is_returned
            if key not in self._reasons:
                full = self._traces.trace_of_full_batch(call, batch) if variant.recording.appended else None
                self._reasons[key] = why_not_mergeable(
                    variant.recording,
                    samples,
                    full=None if full is None else full.recording,
                    total=batch_size_of(batch),
                    is_returned=is_returned,
                )
            if self._reasons[key]:
                return self.adopt(call.name, self._reasons[key])
        if line := self._branches_at(call, variants, batch, microbatches):
            return self.adopt(
                call.name, f"{line}: a microbatch takes a branch, by its content, that its batch does not take"
            )
        return False

    def adopt(self, name: str, reason: str) -> bool:
        """Split no batch of a step from now on, for this reason; returns True."""
        self._warn(name, reason)
        self.names.add(name)
        return True

    def _branches_at(
        self, call: Call, variants: Sequence[TraceVariant], batch: Any, microbatches: Sequence[Any]
    ) -> str:
        """The first line that a microbatch runs and its batch does not, or reversely, by their content; "" if none.

        A branch by a random number or by state is none: a microbatch takes it as another batch would.
        """
        if call.name not in self._traces.reads_batch:
            return ""
        full = self._traces.trace_of_full_batch(call, batch)
        if full is None:
            return ""
        for variant, microbatch in zip(variants, microbatches, strict=True):
            if _path(variant) != _path(full):  # alone, it draws what the batch draws
                alone = self._traces.trace_of_full_batch(call, microbatch)
                if alone is not None and (others := _path(alone) ^ _path(full)):
                    return min(others)[0]
        return ""


def _path(variant: TraceVariant) -> frozenset[tuple[str, str]]:
    """The operations of the user's code around units, each with its line; how often it runs does not matter."""
    return frozenset((node.line, node.name) for node in variant.recording.graph.nodes)
