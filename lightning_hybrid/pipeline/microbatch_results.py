"""The results of a step by microbatch (logs, losses, outputs, appended entries), and those of the full batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_hybrid.pipeline.results.log_entry import Entry, Key, keyed
from lightning_hybrid.pipeline.side_effects.join_appended_entries import Rows
from lightning_hybrid.step.batch.merge import Microbatches, join
from lightning_hybrid.step.batch.metrics import FullBatchMetrics, MetricCalls

RUNS_OTHER_LINES, CHANGES_MODULES = 1, 2  # values of ``MicrobatchResults.news``


@dataclass
class MicrobatchResults:
    """The results of a step, by microbatch.

    Attributes:
        weights: Weights of the microbatches by samples.
        loss_weights: Weights of their losses.
        by_samples: Logged keys that weigh by samples even where the loss does not.
        entries: Logged entries, with a value per microbatch; NaN where one has not logged it.
        losses: None where a microbatch has returned none.
        sizes: Numbers of samples.
        outputs: Return values, detached; empty if no code reads them.
        appended: Entries appended to lists of the user's modules.
        news: ``CHANGES_MODULES`` if it has changed the modules by its batch in another way; ``RUNS_OTHER_LINES`` if it
            has run other lines of code than before; else 0.
        calls: The lines of code that it has run.
        checksum: Checksum of the full batch.
        reductions: What logged keys of the batch are of those of the microbatches, where that is known.
        metric_calls: Calls of metrics, which these make with the full batch in the end.
    """

    weights: list[float]
    loss_weights: list[float]
    by_samples: frozenset[Key]
    entries: list[Entry]
    losses: list[float | None]
    sizes: list[int | None]
    outputs: list[Any]
    appended: Rows = field(default_factory=dict)
    news: int = 0
    calls: frozenset[int] = frozenset()
    checksum: int = 0
    reductions: Mapping[Key, str] = field(default_factory=dict)
    metric_calls: MetricCalls = field(default_factory=dict)

    def joined_output(self, step: str) -> Any:
        """The output for the full batch of the step of this name."""
        return join(self.outputs, self.weights, self.sizes, step=step) if self.outputs else None

    @property
    def loss(self) -> float | None:
        """The loss of the full batch; None if no microbatch has one."""
        pairs = zip(self.losses, self.loss_weights, strict=True)
        present = [(loss, weight) for loss, weight in pairs if loss is not None]
        return sum(loss * weight for loss, weight in present if weight) if present else None

    def call_metrics(self, metrics: FullBatchMetrics) -> None:
        """Call the metrics with the full batch, and let entries have the values that they return."""
        metrics.finish_all(Microbatches(self.loss_weights, self.sizes), self.metric_calls)
        value_of = metrics.values()
        for entry in self.entries if self.metric_calls else ():
            if (value := value_of(entry.metric, entry.origin)) is not None:
                entry.values = [value] * len(entry.values)

    def logs(self) -> list[tuple[Entry, float]]:
        """Each entry with its value for the full batch, of the microbatches that have logged it."""
        return [
            (entry, entry.combine(self.weights if key in self.by_samples else self.loss_weights, self.sizes, over))
            for key, entry in keyed(self.entries)
            for over in (self.reductions.get(key, ""),)
        ]
