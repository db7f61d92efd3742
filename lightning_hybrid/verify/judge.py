"""Which reference a layout equals: the plain step on the full batch, or else what is documented to differ from it.

The plain step is the rule. Two things are documented to be otherwise: each replica's loss is that of its own batch, as
under DDP; and an objective that mixes samples is the mean over microbatches, as in gradient accumulation. The latter
counts only where the plain step gives another loss, and both numbers are named. A mean over tokens, or over the entries
of a mask, is no such objective: its microbatches can be weighted, so it must be that of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_hybrid.verify.one_process.pieces import EVALUATIONS, DataSplit
from lightning_hybrid.verify.records.compare import Difference, Margin, compare, is_step_number
from lightning_hybrid.verify.records.record import RunRecord
from lightning_hybrid.verify.references import Reference, are_close, first_loss

_UNWEIGHTED = (
    "other weights of the microbatches make it that of the full batch, as for a mean over the entries of a mask: pass"
    " microbatch_weight=function(microbatch) -> count"
)


@dataclass
class Comparison:
    """A layout beside one reference.

    Attributes:
        reference: The reference.
        differences: The values that differ, the earliest first.
        margins: Those that differ by rounding.
        notes: What the reference has that the plain step on the full batch has not.
        advice: What to do if the layout differs; the end of a sentence.
    """

    reference: Reference
    differences: list[Difference] = field(default_factory=list)
    margins: list[Margin] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: str = ""

    @property
    def is_same(self) -> bool:
        """Whether no value differs but metrics, among them a plain number that a step has logged.

        Such a number may be a mean over microbatches. Where none differs, no metric has a reason to.
        """
        numbers = self.reference.observed.step_numbers
        keys = [difference.key for difference in self.differences]
        is_metric = all(key.what.startswith("metric") for key in keys)
        return not keys or (is_metric and any(is_step_number(key, numbers) for key in keys))


class Judge:
    """Compares one layout with the plain step, and where it differs, with what is documented to differ."""

    def __init__(
        self,
        ranks: Sequence[RunRecord],
        plain: Reference | None,
        data_split: DataSplit,
        pieces: Callable[[bool, bool], Reference],
    ) -> None:
        """Set up the comparison.

        Args:
            ranks: The record of each rank of the layout.
            plain: The plain step on the full batch; None where the replicas' batches cannot be joined to one.
            data_split: How the layout splits the data.
            pieces: Makes the reference that trains, and evaluates, on full batches of replicas or on microbatches.
        """
        self._ranks, self._plain, self._pieces, self._replicas = ranks, plain, pieces, data_split.replicas
        is_split = data_split.num_microbatches != 1
        self._splits_training = is_split or data_split.shares > 1
        self._splits_evaluation = is_split and not data_split.unsplit_steps >= EVALUATIONS
        self._made: dict[tuple[bool, bool], Comparison | None] = {}

    def comparison(self) -> Comparison:
        """The reference that the layout equals; the one with the fewest differences if it equals none."""
        candidates = [] if self._plain is None else [self._compare(self._plain)]
        if not candidates or (candidates[0].differences and self._replicas > 1):
            own = self._with_pieces(True, True)
            if own is not None:
                candidates.append(own)
                self._name(own, candidates[0])
        if self._splits_training and not any(one.is_same for one in candidates):
            split = self._with_pieces(False, True)
            mixing = None if split is None else split.reference.observed.mixing
            if split is not None and mixing is not None and not mixing.is_weighted:
                split.notes.append(str(mixing))
                candidates.append(split)
            elif split is not None and mixing is not None and split.is_same:
                candidates[-1].advice = f"; {mixing}, and {_UNWEIGHTED}"
        best = min(candidates, key=lambda one: (not one.is_same, len(one.differences)))
        if best.is_same and best.differences:
            self._explain(best)
        return best

    def _explain(self, best: Comparison) -> None:
        """Drop plain numbers that steps have logged, where they are means over replicas' batches or microbatches."""
        first = best.differences[0]
        is_split = best is self._made.get((False, True))
        kinds = ((False, False),) if is_split else ((True, True), (True, False), (False, True), (False, False))
        for training, evaluation in kinds:
            exists = self._replicas > 1 if training and evaluation else True
            exists &= (training or self._splits_training) and (evaluation or self._splits_evaluation)
            other = self._with_pieces(training, evaluation) if exists and best.differences else None
            if other is not None:
                differing = {difference.key for difference in other.differences}
                best.differences = [each for each in best.differences if each.key in differing]
        if not best.differences:
            best.notes.append(
                f"{first.key} is {first.reference:.6g} over the full batch, and {first.value:.6g} as the mean over its"
                " parts: plain numbers that a step logs are means over replicas and microbatches"
            )

    def _with_pieces(self, training: bool, evaluation: bool) -> Comparison | None:
        """Compare with a run on full batches of replicas, or on microbatches; None if that does not run."""
        if (training, evaluation) not in self._made:
            reference = self._pieces(training, evaluation)
            failed = reference.failure is not None
            self._made[training, evaluation] = None if failed else self._compare(reference)
        return self._made[training, evaluation]

    def _compare(self, reference: Reference) -> Comparison:
        result = Comparison(reference)
        result.differences = compare(
            self._ranks, reference.observed, reference.noisy, precision=reference.precision, margins=result.margins
        )
        return result

    def _name(self, own: Comparison, plain: Comparison) -> None:
        """Note the first loss over all samples and as the mean over replicas, if they differ."""
        full, mean = (first_loss(one.reference.observed) for one in (plain, own))
        if full is not None and mean is not None and not are_close(full, mean, plain.reference.precision):
            own.notes.append(
                f"each replica's loss is that of its own batch, as under DDP: full batch {full:.6g}, mean of"
                f" {self._replicas} replicas {mean:.6g}"
            )
