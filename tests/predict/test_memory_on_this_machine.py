"""Predicted memory of ranks against what their tensors take: a part of `benchmarks/planner_memory_here.py`."""

import sys
from pathlib import Path

import pytest

_TITLES = [
    "4 microbatches",
    "two replicas, ZeRO-1",
    "two replicas, ZeRO-2, resharded, 4 microbatches",
    "two stages",
    "two context ranks",
]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import planner_memory_here
    finally:
        sys.path.remove(str(BENCHMARKS))
    return planner_memory_here


@pytest.mark.slow
@pytest.mark.parametrize("title", _TITLES)
def test_tensors_of_each_rank_take_what_is_predicted(title, benchmark):
    case = next(case for case in benchmark.CASES if case.title == title)
    predicted = benchmark.predict(case).ranks
    for rank, sizes in enumerate(benchmark.run_apart(benchmark.__file__, title)):
        terms = dict(predicted[rank // case.ranks_per_stage])
        terms.pop("framework")
        assert sum(terms.values()) == pytest.approx(sizes["peak"], rel=0.05), (rank, terms, sizes)
