"""The start table names how layers are split in words of the model: heads, channels, features, and why not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_hybrid.tensor.search.unit import plan_unit

WIDTH = 12


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, positions, width = x.shape
        parts = self.qkv(x).split(width, -1)
        q, k, v = (t.view(batch, positions, self.heads, width // self.heads).transpose(1, 2) for t in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, positions, width))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize(
    ("unit", "shape", "line"),
    [
        (lambda: Attention(4), (2, 3, WIDTH), "qkv -> out (attention split by heads over 2 ranks)"),
        (lambda: Attention(3), (2, 3, WIDTH), "3 heads of qkv are not a multiple of 2 ranks"),
        (lambda: Attention(1), (2, 3, WIDTH), "attention with 1 head is not split over 2 ranks"),
        (convolutions, (2, 3, 8, 8), "0 -> 2 (convolutions split by channels)"),
    ],
    ids=["heads", "three heads", "one head", "convolutions"],
)
def test_words_of_the_model(unit, shape, line):
    torch.manual_seed(0)
    shown = plan_unit(unit(), (torch.randn(shape, requires_grad=True),), {}, 2).lines()
    assert any(line in each for each in shown), shown
