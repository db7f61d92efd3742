"""torch.utils.checkpoint in user code: inside units, around several units, with dropout."""

import pytest
import torch
from one_process.in_process import assert_same_gradients, keyed, pipeline
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.reentrant = reentrant

    def body(self, x):
        return x + self.drop(self.b(torch.tanh(self.a(x))))

    def forward(self, x):
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Step(nn.Module):
    """Checkpoints each block inside it (``inside``) or two blocks together in the glue (``around``)."""

    def __init__(self, inside=None, around=None):
        super().__init__()
        self.stem, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList([Block(inside) for _ in range(4)])
        self.around = around

    def two(self, x, first):
        return self.blocks[first + 1](self.blocks[first](x))

    def training_step(self, x):
        h = self.stem(x)
        for first in (0, 2):
            h = self.two(h, first) if self.around is None else checkpoint(self.two, h, first, use_reentrant=self.around)
        return self.head(h).square().mean()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("options", [{"inside": False}, {"inside": True}, {"around": False}, {"around": True}], ids=str)
def test_checkpointed_steps_draw_and_learn_as_plain_ones(options, num_stages):
    torch.manual_seed(0)
    plain, checkpointed = Step().double(), Step(**options).double()
    checkpointed.load_state_dict(plain.state_dict())
    x = torch.randn(6, 4, dtype=torch.float64)
    randomness = keyed()
    expected = pipeline(plain, lambda: plain.training_step(x), 1, randomness=randomness)
    result = pipeline(checkpointed, lambda: checkpointed.training_step(x), num_stages, randomness=randomness)
    assert torch.equal(result.loss, expected.loss)
    assert_same_gradients(result.grads, expected.grads)
