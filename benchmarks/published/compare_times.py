"""Predicted step times against the published ones: errors by source, the worst rows, and orders within a day.

PYTHONPATH=.:benchmarks/published python benchmarks/published/compare_times.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from published_runs import PublishedRun, published_layouts
from published_sc21 import published_sc21
from scipy.stats import spearmanr

from lightning_hybrid.predict.plans import PredictedTime
from lightning_hybrid.predict.time import predict_time

TIE = 0.03  # measurements of one layout on one day differ by 2.8 %


@dataclass(frozen=True)
class Comparison:
    """A published run, and what the planner predicts of it."""

    run: PublishedRun
    predicted: PredictedTime

    @property
    def measured(self) -> float:
        """Seconds of one step."""
        assert self.run.seconds is not None
        return self.run.seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted.seconds / self.measured - 1

    def cost(self, seconds: float) -> float:
        """Device-seconds per floating-point operation, by which layouts of unequal models are compared."""
        return seconds * self.run.layout.ranks / (self.run.costs.flops * self.run.layout.batch)


def compare() -> list[Comparison]:
    """Return every published run with a time whose sizes are consistent."""
    runs = [*published_layouts(), *published_sc21()]
    return [
        Comparison(run, predict_time(run.costs, run.layout, run.number_format, run.hardware))
        for run in runs
        if run.seconds is not None and not run.contradictory and run.layout.num_stages <= run.costs.num_layers
    ]


def source_of(comparison: Comparison) -> str:
    """The rows of a table are one source: project, and cluster."""
    run = comparison.run
    project = run.source.split("@")[0]
    if project.startswith("SC'21"):
        return run.group + (", ZeRO-3" if run.layout.zero_stage == 3 else "")
    return f"{project}, {run.hardware.name}"


def errors(comparisons: Sequence[Comparison]) -> np.ndarray:
    """Absolute relative errors."""
    return np.array([abs(each.error) for each in comparisons])


def groups_of(comparisons: Sequence[Comparison], key: Callable[[Comparison], str]) -> dict[str, list[Comparison]]:
    """Comparisons by a key, in order of first occurrence."""
    groups: dict[str, list[Comparison]] = {}
    for each in comparisons:
        groups.setdefault(key(each), []).append(each)
    return groups


def rank_correlation(comparisons: Sequence[Comparison]) -> float:
    """Spearman's, of device-seconds per operation."""
    measured = [each.cost(each.measured) for each in comparisons]
    predicted = [each.cost(each.predicted.seconds) for each in comparisons]
    return float(spearmanr(measured, predicted)[0])


def fastest_is_tied(comparisons: Sequence[Comparison]) -> bool:
    """Whether the measured fastest is, by prediction, within `TIE` of the predicted fastest."""
    fastest = min(comparisons, key=lambda each: each.cost(each.measured))
    best = min(each.cost(each.predicted.seconds) for each in comparisons)
    return fastest.cost(fastest.predicted.seconds) <= best * (1 + TIE)


def layout_text(comparison: Comparison) -> str:
    """The sizes of a layout that are not 1."""
    return size_text(comparison.run)


def size_text(run: PublishedRun) -> str:
    """The same of a run."""
    layout = run.layout
    sizes = {"tp": layout.tensor, "pp": layout.pipeline, "dp": layout.data, "cp": layout.context}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
    if layout.zero_stage:
        words.append(f"ZeRO-{layout.zero_stage}")
    if layout.offload:
        words.append("offload")
    return " ".join([*words, f"microbatch {layout.microbatch}", f"batch {layout.batch}"])


def main() -> None:
    """Print the tables."""
    comparisons = compare()
    known = [each for each in comparisons if each.run.known_shape]
    found = errors(known)
    print(f"{len(known)} runs of known shape: mean {found.mean():.1%}, 95 % under {np.quantile(found, 0.95):.1%}")
    for source, group in groups_of(comparisons, source_of).items():
        found, bias = errors(group), np.mean([each.error for each in group])
        print(f"{source:45} {len(group):4} mean {found.mean():6.1%} median {np.median(found):6.1%} bias {bias:+6.1%}")
    for day, group in groups_of(comparisons, lambda each: each.run.group).items():
        if "prequel" in day and len(group) > 2:
            steps = spearmanr([each.measured for each in group], [each.predicted.seconds for each in group])[0]
            tied = "tied" if fastest_is_tied(group) else "NOT tied"
            print(
                f"{day:70} {len(group):3} order {rank_correlation(group):.2f}, of seconds {steps:.2f}, fastest {tied}"
            )
    for each in sorted(comparisons, key=lambda each: -abs(each.error))[:10]:
        print(f"{each.error:+6.0%} {each.measured:8.2f} s {each.run.model} {layout_text(each)} {each.run.note[:60]}")


if __name__ == "__main__":
    main()
