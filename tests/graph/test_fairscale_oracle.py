"""fairscale's block partition (Barany and Grinberg, arXiv 1308.2452) as an oracle for the exact partition."""

import importlib.util
import random
import sys
from pathlib import Path

from lightning_hybrid.graph.partition import balance


def block_partition():
    """Only fairscale's ``solve``: importing its package would import its pipeline too."""
    package = importlib.util.find_spec("fairscale")
    path = Path(package.origin).parent / "nn/pipe/balance/blockpartition.py"
    spec = importlib.util.spec_from_file_location("fairscale_blockpartition", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solve


def largest(costs, starts):
    return max(sum(costs[a:b]) for a, b in zip(starts, [*starts[1:], len(costs)], strict=True))


def test_largest_part_is_at_most_that_of_fairscale():
    solve = block_partition()
    draw = random.Random(0)
    equal = smaller = 0
    for _ in range(300):
        costs = [draw.randint(1, 50) for _ in range(draw.randint(4, 24))]
        parts = draw.randint(2, min(6, len(costs)))
        fairscale_largest = max(map(sum, solve(list(costs), parts)))
        our_largest = largest(costs, balance(costs, parts))
        assert our_largest <= fairscale_largest, f"{costs} in {parts}: {our_largest} > {fairscale_largest}"
        equal, smaller = equal + (our_largest == fairscale_largest), smaller + (our_largest < fairscale_largest)
    assert equal > 100
    assert smaller > 0
