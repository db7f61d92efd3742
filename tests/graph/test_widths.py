"""Chosen widths of stages: against all divisions and all widths."""

import itertools
import random

import pytest

from lightning_hybrid.graph.widths import TIE, Elements, Stages, choose_widths, widths_of


def compositions(total, parts):
    cuts = itertools.combinations(range(1, total), parts - 1)
    return [[b - a for a, b in itertools.pairwise([0, *cut, total])] for cut in cuts]


def all_stages(elements, num_ranks):
    count = len(elements.costs)
    for parts in range(2, min(count, num_ranks) + 1):
        for cut in itertools.combinations(range(1, count), parts - 1):
            for widths in compositions(num_ranks, parts):
                stages = Stages([0, *cut], widths)
                if not any(w > 1 and any(elements.narrow[a:b]) for a, b, w in spans(stages, count)):
                    yield stages


def spans(stages, count):
    return list(zip(stages.starts, [*stages.starts[1:], count], stages.widths, strict=True))


def copies(stages, elements):
    return sum(w * sum(elements.sizes[a:b]) for a, b, w in spans(stages, len(elements.costs)))


def drawn(draw):
    count = draw.randint(1, 7)
    costs = [draw.choice([0, 1, 2, 3, 5, 8, 100]) for _ in range(count)]
    sizes = [draw.choice([1, 2, 3, 50]) * 1e6 for _ in range(count)]
    return Elements(costs, sizes, [draw.random() < 0.2 for _ in range(count)])


def test_all_divisions_and_widths():
    draw, wide = random.Random(0), 0
    for _ in range(400):
        elements, ranks = drawn(draw), draw.randint(2, 6)
        others, chosen = list(all_stages(elements, ranks)), choose_widths(elements, ranks)
        assert (chosen is None) is (not others), elements
        if chosen is None:
            continue
        assert chosen in others, (chosen, elements)
        bound = (1 + TIE) * min(other.slowest(elements.costs) for other in others)
        within = [other for other in others if other.slowest(elements.costs) <= bound]
        assert chosen in within
        assert copies(chosen, elements) == min(copies(other, elements) for other in within)
        wide += not chosen.is_ordinary
    assert wide > 100


@pytest.mark.parametrize(
    "costs, ranks, widths",
    [([3, 1], 4, [3, 1]), ([1] * 8, 4, [1] * 4), ([1, 6, 1], 4, [3, 1]), ([1, 1, 1, 5, 1, 1], 5, None)],
)
def test_known(costs, ranks, widths):
    found = choose_widths(Elements(costs, [1e6] * len(costs)), ranks)
    assert sum(found.widths) == ranks
    assert widths is None or found.widths == widths


def test_widths_of_given_stages():
    assert widths_of(Elements([6, 2], [1, 1]), 4).widths == [3, 1]
    assert widths_of(Elements([6, 2], [1, 1], [True, False]), 4).widths == [1, 3]
    assert widths_of(Elements([6, 2], [1, 1], [True, True]), 4) is None
    assert widths_of(Elements([6, 2, 1], [1, 1, 1]), 2) is None


def test_many_elements_take_little_time():
    draw = random.Random(0)
    elements = Elements([draw.random() for _ in range(600)], [1.0] * 600)
    found = choose_widths(elements, 16)
    assert found.is_ordinary or found.slowest(elements.costs) <= 1.04 * sum(elements.costs) / 16
