"""Errors of predicted published runs, corrected by another run of the same model, by the difference of their layouts.

PYTHONPATH=.:benchmarks/published python benchmarks/published/correct_by_one_run.py

Published runs have the time of a step alone: one factor corrects all its terms.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from dataclasses import dataclass

from leave_one_out import groups_of, source_of, usable_runs
from published_runs import PublishedRun

from lightning_hybrid.predict.correction import Correction, LinearCorrection, difference
from lightning_hybrid.predict.plans import PredictedTime
from lightning_hybrid.predict.time import predict_time

LIMITS = (0.6, 1.01, 2.01, 4.01, float("inf"))


@dataclass(frozen=True)
class Predicted:
    """A published run, and what the planner predicts of it."""

    run: PublishedRun
    time: PredictedTime

    @property
    def measured(self) -> float:
        """Seconds of one step."""
        assert self.run.seconds is not None
        return self.run.seconds


def corrected_error(measured: Predicted, other: Predicted, scale: float = 1.0) -> float:
    """Relative error of a prediction that is corrected by a measured run, if both took ``scale`` times as long."""
    factor = LinearCorrection(scale * measured.measured / measured.time.seconds)
    correction = Correction(measured.run.layout, factor, factor, factor)
    return abs(correction.time(other.time, other.run.layout).seconds / (scale * other.measured) - 1)


def model_of(comparison: Predicted) -> str:
    """Runs of one model on one cluster in one source."""
    run = comparison.run
    return f"{source_of(run)} {run.group} {run.hardware.name} {dataclasses.replace(run.costs, name='')}"


def main() -> None:
    """Print the mean errors before and after, for the hardware as described, and for one of half its speed."""
    runs = usable_runs()
    predicted = [Predicted(run, predict_time(run.costs, run.layout, run.number_format, run.hardware)) for run in runs]
    groups = groups_of(predicted, model_of).values()
    pairs = [
        (measured, other, difference(other.run.layout, measured.run.layout))
        for group in groups
        for measured, other in itertools.permutations(group, 2)
        if measured.run.layout != other.run.layout
    ]
    print("| difference of layouts | pairs | predicted | corrected | of half the speed: predicted | corrected |")
    print("|---|---|---|---|---|---|")
    least = 0.0
    for most in LIMITS:
        chosen = [(measured, other) for measured, other, apart in pairs if least < apart <= most]
        errors = (
            [abs(other.time.seconds / other.measured - 1) for _, other in chosen],
            [corrected_error(measured, other) for measured, other in chosen],
            [abs(other.time.seconds / (2 * other.measured) - 1) for _, other in chosen],
            [corrected_error(measured, other, 2.0) for measured, other in chosen],
        )
        means = " | ".join(f"{statistics.fmean(each):.1%}" for each in errors)
        print(f"| {least:g} to {most:g} | {len(chosen)} | {means} |")
        least = most


if __name__ == "__main__":
    main()
