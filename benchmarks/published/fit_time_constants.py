"""Fit the constants of the time model, and each cluster's `efficiency`, to the published runs.

A robust fit (Cauchy's loss) of the logarithm of the step time; a source of n rows counts as the square root of n, since
rows of one source share what is special to it. What is fitted is printed, and not written anywhere. With `--leave-out`,
each source is predicted by constants that were fitted without it; only the efficiency of its cluster is fitted to it.

    PYTHONPATH=.:benchmarks/published python benchmarks/published/fit_time_constants.py [--leave-out]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from compare_times import Comparison, compare, source_of
from published_runs import PublishedRun
from scipy.optimize import least_squares

from lightning_hybrid.predict.layer_time import CONSTANTS, EfficiencyConstants
from lightning_hybrid.predict.time import predict_time

BOUNDS = {
    "half_size": (64, 400),
    "half_inner": (20, 400),
    "misaligned": (0.3, 1),
    "attention": (0.2, 1.5),
    "half_head": (1, 300),
    "attention_backward": (2.2, 3.5),
    "memory_share": (0.3, 0.9),
    "backward_moved": (1.5, 3),
    "within_share": (0.2, 1),
    "between_share": (0.05, 1),
    "gather_share": (0.05, 0.3),
    "gather_nodes": (1, 20),
}
OVERLAP = (0.3, 0.95)  # of clusters whose adapters read the devices' memory
EFFICIENCY = (0.4, 1.5)
_KNOWN: dict[Any, float] = {}  # seconds of a run under constants


def cluster_of(run: PublishedRun) -> str:
    """Clusters with equal devices and links share an efficiency."""
    return run.hardware.name.replace("v100-16", "v100").replace("v100-32", "v100")


def seconds(runs: Sequence[PublishedRun], constants: EfficiencyConstants, fitted: Mapping[str, float]) -> np.ndarray:
    """Predicted seconds of each run."""
    return np.array([_seconds(run, constants, fitted[cluster_of(run)], fitted["overlap"]) for run in runs])


def _seconds(run: PublishedRun, constants: EfficiencyConstants, efficiency: float, overlap: float) -> float:
    """The same of one run; a step of the fit changes the efficiency of a few runs alone."""
    key = (run.file, run.row, constants, efficiency, overlap if run.hardware.overlap else 0.0)
    if key not in _KNOWN:
        hardware = dataclasses.replace(run.hardware, efficiency=efficiency, overlap=key[-1])
        _KNOWN[key] = predict_time(run.costs, run.layout, run.number_format, hardware, constants).seconds
    return _KNOWN[key]


def _weighted_loss(comparisons: Sequence[Comparison]) -> Callable[[np.ndarray], np.ndarray]:
    """Cauchy's loss; a source of n rows counts as the square root of n, since its rows share what is special to it."""
    sources = [source_of(each) for each in comparisons]
    weights = np.array([sources.count(source) ** -0.5 for source in sources])
    return lambda z: weights * np.array([np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2])


def fit(
    comparisons: Sequence[Comparison], fixed: tuple[EfficiencyConstants, float] | None = None
) -> tuple[EfficiencyConstants, dict[str, float]]:
    """Fit constants, overlap and efficiencies; or efficiencies alone, if the others are fixed."""
    runs = [each.run for each in comparisons]
    wanted = np.log([each.measured for each in comparisons])
    clusters = sorted({cluster_of(run) for run in runs})
    free = {} if fixed else {**BOUNDS, "overlap": OVERLAP}
    bounds = np.array([*free.values(), *[EFFICIENCY] * len(clusters)], dtype=float)
    first = [getattr(CONSTANTS, name, 0.66) for name in free] + [0.9] * len(clusters)

    def unpack(values: np.ndarray) -> tuple[EfficiencyConstants, dict[str, float]]:
        by_name = dict(zip([*free, *clusters], map(float, values), strict=True))
        if fixed:
            return fixed[0], {**by_name, "overlap": fixed[1]}
        constants = dataclasses.replace(CONSTANTS, **{name: by_name[name] for name in BOUNDS})
        return constants, by_name

    found = least_squares(
        lambda values: np.log(seconds(runs, *unpack(values))) - wanted,
        np.clip(first, bounds[:, 0] + 1e-6, bounds[:, 1] - 1e-6),
        bounds=bounds.T,
        loss=_weighted_loss(comparisons),
        f_scale=0.08,
        x_scale=np.maximum(first, 1e-3),
        diff_step=1e-3,
        max_nfev=25,
    )
    return unpack(found.x)


def main() -> None:
    """Print the constants, or the errors of sources that the fit has not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leave-out", action="store_true")
    comparisons = compare()
    if not parser.parse_args().leave_out:
        constants, fitted = fit(comparisons)
        print({name: round(getattr(constants, name), 3) for name in BOUNDS})
        print({name: round(value, 3) for name, value in fitted.items() if name not in BOUNDS})
        return
    for source in dict.fromkeys(map(source_of, comparisons)):
        rest = [each for each in comparisons if source_of(each) != source]
        unseen = [each for each in comparisons if source_of(each) == source]
        constants, fitted = fit(rest)
        constants, fitted = fit(unseen, (constants, fitted["overlap"]))
        found = seconds([each.run for each in unseen], constants, fitted)
        error = np.abs(found / [each.measured for each in unseen] - 1)
        print(f"{source:45} {len(unseen):4} runs, mean error {error.mean():.1%}, median {np.median(error):.1%}")


if __name__ == "__main__":
    main()
