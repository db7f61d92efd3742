"""Predicted against published peak memory: errors by source, the worst ten, and which runs are called impossible.

PYTHONPATH=. python benchmarks/planner_memory.py
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "published"))

from published_memory import published_memory
from published_runs import PublishedRun, published_layouts

from lightning_hybrid.predict.memory import predict_memory
from lightning_hybrid.predict.plans import Plan, PredictedMemory


def predict(run: PublishedRun) -> PredictedMemory:
    """Predict the memory of a published run."""
    return predict_memory(run.costs, run.layout, run.number_format, run.hardware)


def errors() -> list[tuple[PublishedRun, float, float]]:
    """Return all runs with a known peak, the predicted bytes and the relative error."""
    found = []
    rows = [(run, False) for run in published_layouts() if run.memory is not None]
    for run, counts_tensors in rows + published_memory():
        if run.costs.num_layers < run.layout.num_stages:
            continue  # the source's own sizes exclude each other
        assert run.memory is not None
        predicted = predict(run)
        size = predicted.tensors if counts_tensors else predicted.peak
        found.append((run, size, size / run.memory - 1))
    return found


def misjudged() -> tuple[list[PublishedRun], list[PublishedRun]]:
    """Return the runs that worked and are called impossible, and those that ran out of memory and are accepted.

    Impossible is what does not fit by more than the error bar. Runs whose table does not say what they recompute are
    left out.
    """
    runs = [run for run in published_layouts() if run.costs.num_layers >= run.layout.num_stages]
    runs = [run for run in runs if "recomputation" not in run.derived]
    refused = [run for run in runs if run.worked and not Plan(run.layout, predict(run)).may_fit]
    accepted = [run for run in runs if run.ran_out and predict(run).fits]
    return refused, accepted


def describe(run: PublishedRun) -> str:
    layout = run.layout
    sizes = f"pp={layout.pipeline} dp={layout.data} tp={layout.tensor} zero={layout.zero_stage} mb={layout.microbatch}"
    return f"{run.file}:{run.row} {run.model} {sizes} {layout.recompute} {run.number_format.name}"


def main() -> None:
    found = errors()
    by_group = defaultdict(list)
    for run, _, error in found:
        by_group[run.group.split(" | 20")[0]].append(error)
    print(f"{'mean |error|':>12} {'bias':>7} {'rows':>5}  group")
    for group, values in {"all": [error for _, _, error in found], **by_group}.items():
        print(f"{statistics.mean(map(abs, values)):12.1%} {statistics.mean(values):+7.1%} {len(values):5}  {group}")
    print("\nthe worst ten")
    for run, size, error in sorted(found, key=lambda each: -abs(each[2]))[:10]:
        print(f"{error:+7.1%}  {size / 1e9:.1f} GB of {run.memory / 1e9:.1f} GB measured  {describe(run)}")
    refused, accepted = misjudged()
    for title, runs in (("worked but refused", refused), ("ran out of memory but accepted", accepted)):
        print(f"\n{title}: {len(runs)} of {sum(run.worked == (runs is refused) for run in published_layouts())}")
        for run in runs:
            needed, capacity = predict(run).least, run.hardware.memory
            print(f"  needs {needed / 1e9:.1f} GB of {capacity / 1e9:.1f} GB  {describe(run)}")


if __name__ == "__main__":
    main()
