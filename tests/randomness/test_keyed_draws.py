"""Which calls count as draws, and that the count does not depend on the observed modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.one_process_pipeline import assert_same_gradients, keyed, pipeline
from lightning_hybrid.randomness.random_number_ops import draws


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
