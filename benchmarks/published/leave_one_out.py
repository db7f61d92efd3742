"""Fit the time model to the published runs, and predict each source by what was fitted without it.

What is fitted are constants of all devices and, for each device, the share of the largest products that a step reaches.
Each has a prior from documents of the hardware, a normal distribution of its logarithm, so that none ends at a bound,
and a source without runs of a device is predicted by the prior of that device. A source of n rows counts as the square
root of n, since its rows share what is special to it. Nothing is written: presets and constants are edited by hand.

    PYTHONPATH=.:benchmarks/published python benchmarks/published/leave_one_out.py [--rows]
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from other_runs import other_runs
from published_runs import PublishedRun, published_layouts
from published_sc21 import published_sc21
from scipy.stats import spearmanr

from lightning_hybrid.predict.hardware import Hardware
from lightning_hybrid.predict.layer_time import CONSTANTS
from lightning_hybrid.predict.plans import PredictedTime
from lightning_hybrid.predict.time import predict_time

Item = TypeVar("Item")
# Mean and deviation of the logarithm of each prior.
PRIORS = {
    "half_size": (110, 0.3),  # rows at which a product is no longer limited by memory, and tiles are filled
    "memory_share": (0.83, 0.1),  # copies of large tensors reach 80 to 90 % of the bandwidth
    "backward_moved": (2.5, 0.2),  # gradients are read, saved values read, gradients written, weights' gradients added
    "within_share": (0.6, 0.3),  # of nccl-tests, which run alone
    "waited_kernels": (300, 0.5),  # a module of experts starts some hundred kernels from Python
    "grouped": (0.7, 0.2),  # kernels of grouped products reach 60 to 80 % of one product of as many rows
    "contention": (0.15, 0.5),  # of a collective's time that computation beside it loses
    "bfloat16": (0.85, 0.1),  # of the largest product alone: clocks fall under a constant load
    "float8": (0.85, 0.1),
    "flash2, a100": (0.7, 0.15),  # of products, by the documents that the presets name
    "flash2, h100": (0.42, 0.15),
    "cudnn": (0.7, 0.15),
    "triton, a100": (0.44, 0.15),
    "triton, h100": (0.27, 0.2),
}
DEVICE = (1.0, 0.08)  # of one device or cluster, relative to all
SPREAD = 0.08  # of runs of one source
CONSTANT_NAMES = [name for name in PRIORS if hasattr(CONSTANTS, name)]


@dataclass(frozen=True)
class Fit:
    """What was fitted, by name."""

    values: Mapping[str, float]

    def hardware(self, run: PublishedRun) -> Hardware:
        """Return the cluster of a run with what was fitted."""
        own, values = run.hardware, self.values
        factor = values.get(device_of(run), 1.0)
        shares = {name: values["float8" if name == "float8" else "bfloat16"] * factor for name in own.product_flops}
        kernel, share = next(iter(own.attention.items()))
        attention = values.get("cudnn" if kernel == "cudnn" else f"{kernel}, {device_of(run)[:4]}", share)
        overlap = 1.0 - values["contention"] if own.overlap else 0.0
        return dataclasses.replace(own, efficiency=shares, attention={kernel: attention}, overlap=overlap)

    def seconds(self, run: PublishedRun) -> float:
        """Predict the seconds of one step."""
        return self.compared(run).seconds

    def compared(self, run: PublishedRun) -> Comparison:
        """Predict one step."""
        constants = dataclasses.replace(CONSTANTS, **{name: self.values[name] for name in CONSTANT_NAMES})
        return Comparison(run, predict_time(run.costs, run.layout, run.number_format, self.hardware(run), constants))


def device_of(run: PublishedRun) -> str:
    """Devices and clusters that share a factor: memory makes no difference to it."""
    name = run.hardware.name
    return (
        "h100" if name == "h200" else name.replace("-80", "").replace("-40", "").replace("-16", "").replace("-32", "")
    )


def source_of(run: PublishedRun) -> str:
    """A source is a project: its rows share its software."""
    return run.source.split("@")[0].split(" (arXiv")[0]


def usable_runs() -> list[PublishedRun]:
    """Every published run with a time whose sizes are consistent."""
    runs = [*published_layouts(), *published_sc21(), *other_runs()]
    return [
        run
        for run in runs
        if run.seconds is not None and not run.contradictory and run.layout.num_stages <= run.costs.num_layers
    ]


class Linear:
    """Logarithms of seconds of all runs, linear in logarithms of what is fitted, around one point."""

    def __init__(self, runs: Sequence[PublishedRun], point: Fit) -> None:
        self.runs, self.point = runs, point
        self.log_seconds = np.log([point.seconds(run) for run in runs])
        self.slopes = np.array([self._slope(name) for name in point.values]).T

    def _slope(self, name: str) -> np.ndarray:
        """Change of each run by a value; one of a device changes its own runs alone."""
        step = 0.02
        moved = Fit({**self.point.values, name: self.point.values[name] * math.exp(step)})
        changes = np.zeros(len(self.runs))
        for index, run in enumerate(self.runs):
            if name in (*PRIORS, device_of(run)):
                changes[index] = math.log(moved.seconds(run)) - self.log_seconds[index]
        return changes / step

    def carried_by(self, name: str) -> dict[str, float]:
        """Return the sources by their share of what the runs say about a value, the largest first."""
        column = self.slopes[:, list(self.point.values).index(name)]
        sources = [source_of(run) for run in self.runs]
        left = np.log([run.seconds for run in self.runs]) - self.log_seconds
        said = column**2 / (SPREAD**2 + left**2)
        shares = {source: 0.0 for source in sources}
        for source, value in zip(sources, said, strict=True):
            shares[source] += value / sources.count(source) ** 0.5
        return {
            source: shares[source] / sum(shares.values()) for source in sorted(shares, key=shares.__getitem__)[::-1]
        }

    def fit(self, used: np.ndarray) -> Fit:
        """Return the most probable values by the used runs, with Cauchy's loss: by weights that follow residuals."""
        names = list(self.point.values)
        priors = [PRIORS.get(name, DEVICE) for name in names]
        precision = np.diag([deviation**-2 for _, deviation in priors])
        point = np.log(list(self.point.values.values()))
        to_mean = np.log([mean for mean, _ in priors]) - point
        slopes = self.slopes[used]
        left = (np.log([run.seconds for run in self.runs]) - self.log_seconds)[used]
        sources = [source_of(run) for run, is_used in zip(self.runs, used, strict=True) if is_used]
        counts = np.array([sources.count(source) for source in sources])
        change = np.zeros(len(names))
        for _ in range(30):
            weights = counts**-0.5 / (SPREAD**2 + (left - slopes @ change) ** 2)
            weighted = slopes.T * weights
            change = np.linalg.solve(weighted @ slopes + precision, weighted @ left + precision @ to_mean)
        return Fit(dict(zip(names, map(float, np.exp(point + change)), strict=True)))


