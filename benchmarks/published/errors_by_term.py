"""Where the error of predicted step times lies: by term of the prediction, and against the spread of repeated runs.

PYTHONPATH=.:benchmarks/published python benchmarks/published/errors_by_term.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from compare_times import TIE, Comparison, compare, errors, groups_of, source_of
from scipy.optimize import least_squares

SPREAD = 0.2  # repeats that lie further apart than the bound on 95 % of all rows


class Term(NamedTuple):
    """One term of the prediction over a set of runs.

    Attributes:
        name: Of the term.
        runs: Runs of whose predicted step it is over 1 %.
        share: Its mean share of the predicted step over all runs.
        correlation: Of that share with the residual, measured over predicted less 1.
        within: The same, the means of each source taken away from both.
        factor: What the term would be multiplied by, if all terms of over 1 % were fitted to the runs at once.
    """

    name: str
    runs: int
    share: float
    correlation: float
    within: float
    factor: float | None


def residuals(comparisons: Sequence[Comparison]) -> np.ndarray:
    """Measured over predicted seconds, less 1."""
    return np.array([each.measured / each.predicted.seconds - 1 for each in comparisons])


def terms(comparisons: Sequence[Comparison]) -> tuple[list[Term], float]:
    """Return the terms by their share, and the mean error that is left with the factors of all of them."""
    names = sorted({name for each in comparisons for name in each.predicted.terms})
    seconds = np.array([[each.predicted.terms.get(name, 0.0) for name in names] for each in comparisons])
    shares = seconds / seconds.sum(axis=1, keepdims=True)
    found, sources = residuals(comparisons), [source_of(each) for each in comparisons]
    factors, left = _factors(seconds, shares.mean(axis=0) > 0.01, comparisons)
    rows = []
    for index, name in enumerate(names):
        share = shares[:, index]
        if not share.any():
            continue
        plain, within = _correlation(share, found), _correlation(_centered(share, sources), _centered(found, sources))
        rows.append(Term(name, int((share > 0.01).sum()), float(share.mean()), plain, within, factors.get(index)))
    return sorted(rows, key=lambda row: -row.share), left


def repeats(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Groups of runs with the same model, layout, number format and cluster."""
    groups = groups_of(
        comparisons,
        lambda each: repr((each.run.costs, each.run.layout, each.run.number_format, each.run.hardware.name)),
    )
    return [group for group in groups.values() if len(group) > 1]


def spread(group: Sequence[Comparison]) -> float:
    """Largest over smallest measured time of a group, less 1."""
    return max(each.measured for each in group) / min(each.measured for each in group) - 1


def without_unsteady(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """Return the runs without layouts whose repeats lie too far apart, and without their tables on these days, too."""
    unsteady = [each for group in repeats(comparisons) if spread(group) > SPREAD for each in group]
    layouts, days = {id(each) for each in unsteady}, {each.run.group for each in unsteady}
    steady = [each for each in comparisons if id(each) not in layouts]
    return steady, [each for each in comparisons if each.run.group not in days]


def ordered_pairs(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """Return of how many pairs the measured times per operation differ by more than `TIE`, and how many of these the
    prediction orders the same way."""
    costs = [(each.cost(each.measured), each.cost(each.predicted.seconds)) for each in comparisons]
    apart = [(a, b) for a, b in itertools.combinations(costs, 2) if max(a[0], b[0]) > (1 + TIE) * min(a[0], b[0])]
    return len(apart), sum((a[0] < b[0]) == (a[1] < b[1]) and a[1] != b[1] for a, b in apart)


def _factors(
    seconds: np.ndarray, is_fitted: np.ndarray, comparisons: Sequence[Comparison]
) -> tuple[dict[int, float], float]:
    measured = np.array([each.measured for each in comparisons])
    fitted = seconds[:, is_fitted]
    rest: np.ndarray = seconds[:, ~is_fitted].sum(axis=1)

    def difference(factors: np.ndarray) -> np.ndarray:
        return np.log((fitted @ factors + rest) / measured)

    first = np.ones(fitted.shape[1])
    found = least_squares(difference, first, loss="cauchy", f_scale=0.08, bounds=(0.01, 10)).x
    left = float(np.abs(np.exp(difference(found)) - 1).mean())
    return dict(zip(np.flatnonzero(is_fitted).tolist(), found.tolist(), strict=True)), left


def _centered(values: np.ndarray, keys: Sequence[str]) -> np.ndarray:
    means = {key: np.mean([value for value, other in zip(values, keys, strict=True) if other == key]) for key in keys}
    return np.array([value - means[key] for value, key in zip(values, keys, strict=True)])


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.corrcoef(left, right)[0, 1]) if left.any() and right.any() else 0.0


def main() -> None:
    """Print the tables."""
    known = [each for each in compare() if each.run.known_shape]
    found, left = terms(known)
    for term in found:
        factor = "" if term.factor is None else f" factor {term.factor:.2f}"
        print(f"{term.name:20} share {term.share:6.1%} of {term.runs:3} runs,", end="")
        print(f" correlation {term.correlation:+.2f}, within sources {term.within:+.2f}{factor}")
    print(f"mean error {errors(known).mean():.1%}, with these factors {left:.1%}")
    report: Callable[[Sequence[Comparison]], str] = lambda runs: (  # noqa: E731
        f"{len(runs)} runs, mean error {errors(runs).mean():.1%}, 95 % under {np.quantile(errors(runs), 0.95):.1%}"
    )
    for title, runs in zip(("steady layouts", "steady days"), without_unsteady(known), strict=True):
        print(f"{title}: {report(runs)}")
    for source, group in groups_of(known, source_of).items():
        found_repeats = repeats(group)
        if found_repeats:
            largest = max(map(spread, found_repeats))
            print(f"{source:35} {len(found_repeats)} layouts repeated, largest spread {largest:.0%}")
    for day, group in groups_of(compare(), lambda each: each.run.group).items():
        if "prequel" in day and len(group) > 2:
            pairs, right = ordered_pairs(group)
            print(f"{day[-10:]} {right} of {pairs} pairs in order, {2 * right / max(pairs, 1) - 1:+.2f}")


if __name__ == "__main__":
    main()
