"""Layers that decide by the values of all positions: their sequence stays full, though random examples show nothing."""

import pytest
import torch
from torch.nn import functional as F

from lightning_hybrid.tensor.proof.proof import difference_on_outliers
from lightning_hybrid.tensor.search.unit import plan_unit
from models.tensor_blocks import Block, FusedAttention, tokens

HEADS_EXCHANGED = {"size": 1, "context": 2}
RING = {"size": 1, "context": 3}
BOTH = {"size": 2, "context": 2}
SEQUENCE_PARALLEL = {"size": 2, "sequence_parallel": "tensor"}
LAYOUTS = [HEADS_EXCHANGED, RING, BOTH, SEQUENCE_PARALLEL]
MANY = 50.0  # more than the numbers in a layer of random weights


def limit_of_maximum(x):
    return torch.where(x.abs().max() > MANY, x / 2, x)


def limit_of_root_mean_square(x):
    return x * (MANY / x.detach().pow(2).mean((1, 2), keepdim=True).sqrt().clamp(min=MANY))


def infinite_numbers_removed(x):
    return torch.where(x.isfinite().all(), x, 0.0)


def samples_with_outliers_left_out(x):
    return x.masked_fill((x.abs() > MANY).any(1, keepdim=True), 0.0)


def number_of_outliers(x):
    return x * 2 if len((x.abs() > MANY).nonzero()) else x


def size_of_selection(x):
    return x * 2 if x[x.abs() > MANY].numel() > 3 else x


def running_maximum_from_the_left(x):
    return torch.where(x.cummax(1).values > MANY, x / 2, x)


def running_maximum_from_the_right(x):
    return torch.where(x.flip(1).cummax(1).values.flip(1) > MANY, x / 2, x)


def capacity_of_an_expert(x):
    """Four experts take four tokens each of a sample, and examples have five."""
    tokens_of_experts = F.one_hot(x.detach()[..., :4].argmax(-1), 4)
    number = (tokens_of_experts.cumsum(1) * tokens_of_experts).sum(-1, keepdim=True)
    return x * (number <= 4)


def smallest_maximum(x):
    return torch.where(x.abs().max() < 1e-3, x + 1, x)


THRESHOLDS = [
    *(limit_of_maximum, limit_of_root_mean_square, infinite_numbers_removed, samples_with_outliers_left_out),
    *(number_of_outliers, size_of_selection, running_maximum_from_the_left, running_maximum_from_the_right),
    *(capacity_of_an_expert, smallest_maximum),
]


class Decides(Block):
    """A block that first changes its input; ring attention has no dropout."""

    def __init__(self, change):
        super().__init__(FusedAttention())
        self.change = change

    def forward(self, x):
        self.attn.eval()
        return super().forward(self.change(x))


def planned(change, size=1, context=1, sequence_parallel=None):
    return plan_unit(Decides(change), (tokens(),), {}, size, context=context, sequence_parallel=sequence_parallel)


def of_each_position(x):
    return x * (x.detach().sum(-1, keepdim=True) > 0)


def outliers_of_each_position(x):
    return torch.where(x.abs() > MANY, x / 2, x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [of_each_position, outliers_of_each_position])
def test_decisions_of_each_position_are_sharded(layout, change):
    plan = planned(change, **layout)
    assert plan.positions is not None, plan.lines()


CASES = [(HEADS_EXCHANGED, change) for change in THRESHOLDS]
CASES += [(layout, limit_of_maximum) for layout in LAYOUTS[1:]]
CASES += [pytest.param(layout, change, marks=pytest.mark.slow) for layout in LAYOUTS[1:] for change in THRESHOLDS[1:]]


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "change"), CASES)
def test_decisions_of_all_positions_keep_the_full_sequence(layout, change):
    plan = planned(change, **layout)
    assert plan.positions is None and "of a sequence with" in plan.full_sequence_reason


def reads_in_training(x):
    return x * 2 if x.isnan().any() else x


class ReadsInEval(Decides):
    def forward(self, x):
        return super().forward(x if self.training else reads_in_training(x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("unit", [Decides(reads_in_training), ReadsInEval(of_each_position)], ids=["training", "eval"])
def test_layers_that_read_values_keep_the_full_sequence(layout, unit):
    sizes = {"context": 1, "sequence_parallel": None, **layout}
    plan = plan_unit(unit, (tokens(),), {}, **sizes)
    assert plan.positions is None and not plan.num_sharded
    reasons = [plan.full_sequence_reason, *plan.replicated_reasons.values()]
    assert any("it reads values of tensors" in reason for reason in reasons)


def test_differences_where_both_are_finite_by_the_scale_of_each_position():
    wanted = torch.tensor([[[1e3, 2.0], [1e-2, 0.0], [torch.inf, torch.nan]]], dtype=torch.float64)
    found = wanted.clone()
    found[0, 2] = 5.0
    assert difference_on_outliers(found, wanted, 3, 1) is None
    found[0, 1, 1] = 1e-6  # of the second position 1e-4, of all 1e-9
    assert "relative difference 1.0e-04" in difference_on_outliers(found, wanted, 3, 1)
    assert "shape" in difference_on_outliers(found[:, :2], wanted, 3, 1)