def fit(runs: Sequence[PublishedRun], steps: int = 4) -> Fit:
    """Return the most probable values: the linear model's, again around these."""
    found = Fit({name: mean for name, (mean, _) in PRIORS.items()} | {device_of(run): 1.0 for run in runs})
    for _ in range(steps):
        found = Linear(runs, found).fit(np.full(len(runs), True))
    return found


@dataclass(frozen=True)
class Comparison:
    """A published run and its predicted time."""

    run: PublishedRun
    time: PredictedTime

    @property
    def seconds(self) -> float:
        """Predicted seconds of one step."""
        return self.time.seconds

    @property
    def measured(self) -> float:
        """Measured seconds of one step."""
        assert self.run.seconds is not None
        return self.run.seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.seconds / self.measured - 1

    @property
    def kind(self) -> str:
        """Whether it is a mixture of experts."""
        return "mixtures" if self.run.costs.routes else "dense"

    def cost(self, seconds: float) -> float:
        """Device-seconds per floating-point operation, by which layouts of unequal models are compared."""
        return seconds * self.run.layout.ranks / (self.run.costs.flops * self.run.layout.batch)


def mean_error(comparisons: Iterable[Comparison]) -> float:
    """Mean absolute relative error."""
    return float(np.mean([abs(each.error) for each in comparisons]))


