"""The bounds on the error of predicted memory over the published runs, which `benchmarks/planner_memory.py` prints."""

import statistics
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def planner_memory():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import planner_memory
    finally:
        sys.path.remove(str(BENCHMARKS))
    return planner_memory


def test_the_mean_error_of_peak_memory_is_at_most_8_percent(planner_memory):
    errors = [error for _, _, error in planner_memory.errors()]
    assert len(errors) >= 115
    assert statistics.mean(map(abs, errors)) <= 0.08
    assert abs(statistics.mean(errors)) <= 0.03


def test_at_most_three_runs_that_worked_are_refused_and_three_that_failed_accepted(planner_memory):
    refused, accepted = planner_memory.misjudged()
    assert len(refused) <= 3, [planner_memory.describe(run) for run in refused]
    assert len(accepted) <= 3, [planner_memory.describe(run) for run in accepted]
