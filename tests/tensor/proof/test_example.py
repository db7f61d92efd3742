"""Examples of a proof have few positions, also where there are as many positions as features of a weight."""

import pytest
import torch
from torch import nn

from lightning_hybrid.tensor.proof.example import make_example
from lightning_hybrid.tensor.proof.proof import proof_of

WIDTH = 192


class MixesPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.mix(x.transpose(1, 2)).transpose(1, 2)


def encoder():
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


def shapes(unit, size, *leaves, **others):
    proof = proof_of(unit, leaves, others, size)
    return [tuple(leaf.shape) for leaf in proof.example.leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("length", [200, 2 * WIDTH, WIDTH], ids=["other", "of_the_feed_forward", "of_all_features"])
def test_positions_are_few(length):
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    x = torch.randn(2, length, WIDTH, requires_grad=True)
    samples, positions, width = shapes(encoder(), 2, x)[0]
    assert samples < 10 and positions < 10 and width == WIDTH
    (_, positions, width), of_mask = shapes(encoder(), 2, x, src_mask=mask)
    assert positions < 10 and width == WIDTH and of_mask == (positions, positions)


def test_positions_that_weights_mix_stay():
    x = torch.randn(2, WIDTH, WIDTH, requires_grad=True)
    assert shapes(MixesPositions(), 2, x)[0][1:] == (WIDTH, WIDTH)


def test_units_that_cannot_run_have_no_example():
    x = torch.randn(2, WIDTH, WIDTH, requires_grad=True)
    runs = lambda _: False  # noqa: E731
    assert make_example((x,), {}, encoder(), 2, runs, torch.Generator(), torch.float64) is None