def rank_correlation(comparisons: Sequence[Comparison]) -> float:
    """Spearman's, of device-seconds per operation."""
    pairs = [(each.cost(each.measured), each.cost(each.seconds)) for each in comparisons]
    return float(spearmanr(pairs)[0])


def groups_of(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """Items by a key, in order of first occurrence."""
    groups: dict[str, list[Item]] = {}
    for each in items:
        groups.setdefault(key(each), []).append(each)
    return groups


class Evaluation:
    """Fits of all runs, and of all but one source."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.runs = runs

    @cached_property
    def whole(self) -> Fit:
        """The fit of all."""
        return fit(self.runs)

    @cached_property
    def fitted(self) -> list[Comparison]:
        """All runs by the presets and constants of the package, into which the fit of all was written."""
        return by_presets(self.runs)

    @cached_property
    def unseen(self) -> list[Comparison]:
        """Each run by the fit without its source."""
        return self.without(source_of)

    def without(self, place: Callable[[PublishedRun], str]) -> list[Comparison]:
        """Each run by the fit without the runs of its place."""
        places = [place(run) for run in self.runs]
        found = []
        for name in dict.fromkeys(places):
            rest = self.linear.fit(np.array([each != name for each in places]))
            found += [rest.compared(run) for run in self.runs if place(run) == name]
        return found

    @cached_property
    def linear(self) -> Linear:
        """The linear model around the fit of all."""
        return Linear(self.runs, self.whole)


def by_presets(runs: Iterable[PublishedRun]) -> list[Comparison]:
    """Predict runs by the presets and constants of the package."""
    return [Comparison(run, predict_time(run.costs, run.layout, run.number_format, run.hardware)) for run in runs]


def by_source(comparison: Comparison) -> str:
    """Project, device and kind."""
    return f"{source_of(comparison.run)}, {comparison.run.hardware.name}, {comparison.kind}"


def main() -> None:
    """Print the errors."""
    evaluation = Evaluation(usable_runs())
    print({name: round(value, 3) for name, value in evaluation.whole.values.items()})
    tables = evaluation.without(lambda run: f"{source_of(run)}, {device_of(run)}")
    for title, comparisons in (("fitted", evaluation.fitted), ("left out", evaluation.unseen), ("tables", tables)):
        for kind, group in groups_of(comparisons, lambda each: each.kind).items():
            print(f"{title}, {kind}: {len(group)} runs, {mean_error(group):.1%}, order {rank_correlation(group):.2f}")
        print(f"{title}, all: {mean_error(comparisons):.1%}")
    fitted = groups_of(evaluation.fitted, by_source)
    for name, group in groups_of(evaluation.unseen, by_source).items():
        signed = np.mean([each.error for each in group])
        order = rank_correlation(group) if len(group) > 2 else float("nan")
        errors = f"fitted {mean_error(fitted[name]):6.1%}, left out {mean_error(group):6.1%}, signed {signed:+6.1%}"
        print(f"{name:60} {len(group):4} {errors}, order {order:.2f}")
    if "--rows" in sys.argv:
        for each, seen in zip(evaluation.unseen, evaluation.fitted, strict=True):
            run = each.run
            print(f"{each.error:+.0%} {seen.error:+.0%} {by_source(each)} {run.model} {run.layout} {run.note[:40]}")


if __name__ == "__main__":
    main()
