"""The report of a verification: outcome, message and table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_hybrid.text import columns
from lightning_hybrid.verify.records.compare import Difference

Outcome = Literal["same", "refused", "different", "failed"]


@dataclass(frozen=True)
class Report:
    """The comparison of one layout with its reference.

    Attributes:
        layout: Name of the layout.
        outcome: "same"; "refused" with a clear error before any parameter changed; "different"; or "failed".
        message: One sentence that says why, for every outcome but "same".
        first: The first value that differs.
        num_differences: Number of values that differ.
        steps: Number of training steps compared; of a failed run, those before the failure.
        batch: Replicas, microbatches of each, and samples of a microbatch (0 if unknown).
        num_parameters: Number of parameters whose updates were compared.
        num_weak: Number of these whose updates rounding alone changes by more than 1 %.
        floor: The largest relative noise floor of a parameter's update.
        largest: Of the values that are the same but for rounding, the relative difference of the one nearest to its
            limit.
        limit: The relative difference up to which that value counts as the same.
        notes: Further remarks for the user.
        traceback: Of the error that ended a run which failed.
    """

    layout: str
    outcome: Outcome
    message: str = ""
    first: Difference | None = None
    num_differences: int = 0
    steps: int = 0
    batch: tuple[int, int, int] = (0, 0, 0)
    num_parameters: int = 0
    num_weak: int = 0
    floor: float = 0.0
    largest: float = 0.0
    limit: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)
    traceback: str = ""

    def __str__(self) -> str:
        """Outcome, message and notes as text."""
        lines = [f"{self.layout}: {self.outcome}" + (f": {self.message}" if self.message else "")]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def passes(self, *, strict: bool = False) -> bool:
        """Whether the outcome is acceptable: "same", or "refused" unless ``strict``."""
        return self.outcome == "same" or (self.outcome == "refused" and not strict)


def table(reports: list[Report]) -> str:
    """Format all reports as a table."""
    rows = [["layout", "outcome", "batch", "steps", "rounding", "why"]]
    rows += [[r.layout, _outcome(r), _batch(r), str(r.steps), _rounding(r), r.message] for r in reports]
    if not any(report.message for report in reports):
        return "\n".join(columns([row[:-1] for row in rows]))
    return "\n".join(columns(rows, wrapped=5))


def _outcome(report: Report) -> str:
    """The outcome; "same (weak)" if rounding alone changes more than half of the updates by more than 1 %."""
    is_weak = report.outcome == "same" and 2 * report.num_weak > report.num_parameters
    return f"{report.outcome}{' (weak)' * is_weak}"


def _batch(report: Report) -> str:
    """Replicas x microbatches x samples."""
    return " x ".join(str(size or "?") for size in report.batch) if any(report.batch) else ""


def _rounding(report: Report) -> str:
    """The largest difference by rounding of values that are the same, and its limit."""
    if not report.steps or report.outcome != "same":
        return ""
    return f"{report.largest:.1g}, limit {report.limit:.1g}" if report.limit else "none"
