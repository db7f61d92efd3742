"""Which calls count as draws, and that the count does not depend on the observed modules."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.one_process_pipeline import assert_same_gradients, keyed, pipeline
from lightning_hybrid.randomness.generators import draws, mix
from lightning_hybrid.randomness.keyed import KeyedRandomness


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "expected"),
    [
        ("dropout", (None, 0.5, True), {}, True),
        ("dropout", (None, 0.5, False), {}, False),
        ("dropout", (None, 0.0, True), {}, False),
        ("dropout", (None,), {"p": 0.1, "training": True}, True),
        ("scaled_dot_product_attention", (None, None, None), {}, False),
        ("scaled_dot_product_attention", (None, None, None), {"dropout_p": 0.1}, True),
        ("rand", (3,), {}, True),
        ("add", (1, 2), {}, False),
    ],
)
def test_call_draws_only_if_enabled(name, args, kwargs, expected):
    assert draws(name, args, kwargs) is expected


def test_seeds_are_equal_on_every_machine():
    assert mix(0) == 893442142816765029
    assert mix(1, 2, 3) == 6520558355739401531
    assert mix(-1, 2**64 + 5) == mix(2**64 - 1, 5) == 8594437289314886494


class Quiet(nn.Module):
    """Calls dropout that is switched off before its caller draws."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.off = nn.Dropout(0.0)

    def forward(self, x):
        return self.second(self.off(torch.relu(self.first(x))))


class DrawsInTheGlue(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Quiet() for _ in range(2)])
        self.head = nn.Linear(8, 2)

    def training_step(self, x):
        for block in self.blocks:
            x = F.dropout(block(x), 0.5, training=True)
        return self.head(x).square().mean()


def test_glue_draws_do_not_depend_on_the_units():
    torch.manual_seed(0)
    module = DrawsInTheGlue().double()
    x = torch.randn(4, 8, dtype=torch.float64)

    def step():
        return module.training_step(x)

    one, four = pipeline(module, step, 1, randomness=keyed()), pipeline(module, step, 4, randomness=keyed())
    assert [u for s in one.units for u in s] != [u for s in four.units for u in s]
    assert torch.equal(one.loss, four.loss)
    assert_same_gradients(four.grads, one.grads)


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


def attend_in_the_second_dimension(x):
    layer = nn.MultiheadAttention(4, 2, dropout=0.3).double()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter))
    padding = x[:, :, 0].T > 0.9
    return layer(x, x, x, key_padding_mask=padding)[0]


@pytest.mark.parametrize(
    ("function", "shape", "dim"),
    [
        (lambda x: F.dropout(x, 0.5), (6, 3), 0),
        (lambda x: F.dropout(x.flatten(0, 1), 0.5).view_as(x), (6, 3, 2), 0),
        (lambda x: F.dropout(x, 0.5), (5, 6, 2), 1),
        (lambda x: x + torch.rand(len(x), 3), (6, 3), 0),
        (lambda x: torch.empty_like(x).uniform_() + x, (6, 3), 0),
        (lambda x: torch.normal(x, x.abs()), (6, 3), 0),
        (attend, (6, 2, 4, 3), 0),
        (attend_in_the_second_dimension, (5, 6, 4), 1),
    ],
    ids=["dropout", "tokens", "second", "rand", "in-place", "normal", "attention", "second-attention"],
)
def test_rows_of_a_full_batch_draw_what_they_draw_in_their_microbatches(function, shape, dim):
    x = torch.cos(torch.arange(math.prod(shape), dtype=torch.float64)).reshape(shape)
    randomness, sizes = KeyedRandomness(1, torch.device("cpu")), (3, 2, 1)
    parts = []
    for number, part in enumerate(x.split(sizes, dim)):
        with randomness.isolated(), randomness.microbatch(2, number), randomness.each_draw():
            parts.append(function(part))
    with randomness.isolated(), randomness.microbatch(2, 0), randomness.each_draw():
        plain = function(x)
    full_batch = randomness.microbatch(2, 0), randomness.rows_of_microbatches(2, range(3), sizes)
    with randomness.isolated(), full_batch[0], full_batch[1], randomness.each_draw():
        joined = function(x)
    torch.testing.assert_close(joined, torch.cat(parts, dim))
    assert not torch.allclose(joined, plain)
