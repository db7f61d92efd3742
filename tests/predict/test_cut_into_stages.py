"""The cut of a model's layers into stages: contiguous, complete, equal where the layers divide."""

import pytest

from lightning_hybrid.predict.costs.cut import cut_into_stages
from lightning_hybrid.predict.costs.layers import LayerCosts, ModelCosts, Product


def model(layers, *, head_flops=0.0):
    def layer(name, count, flops):
        return LayerCosts(name, count=count, products=(Product(1, 1, flops / 2),))

    ends = layer("embedding", 1, 0.0), layer("head", 1, head_flops)
    return ModelCosts("model", (ends[0], layer("layer", layers, 100.0), ends[1]))


def numbers(costs, num_stages):
    return [[number for _, number in stage] for stage in cut_into_stages(costs, num_stages)]


def test_layers_that_divide_are_cut_into_equal_numbers():
    assert numbers(model(8, head_flops=500.0), 4) == [[1, 2], [2], [2], [2, 1]]


def test_the_ends_take_one_layer_fewer_where_that_makes_the_rest_equal():
    assert numbers(model(70), 12) == [[1, 5], *[[6]] * 10, [5, 1]]
    assert numbers(model(11), 4) == [[1, 3], [3], [3], [2, 1]]


def test_other_numbers_are_balanced_by_flops():
    assert numbers(model(9, head_flops=300.0), 4) == [[1, 3], [3], [3], [1]]


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_each_cut_is_contiguous_complete_and_without_empty_stages(num_stages):
    costs = ModelCosts("model", model(5).layers + model(5).layers)
    stages = cut_into_stages(costs, num_stages)
    assert len(stages) == num_stages and all(stages)
    names = [layer.name for stage in stages for layer, number in stage for _ in range(number)]
    assert names == [layer.name for layer in costs.single_layers()]


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="3 layers, too few for 4 stages"):
        cut_into_stages(model(1), 4)


def test_alternating_layers_are_balanced_by_flops():
    first, second = (LayerCosts(name, products=(Product(1, 1, flops),)) for name, flops in (("a", 10), ("b", 20)))
    stages = cut_into_stages(ModelCosts("model", (first, second) * 6), 3)
    assert [sum(number for _, number in stage) for stage in stages] == [4, 4, 4]


def test_flops_can_be_balanced_where_the_layers_would_divide():
    stages = cut_into_stages(model(8, head_flops=120.0), 2, "flops")
    assert [[number for _, number in stage] for stage in stages] == [[1, 5], [3, 1]]
