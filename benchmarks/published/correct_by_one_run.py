"""Errors of predicted published runs, corrected by another run of the same model, by the difference of their layouts.

PYTHONPATH=.:benchmarks/published python benchmarks/published/correct_by_one_run.py

Published runs have the time of a step alone: one factor corrects all its terms.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics

from leave_one_out import Comparison, by_presets, groups_of, source_of, usable_runs

from lightning_hybrid.predict.correction import Correction, LinearCorrection, difference

LIMITS = (0.6, 1.01, 2.01, 4.01, float("inf"))


def corrected_error(measured: Comparison, other: Comparison, scale: float = 1.0) -> float:
    """Relative error of a prediction that is corrected by a measured run, if both took ``scale`` times as long."""
    factor = LinearCorrection(scale * measured.measured / measured.time.seconds)
    correction = Correction(measured.run.layout, factor, factor, factor)
    return abs(correction.time(other.time, other.run.layout).seconds / (scale * other.measured) - 1)


def model_of(comparison: Comparison) -> str:
    """Runs of one model on one cluster in one source."""
    run = comparison.run
    return f"{source_of(run)} {run.group} {run.hardware.name} {dataclasses.replace(run.costs, name='')}"


def main() -> None:
    """Print the mean errors before and after, for the hardware as described, and for one of half its speed."""
    groups = groups_of(by_presets(usable_runs()), model_of).values()
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
