"""Checkpoints in user code, torch's and others: inside units, around several units, with dropout."""

import pytest
import torch
from fairscale.nn.checkpoint import checkpoint_wrapper
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.one_process_pipeline import assert_same_gradients, keyed, pipeline
from models.autograd_functions import ManualCheckpoint


class Block(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.reentrant = reentrant

    def body(self, x):
        return x + self.drop(self.b(torch.tanh(F.dropout(self.a(x), 0.3, self.training))))

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        if self.reentrant == "manual":
            return ManualCheckpoint.apply(self.body, x, *self.parameters())
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Step(nn.Module):
    """Checkpoints each block inside it (``inside``) or two blocks together in the glue (``around``)."""

    def __init__(self, inside=None, around=None):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([Block(None if inside == "fairscale" else inside) for _ in range(4)])
        self.around = around
        if inside == "fairscale":
            self.blocks = nn.ModuleList([checkpoint_wrapper(Block()) for _ in range(4)])

    def two(self, x, first):
        return self.blocks[first + 1](self.blocks[first](x))

    def training_step(self, x):
        h = self.stem(x)
        for first in (0, 2):
            if self.around is None:
                h = self.two(h, first)
            elif self.around == "manual":
                inside = self.blocks[first : first + 2].parameters()
                h = ManualCheckpoint.apply(lambda h, first=first: self.two(h, first), h, *inside)
            else:
                h = checkpoint(self.two, h, first, use_reentrant=self.around)
        return self.head(h).square().mean()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"inside": False},
        {"inside": True},
        {"inside": "manual"},
        {"inside": "fairscale"},
        {"around": False},
        {"around": True},
        {"around": "manual"},
    ],
    ids=str,
)
def test_checkpointed_steps_match_plain_ones(options, num_stages):
    torch.manual_seed(0)
    plain, checkpointed = Step().double(), Step(**options).double()
    for parameter, given in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        parameter.data.copy_(given)
    x = torch.randn(6, 4, dtype=torch.float64)
    randomness = keyed()
    expected = pipeline(plain, lambda: plain.training_step(x), 1, randomness=randomness)
    result = pipeline(checkpointed, lambda: checkpointed.training_step(x), num_stages, randomness=randomness)
    assert torch.equal(result.loss, expected.loss)
    assert_same_gradients(result.grads, expected.grads)
